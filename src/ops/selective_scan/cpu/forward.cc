// selective_scan on the CPU, forward.
//
// Floor: one exponential per step, channel and state, about ten instructions of a vector, beside
// which the few bytes per step and channel are nothing.
//
// A lane is a channel, a step its vector. Tiles of 64 steps are loaded as float, in whichever order
// they lie in memory; then a few states at a time go through the tile in registers, the sum C . h
// in memory that stays in the first-level cache. Threads take blocks of channels of a sequence.
//
// Chunked: a sequence is cut into chunks of kChunkSteps. Each gets its last state from a zero first
// one, at the same time; its decay as a whole is exp(A * sum of dt), so that the states between
// chunks follow in one short walk; then each chunk is scanned from its own first state.

#include "core/integers.h"
#include "ops/selective_scan/selective_scan.h"

#ifndef FK_OPS_SELECTIVE_SCAN_CPU_ONCE_
#define FK_OPS_SELECTIVE_SCAN_CPU_ONCE_

#include <algorithm>

#include "ops/selective_scan/cpu/plan.h"

namespace fk::scan {
namespace {

constexpr int64_t kChunkSteps = 256;

// Returns where the chunks of a sequence stand among those of all sequences.
int64_t first_chunk(const Problem& p, int64_t s) {
  if (p.sequences.packed) return p.sequences[s].begin / kChunkSteps + s;
  return s * ceil_div(p.length, kChunkSteps);
}

int64_t chunk_limit(const Problem& p) {
  const int64_t per_row = ceil_div(p.length, kChunkSteps);
  return p.batch * per_row + (p.sequences.packed ? p.sequences.count : 0);
}

// A chunk's memory holds its states and, behind them, its sum of dt, for every block of channels.
struct ChunkMemory {
  int64_t lanes, block, chunk;  // in floats

  ChunkMemory(const Inputs& in, int64_t vector_lanes)
      : lanes(vector_lanes), block((in.p.states + 1) * lanes), chunk(in.blocks(lanes) * block) {}
};

}  // namespace
}  // namespace fk::scan

#endif  // FK_OPS_SELECTIVE_SCAN_CPU_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/selective_scan/cpu/forward.cc"
#include "cpu/foreach_target.h"
#include "ops/selective_scan/cpu/algorithms.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using scan::ForwardJob;

// Holds the steps of a tile, and what is shared by the channels there.
struct Steps {
  int64_t count;
  const float *B, *C;  // of the tile's first step
  int64_t B_step, B_state, C_step, C_state;
};

// Scans kStates states from `n` on over all steps, in registers.
template <int kStates>
HWY_INLINE void walk(const Steps& steps, const InputTile& tile, const Inputs& in,
                     const Block& block, int64_t n, float* state, float* sum) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  Vec h[kStates], decay[kStates];
  for (int i = 0; i < kStates; ++i) {
    h[i] = hn::Load(d, state + (n + i) * lanes);
    decay[i] = load_decay(in, block, n + i);
  }
  for (int64_t t = 0; t < steps.count; ++t) {
    const Vec dt = hn::Load(d, tile.dt + t * lanes), dtu = hn::Load(d, tile.dtu + t * lanes);
    const float* B = steps.B + t * steps.B_step + n * steps.B_state;
    const float* C = steps.C + t * steps.C_step + n * steps.C_state;
    Vec y = hn::Load(d, sum + t * lanes);
    for (int i = 0; i < kStates; ++i) {
      const Vec a = Decay(hn::Mul(dt, decay[i]));
      h[i] = hn::MulAdd(a, h[i], hn::Mul(dtu, hn::Set(d, B[i * steps.B_state])));
      y = hn::MulAdd(h[i], hn::Set(d, C[i * steps.C_state]), y);
    }
    hn::Store(y, d, sum + t * lanes);
  }
  for (int i = 0; i < kStates; ++i) hn::Store(h[i], d, state + (n + i) * lanes);
}

HWY_INLINE void walk_all(const Steps& steps, const InputTile& tile, const Inputs& in,
                         const Block& block, float* state, float* sum) {
  const int64_t states = in.p.states;
  int64_t n = 0;
  for (; n + 4 <= states; n += 4) walk<4>(steps, tile, in, block, n, state, sum);
  for (; n < states; ++n) walk<1>(steps, tile, in, block, n, state, sum);
}

// Scans one state after another by one of the parallel algorithms.
void scan_all(int64_t algorithm, const Steps& steps, const InputTile& tile, const Inputs& in,
              const Block& block, float* state, float* sum) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  Pairs pairs;
  for (int64_t n = 0; n < in.p.states; ++n) {
    const Vec decay = load_decay(in, block, n);
    for (int64_t t = 0; t < steps.count; ++t) {
      const Vec B = hn::Set(d, steps.B[t * steps.B_step + n * steps.B_state]);
      hn::Store(hn::Mul(hn::Load(d, tile.dt + t * lanes), decay), d, pairs.exponent + t * lanes);
      hn::Store(hn::Mul(hn::Load(d, tile.dtu + t * lanes), B), d, pairs.b + t * lanes);
    }
    // The state before the tile comes in through its first step.
    const Vec first = Exp2(d, hn::Load(d, pairs.exponent));
    hn::Store(hn::MulAdd(first, hn::Load(d, state + n * lanes), hn::Load(d, pairs.b)), d, pairs.b);
    if (algorithm == kBlellochScan) {
      scan_blelloch(pairs, steps.count);
    } else if (algorithm == kHillisSteeleScan) {
      scan_hillis_steele(pairs, steps.count);
    } else {
      scan_cumsum(pairs, steps.count);
    }
    for (int64_t t = 0; t < steps.count; ++t) {
      const Vec C = hn::Set(d, steps.C[t * steps.C_step + n * steps.C_state]);
      const Vec y = hn::MulAdd(hn::Load(d, pairs.b + t * lanes), C, hn::Load(d, sum + t * lanes));
      hn::Store(y, d, sum + t * lanes);
    }
    hn::Store(hn::Load(d, pairs.b + (steps.count - 1) * lanes), d, state + n * lanes);
  }
}

Steps steps_of(const Inputs& in, int64_t batch, int64_t group, int64_t step, int64_t count) {
  return {count,
          in.shared(in.B, batch, group) + step * in.B.step,
          in.shared(in.C, batch, group) + step * in.C.step,
          in.B.step,
          in.B.state,
          in.C.step,
          in.C.state};
}

// Makes y of a tile from `sum`: applies the gate, adds the residual, and stores it.
HWY_INLINE void finish_tile(const ForwardJob& job, const Block& block, int64_t batch, int64_t step,
                            int64_t count, float* sum, float* z) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  if (job.in.z.data != nullptr) {
    load_tile(cpu::tile_rows(job.in.z, batch, step, block.first), count, block.count, z);
    for (int64_t i = 0; i < count * lanes; i += lanes) {
      hn::Store(hn::Mul(hn::Load(d, sum + i), Silu(d, hn::Load(d, z + i))), d, sum + i);
    }
  }
  if (job.residual.data != nullptr) {
    load_tile(cpu::tile_rows(job.residual, batch, step, block.first), count, block.count, z);
    for (int64_t i = 0; i < count * lanes; i += lanes) {
      hn::Store(hn::Add(hn::Load(d, sum + i), hn::Load(d, z + i)), d, sum + i);
    }
  }
  store_tile(sum, count, block.count, cpu::tile_rows(job.y, batch, step, block.first));
  if (job.norm.wanted()) job.norm.stored(batch * job.in.p.length + step, count, block.count);
}

// Scans the steps [begin, end) of a block of channels, from `state`, which is moved on.
void scan_steps(const ForwardJob& job, const Block& block, int64_t batch, int64_t begin,
                int64_t end, float* state) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  const Inputs& in = job.in;
  const int64_t spacing = job.checkpoints ? in.p.spacing : 0;
  const Vec skip = load_parameter(in.D, block);
  InputTile tile;
  alignas(64) float sum[kTile];
  alignas(64) float z[kTile];
  for (int64_t step = begin, next; step < end; step = next) {
    next = std::min(step + kTileSteps, end);
    if (spacing > 0) next = std::min(next, (step / spacing + 1) * spacing);
    const Steps steps = steps_of(in, batch, block.group, step, next - step);
    load_inputs(in, block, batch, step, steps.count, &tile);
    for (const StepView* v : {&in.u, &in.delta, &in.z, &job.residual, &job.y}) {
      if (v->data != nullptr) {
        prefetch_next(cpu::tile_rows(*v, batch, step, block.first), steps.count);
      }
    }
    for (int64_t i = 0; i < steps.count * lanes; i += lanes) {
      hn::Store(hn::Mul(skip, hn::Load(d, tile.u + i)), d, sum + i);
    }
    if (job.algorithm == kSequentialScan || job.algorithm == kChunkedScan) {
      walk_all(steps, tile, in, block, state, sum);
    } else {
      scan_all(job.algorithm, steps, tile, in, block, state, sum);
    }
    if (job.y.data != nullptr) finish_tile(job, block, batch, step, steps.count, sum, z);
    if (spacing > 0 && next % spacing == 0) {
      const Tensor& c = job.checkpoints;
      const TileRows rows{c.data, c.dtype, c.stride(2), c.stride(3)};
      store_tile(state, in.p.states, block.count,
                 rows.at(batch * c.stride(0) + (next / spacing - 1) * c.stride(1) +
                         block.first * c.stride(3)));
    }
  }
}

void store_last_state(const ForwardJob& job, const Block& block, int64_t sequence,
                      const float* state) {
  const Tensor& t = job.last_state;
  if (!t) return;
  const TileRows rows{t.data, t.dtype, t.stride(2), t.stride(1)};
  store_tile(state, job.in.p.states, block.count,
             rows.at(sequence * t.stride(0) + block.first * t.stride(1)));
}

int64_t vector_lanes() { return hn::Lanes(F32()); }

// Scans the items [begin, end), a sequence and a block of channels each.
void scan_items(const ForwardJob& job, int64_t begin, int64_t end) {
  alignas(64) float state[kMaxScanStates * kMaxLanes];
  const int64_t lanes = hn::Lanes(F32()), blocks = job.in.blocks(lanes);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t s = item / blocks;
    const Block block(job.in, lanes, item % blocks);
    const SequenceSteps sequence = job.in.p.sequences[s];
    load_initial_state(job.in, block, s, state);
    scan_steps(job, block, sequence.batch, sequence.begin, sequence.end, state);
    store_last_state(job, block, s, state);
  }
}

// ---- Chunked --------------------------------------------------------------------------------

// Describes a chunk of a sequence, for one block of channels.
struct Chunk {
  int64_t s, batch, begin, end;
  bool last;
  Block block;
  float* state;  // then one vector: the sum of dt

  Chunk(const ForwardJob& job, int64_t item)
      : block(job.in, hn::Lanes(F32()), item % job.in.blocks(hn::Lanes(F32()))) {
    const scan::Problem& p = job.in.p;
    const int64_t lanes = hn::Lanes(F32()), blocks = job.in.blocks(lanes);
    const int64_t chunks = ceil_div(p.length, scan::kChunkSteps);
    const int64_t number = item / blocks % chunks;
    s = item / blocks / chunks;
    const SequenceSteps sequence = p.sequences[s];
    batch = sequence.batch;
    begin = std::min(sequence.begin + number * scan::kChunkSteps, sequence.end);
    end = std::min(begin + scan::kChunkSteps, sequence.end);
    last = end == sequence.end;
    const scan::ChunkMemory memory(job.in, lanes);
    state = job.chunk_states + (scan::first_chunk(p, s) + number) * memory.chunk +
            item % blocks * memory.block;
  }
};

// Finds the last state of each chunk from a first one of 0, and its sum of dt.
void scan_chunks_alone(const ForwardJob& job, int64_t first, int64_t last) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), states = job.in.p.states;
  InputTile tile;
  alignas(64) float sum[kTile] = {};
  for (int64_t item = first; item < last; ++item) {
    const Chunk chunk(job, item);
    if (chunk.begin == chunk.end || chunk.last) continue;
    std::fill_n(chunk.state, states * lanes, 0.0f);
    Vec total = hn::Zero(d);
    for (int64_t step = chunk.begin; step < chunk.end; step += kTileSteps) {
      const int64_t count = std::min(kTileSteps, chunk.end - step);
      load_inputs(job.in, chunk.block, chunk.batch, step, count, &tile);
      for (int64_t t = 0; t < count; ++t) total = hn::Add(total, hn::Load(d, tile.dt + t * lanes));
      walk_all(steps_of(job.in, chunk.batch, chunk.block.group, step, count), tile, job.in,
               chunk.block, chunk.state, sum);
    }
    hn::Store(total, d, chunk.state + states * lanes);
  }
}

// Finds the first state of each chunk, from those before it. Items are as in scan_items.
void join_chunks(const ForwardJob& job, int64_t first, int64_t last) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), states = job.in.p.states, blocks = job.in.blocks(lanes);
  const scan::ChunkMemory memory(job.in, lanes);
  alignas(64) float initial[kMaxScanStates * kMaxLanes];
  for (int64_t item = first; item < last; ++item) {
    const int64_t s = item / blocks;
    const Block block(job.in, lanes, item % blocks);
    const SequenceSteps sequence = job.in.p.sequences[s];
    const int64_t chunks = ceil_div(sequence.end - sequence.begin, scan::kChunkSteps);
    float* chunk = job.chunk_states + scan::first_chunk(job.in.p, s) * memory.chunk +
                   item % blocks * memory.block;
    load_initial_state(job.in, block, s, initial);
    if (chunks == 0) store_last_state(job, block, s, initial);
    for (int64_t n = 0; n < states; ++n) {
      const Vec decay = load_decay(job.in, block, n);
      Vec h = hn::Load(d, initial + n * lanes);
      for (int64_t c = 0; c < chunks; ++c) {
        float* at = chunk + c * memory.chunk;
        const Vec alone = hn::Load(d, at + n * lanes);
        hn::Store(h, d, at + n * lanes);
        if (c + 1 == chunks) break;
        const Vec a = Exp2(d, hn::Mul(decay, hn::Load(d, at + states * lanes)));
        h = hn::MulAdd(a, h, alone);
      }
    }
  }
}

void scan_chunks(const ForwardJob& job, int64_t first, int64_t last) {
  for (int64_t item = first; item < last; ++item) {
    const Chunk chunk(job, item);
    if (chunk.begin == chunk.end) continue;
    scan_steps(job, chunk.block, chunk.batch, chunk.begin, chunk.end, chunk.state);
    if (chunk.last) store_last_state(job, chunk.block, chunk.s, chunk.state);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {
namespace {

FK_CPU_EXPORT(vector_lanes);
FK_CPU_EXPORT(scan_items);
FK_CPU_EXPORT(scan_chunks_alone);
FK_CPU_EXPORT(join_chunks);
FK_CPU_EXPORT(scan_chunks);

struct Memory {
  scan::Parameters parameters;
  OutputNorm norm;
  float* chunk_states;

  Memory(const SelectiveScanFwd& a, WorkspaceParts& parts)
      : parameters(a, parts), norm(a, a.y, a.u.dtype, a.u.size(2), scan::kTileSteps, parts) {
    const scan::Problem p = scan::problem_of(a);
    // Counts the channels of a group in whole vectors.
    const int64_t channels = p.groups * (p.channels_per_group() + kMaxLanes - 1);
    const bool chunked = a.algorithm == kChunkedScan || a.algorithm == kAutoScan;
    chunk_states = parts.take(chunked ? scan::chunk_limit(p) * channels * (p.states + 1) : 0);
  }
};

}  // namespace

size_t workspace(const SelectiveScanFwd& a) {
  WorkspaceParts parts;
  const Memory memory(a, parts);
  return parts.bytes();
}

Status run(const SelectiveScanFwd& a, const Exec& exec) {
  WorkspaceParts parts(exec.workspace());
  const Memory memory(a, parts);
  scan::ForwardJob job{
      {},        memory.norm, step_view(memory.norm.y()), step_view(a.residual), {}, {},
      kAutoScan, nullptr};
  prepare_inputs(a, memory.parameters, exec, &job.in);
  memory.norm.begin();
  job.last_state = a.last_state;
  job.checkpoints = a.checkpoints;
  job.chunk_states = memory.chunk_states;
  const scan::Problem& p = job.in.p;
  const int64_t lanes = FK_CPU_DISPATCH(vector_lanes)(), blocks = job.in.blocks(lanes);
  const int64_t items = p.sequences.count * blocks;
  // This is one item, and long: several threads can only share it by its steps.
  constexpr int64_t kLong = 8 * scan::kChunkSteps;
  job.algorithm = a.algorithm;
  if (a.algorithm == kAutoScan) {
    job.algorithm = items == 1 && p.length >= kLong ? kChunkedScan : kSequentialScan;
  }
  // So many steps and states are worth waking a thread for.
  constexpr int64_t kGrain = 8192;
  if (job.algorithm != kChunkedScan) {
    const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, p.length * p.states));
    const auto kernel = FK_CPU_DISPATCH(scan_items);
    exec.parallel_for(items, grain, [&](int64_t b, int64_t e) { kernel(job, b, e); });
    return {};
  }
  const int64_t chunks = ceil_div(p.length, scan::kChunkSteps);
  const int64_t grain = std::max<int64_t>(1, kGrain / (scan::kChunkSteps * p.states));
  const auto alone = FK_CPU_DISPATCH(scan_chunks_alone), all = FK_CPU_DISPATCH(scan_chunks);
  const auto join = FK_CPU_DISPATCH(join_chunks);
  exec.parallel_for(items * chunks, grain, [&](int64_t b, int64_t e) { alone(job, b, e); });
  exec.parallel_for(items, 16, [&](int64_t b, int64_t e) { join(job, b, e); });
  exec.parallel_for(items * chunks, grain, [&](int64_t b, int64_t e) { all(job, b, e); });
  return {};
}

}  // namespace fk::cpu
#endif  // HWY_ONCE
