// selective_scan on the CPU, backward.
//
// Floor: the forward's exponential per step, channel and state once more, and about as many
// multiply-adds again for the gradients.
//
// From a sequence's end towards its beginning, a tile of 64 steps at a time: the states of the tile
// are computed again from the last one kept before it, then the tile is walked backwards. A few
// states at a time go both ways, so that decays and states in between stay in the first-level
// cache. What is summed over channels (dB, dC) is added up by lane in the second-level cache over
// all blocks of an item, and over lanes once per tile. Where states were kept further apart than a
// tile, those before each tile of an interval are found first, by one more walk through it.
//
// The walk is sequential in time whatever the forward's algorithm.

#include "core/integers.h"
#include "ops/selective_scan/selective_scan.h"

#ifndef FK_OPS_SELECTIVE_SCAN_CPU_BACKWARD_ONCE_
#define FK_OPS_SELECTIVE_SCAN_CPU_BACKWARD_ONCE_

#include "ops/selective_scan/cpu/backward_plan.h"

#endif  // FK_OPS_SELECTIVE_SCAN_CPU_BACKWARD_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/selective_scan/cpu/backward.cc"
#include "cpu/foreach_target.h"
#include "ops/selective_scan/cpu/scan_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using scan::BackwardJob;
using scan::BackwardScratch;

constexpr float kLn2 = 0.693147181f;
constexpr int kStates = 4;  // that go through a tile together

// Holds the tensors of a tile of one block of channels.
struct GradientTile {
  InputTile in;
  alignas(64) float slope[kTile];  // of softplus
  alignas(64) float dy[kTile];
  alignas(64) float z[kTile];
  alignas(64) float gate[kTile];     // sigmoid(z)
  alignas(64) float dg[kTile];       // gradient of C . h + D u
  alignas(64) float out[kTile];      // C . h + D u
  alignas(64) float along[kTile];    // sum over states of dh B
  alignas(64) float through[kTile];  // sum over states of the gradient of dt A, times log2(e) A
  alignas(64) float a[kTile * kStates];
  alignas(64) float h[(kTileSteps + 1) * kMaxLanes * kStates];
};

// Says which part of one tile a block has.
struct TilePlace {
  int64_t batch, step, count;
  const float *B, *C;
  int64_t B_step, B_state, C_step, C_state;

  TilePlace(const Inputs& in, int64_t batch_row, int64_t group, int64_t first, int64_t steps)
      : batch(batch_row),
        step(first),
        count(steps),
        B(in.shared(in.B, batch_row, group) + first * in.B.step),
        C(in.shared(in.C, batch_row, group) + first * in.C.step),
        B_step(in.B.step),
        B_state(in.B.state),
        C_step(in.C.step),
        C_state(in.C.state) {}
};

// Walks states [n, n + kCount) of a tile: forwards from `state`, then backwards from `dstate`,
// which moves on.
template <int kCount>
HWY_INLINE void walk_back(const TilePlace& place, const Inputs& in, const Block& block, int64_t n,
                          const float* state, float* dstate, float* sum_dA,
                          const BackwardScratch& scratch, GradientTile& tile) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), states = in.p.states;
  Vec decay[kCount], h[kCount];
  for (int i = 0; i < kCount; ++i) {
    decay[i] = load_decay(in, block, n + i);
    h[i] = hn::Load(d, state + (n + i) * lanes);
    hn::Store(h[i], d, tile.h + i * lanes);
  }
  for (int64_t t = 0; t < place.count; ++t) {
    const Vec dt = hn::Load(d, tile.in.dt + t * lanes), dtu = hn::Load(d, tile.in.dtu + t * lanes);
    const float* B = place.B + t * place.B_step + n * place.B_state;
    const float* C = place.C + t * place.C_step + n * place.C_state;
    Vec out = hn::Load(d, tile.out + t * lanes);
    for (int i = 0; i < kCount; ++i) {
      const Vec a = Exp2(d, hn::Mul(dt, decay[i]));
      h[i] = hn::MulAdd(a, h[i], hn::Mul(dtu, hn::Set(d, B[i * place.B_state])));
      out = hn::MulAdd(h[i], hn::Set(d, C[i * place.C_state]), out);
      hn::Store(a, d, tile.a + (t * kCount + i) * lanes);
      hn::Store(h[i], d, tile.h + ((t + 1) * kCount + i) * lanes);
    }
    hn::Store(out, d, tile.out + t * lanes);
  }

  Vec dh[kCount], dA[kCount];
  for (int i = 0; i < kCount; ++i) {
    dh[i] = hn::Load(d, dstate + (n + i) * lanes);
    dA[i] = hn::Zero(d);  // of the tile alone: long sums of short ones keep more digits
  }
  for (int64_t t = place.count - 1; t >= 0; --t) {
    const Vec dt = hn::Load(d, tile.in.dt + t * lanes), dtu = hn::Load(d, tile.in.dtu + t * lanes);
    const Vec dg = hn::Load(d, tile.dg + t * lanes);
    const float* B = place.B + t * place.B_step + n * place.B_state;
    const float* C = place.C + t * place.C_step + n * place.C_state;
    float* dB = scratch.dB + (t * states + n) * lanes;
    float* dC = scratch.dC + (t * states + n) * lanes;
    Vec along = hn::Load(d, tile.along + t * lanes),
        through = hn::Load(d, tile.through + t * lanes);
    for (int i = 0; i < kCount; ++i) {
      const float* after = tile.h + ((t + 1) * kCount + i) * lanes;
      hn::Store(hn::MulAdd(dg, hn::Load(d, after), hn::Load(d, dC + i * lanes)), d, dC + i * lanes);
      dh[i] = hn::MulAdd(dg, hn::Set(d, C[i * place.C_state]), dh[i]);
      along = hn::MulAdd(dh[i], hn::Set(d, B[i * place.B_state]), along);
      hn::Store(hn::MulAdd(dh[i], dtu, hn::Load(d, dB + i * lanes)), d, dB + i * lanes);
      dh[i] = hn::Mul(dh[i], hn::Load(d, tile.a + (t * kCount + i) * lanes));
      const Vec power = hn::Mul(dh[i], hn::Load(d, after - kCount * lanes));
      through = hn::MulAdd(power, decay[i], through);
      dA[i] = hn::MulAdd(power, dt, dA[i]);
    }
    hn::Store(along, d, tile.along + t * lanes);
    hn::Store(through, d, tile.through + t * lanes);
  }
  for (int i = 0; i < kCount; ++i) {
    hn::Store(dh[i], d, dstate + (n + i) * lanes);
    float* sum = sum_dA + (n + i) * lanes;
    hn::Store(hn::Add(dA[i], hn::Load(d, sum)), d, sum);
  }
}

// Computes a tile of one block: its share of every gradient. `state` is the one before the tile;
// `dstate` and the sums are the block's.
void backward_tile(const BackwardJob& job, const Block& block, const TilePlace& place,
                   const float* state, float* dstate, float* sum_dA, float* sum_dD, float* sum_bias,
                   const BackwardScratch& scratch, GradientTile& tile) {
  const F32 d;
  const Inputs& in = job.in;
  const int64_t lanes = hn::Lanes(d), size = place.count * lanes;
  const bool gated = in.z.data != nullptr;
  const auto rows = [&](const StepView& v) {
    return cpu::tile_rows(v, place.batch, place.step, block.first);
  };
  load_inputs(in, block, place.batch, place.step, place.count, &tile.in, tile.slope);
  load_tile(rows(job.dy), place.count, block.count, gated ? tile.dy : tile.dg);
  if (gated) load_tile(rows(in.z), place.count, block.count, tile.z);
  for (const StepView* v : {&in.u, &in.delta, &in.z, &job.dy, &job.du, &job.ddelta, &job.dz}) {
    if (v->data != nullptr) prefetch_next(rows(*v), place.count);
  }
  const Vec skip = load_parameter(in.D, block);
  for (int64_t i = 0; i < size; i += lanes) {
    hn::Store(hn::Mul(skip, hn::Load(d, tile.in.u + i)), d, tile.out + i);
    hn::Store(hn::Zero(d), d, tile.along + i);
    hn::Store(hn::Zero(d), d, tile.through + i);
    if (!gated) continue;
    const Vec z = hn::Load(d, tile.z + i), one = hn::Set(d, 1.0f);
    const Vec whole = hn::Add(one, Exp(d, hn::Neg(z)));
    hn::Store(hn::Div(one, whole), d, tile.gate + i);
    hn::Store(hn::Mul(hn::Load(d, tile.dy + i), hn::Div(z, whole)), d, tile.dg + i);
  }

  int64_t n = 0;
  for (; n + kStates <= in.p.states; n += kStates) {
    walk_back<kStates>(place, in, block, n, state, dstate, sum_dA, scratch, tile);
  }
  for (; n < in.p.states; ++n) {
    walk_back<1>(place, in, block, n, state, dstate, sum_dA, scratch, tile);
  }

  const Vec one = hn::Set(d, 1.0f);
  Vec dD = hn::Zero(d), dbias = hn::Zero(d);
  for (int64_t i = 0; i < size; i += lanes) {
    const Vec u = hn::Load(d, tile.in.u + i), dt = hn::Load(d, tile.in.dt + i);
    const Vec dg = hn::Load(d, tile.dg + i), along = hn::Load(d, tile.along + i);
    Vec ddt = hn::MulAdd(u, along, hn::Mul(hn::Load(d, tile.through + i), hn::Set(d, kLn2)));
    if (in.softplus) ddt = hn::Mul(ddt, hn::Load(d, tile.slope + i));
    dD = hn::MulAdd(dg, u, dD);
    dbias = hn::Add(dbias, ddt);
    hn::Store(hn::MulAdd(dt, along, hn::Mul(skip, dg)), d, tile.along + i);  // du
    hn::Store(ddt, d, tile.through + i);
    if (!gated) continue;
    const Vec z = hn::Load(d, tile.z + i), gate = hn::Load(d, tile.gate + i);
    const Vec slope = hn::Mul(gate, hn::MulAdd(z, hn::Sub(one, gate), one));
    const Vec dz = hn::Mul(hn::Mul(hn::Load(d, tile.dy + i), hn::Load(d, tile.out + i)), slope);
    hn::Store(dz, d, tile.z + i);
  }
  hn::Store(hn::Add(dD, hn::Load(d, sum_dD)), d, sum_dD);
  hn::Store(hn::Add(dbias, hn::Load(d, sum_bias)), d, sum_bias);
  if (job.du.data != nullptr) store_tile(tile.along, place.count, block.count, rows(job.du));
  if (job.ddelta.data != nullptr) {
    store_tile(tile.through, place.count, block.count, rows(job.ddelta));
  }
  if (gated && job.dz.data != nullptr) {
    store_tile(tile.z, place.count, block.count, rows(job.dz));
  }
}

// Computes the states only: `state` moves on over a tile.
void walk_forward(const Inputs& in, const Block& block, const TilePlace& place, InputTile& tile,
                  float* state) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  load_inputs(in, block, place.batch, place.step, place.count, &tile);
  for (int64_t n = 0; n < in.p.states; ++n) {
    const Vec decay = load_decay(in, block, n);
    Vec h = hn::Load(d, state + n * lanes);
    for (int64_t t = 0; t < place.count; ++t) {
      const Vec a = Exp2(d, hn::Mul(hn::Load(d, tile.dt + t * lanes), decay));
      const Vec B = hn::Set(d, place.B[t * place.B_step + n * place.B_state]);
      h = hn::MulAdd(a, h, hn::Mul(hn::Load(d, tile.dtu + t * lanes), B));
    }
    hn::Store(h, d, state + n * lanes);
  }
}

// The item's blocks of channels.
struct Part {
  int64_t slice, group, part, first, count;  // blocks [first, first + count) of all

  Part(const BackwardJob& job, int64_t item) {
    part = item % job.cut.parts;
    group = item / job.cut.parts % job.in.p.groups;
    slice = item / job.cut.parts / job.in.p.groups;
    const int64_t begin = job.blocks_per_group * part / job.cut.parts;
    count = job.blocks_per_group * (part + 1) / job.cut.parts - begin;
    first = group * job.blocks_per_group + begin;
  }
};

// Loads the state before `step`, from the initial one or from those that were kept.
void load_state(const BackwardJob& job, const Block& block, int64_t s,
                const SequenceSteps& sequence, int64_t step, float* state) {
  if (step == sequence.begin) return load_initial_state(job.in, block, s, state);
  const Tensor& c = job.checkpoints;
  const TileRows rows{c.data, c.dtype, c.stride(2), c.stride(3)};
  load_tile(rows.at(sequence.batch * c.stride(0) + (step / job.in.p.spacing - 1) * c.stride(1) +
                    block.first * c.stride(3)),
            job.in.p.states, block.count, state);
}

// Adds up the lanes of a tile's dB or dC.
void sum_lanes(const float* by_lane, int64_t rows, float* out, int64_t states, int64_t step) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t n = 0; n < states; ++n) {
      out[t * step + n] = ReduceSum(d, hn::Load(d, by_lane + (t * states + n) * lanes));
    }
  }
}

void backward_sequence(const BackwardJob& job, const Part& part, int64_t s,
                       const BackwardScratch& scratch, GradientTile& tile) {
  const Inputs& in = job.in;
  const int64_t lanes = job.lanes, states = in.p.states, size = states * lanes;
  const SequenceSteps sequence = in.p.sequences[s];
  const auto block_of = [&](int64_t i) { return Block(in, lanes, part.first + i); };
  for (int64_t i = 0; i < part.count; ++i) {
    float* dstate = scratch.dstate + i * size;
    std::fill_n(dstate, size, 0.0f);
    if (!job.dlast_state) continue;
    const Tensor& t = job.dlast_state;
    const TileRows rows{t.data, t.dtype, t.stride(2), t.stride(1)};
    load_tile(rows.at(s * t.stride(0) + block_of(i).first * t.stride(1)), states, block_of(i).count,
              dstate);
  }
  for (int64_t end = sequence.end, begin; end > sequence.begin; end = begin) {
    begin = std::max(sequence.begin, (end - 1) / job.interval * job.interval);
    const int64_t tiles = ceil_div(end - begin, kTileSteps);
    const auto place_of = [&](int64_t k) {
      const int64_t step = begin + k * kTileSteps;
      return TilePlace(in, sequence.batch, part.group, step, std::min(kTileSteps, end - step));
    };
    for (int64_t i = 0; i < part.count; ++i) {
      const Block block = block_of(i);
      float* state = scratch.tile_states + i * size;
      load_state(job, block, s, sequence, begin, state);
      for (int64_t k = 0; k + 1 < tiles; ++k) {
        float* next = state + part.count * size;
        std::copy_n(state, size, next);
        walk_forward(in, block, place_of(k), tile.in, next);
        state = next;
      }
    }
    for (int64_t k = tiles - 1; k >= 0; --k) {
      const TilePlace place = place_of(k);
      std::fill_n(scratch.dB, place.count * size, 0.0f);
      std::fill_n(scratch.dC, place.count * size, 0.0f);
      for (int64_t i = 0; i < part.count; ++i) {
        const int64_t sum = part.slice * in.p.groups * job.blocks_per_group + part.first + i;
        backward_tile(job, block_of(i), place, scratch.tile_states + (k * part.count + i) * size,
                      scratch.dstate + i * size, job.sum_dA + sum * size, job.sum_dD + sum * lanes,
                      job.sum_bias + sum * lanes, scratch, tile);
      }
      const int64_t row =
          ((part.part * in.p.batch + place.batch) * in.p.length + place.step) * in.p.groups +
          part.group;
      sum_lanes(scratch.dB, place.count, job.sum_dB + row * states, states, in.p.groups * states);
      sum_lanes(scratch.dC, place.count, job.sum_dC + row * states, states, in.p.groups * states);
    }
  }
  for (int64_t i = 0; job.dinitial_state && i < part.count; ++i) {
    const Tensor& t = job.dinitial_state;
    const TileRows rows{t.data, t.dtype, t.stride(2), t.stride(1)};
    store_tile(scratch.dstate + i * size, states, block_of(i).count,
               rows.at(s * t.stride(0) + block_of(i).first * t.stride(1)));
  }
}

int64_t backward_lanes() { return hn::Lanes(F32()); }

void backward_item(const BackwardJob& job, int64_t worker, int64_t item) {
  const Part part(job, item);
  const int64_t states = job.in.p.states, sequences = job.in.p.sequences.count;
  WorkspaceParts parts(job.scratch + worker * job.scratch_floats);
  const BackwardScratch scratch(job.in.p, job.cut, job.blocks_per_group, job.lanes, job.interval,
                                parts);
  const int64_t sum = part.slice * job.in.p.groups * job.blocks_per_group + part.first;
  std::fill_n(job.sum_dA + sum * states * job.lanes, part.count * states * job.lanes, 0.0f);
  std::fill_n(job.sum_dD + sum * job.lanes, part.count * job.lanes, 0.0f);
  std::fill_n(job.sum_bias + sum * job.lanes, part.count * job.lanes, 0.0f);
  GradientTile tile;
  const int64_t first = sequences * part.slice / job.cut.slices;
  const int64_t last = sequences * (part.slice + 1) / job.cut.slices;
  for (int64_t s = first; s < last; ++s) backward_sequence(job, part, s, scratch, tile);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {
namespace {

FK_CPU_EXPORT(backward_lanes);
FK_CPU_EXPORT(backward_item);

}  // namespace

size_t workspace(const SelectiveScanBwd& a) {
  WorkspaceParts parts;
  const scan::BackwardMemory memory(a, FK_CPU_DISPATCH(backward_lanes)(), parts);
  const OutputGradient stage(a, a.dy, gradient_pieces(rows_of(a.dy).count), {}, parts);
  return parts.bytes();
}

Status run(const SelectiveScanBwd& a, const Exec& exec) {
  const int64_t lanes = FK_CPU_DISPATCH(backward_lanes)();
  WorkspaceParts parts(exec.workspace());
  const scan::BackwardMemory memory(a, lanes, parts);
  const OutputGradient stage(a, a.dy, gradient_pieces(rows_of(a.dy).count), {}, parts);
  stage.run(exec);
  scan::Inputs in;
  prepare_inputs(a, memory.parameters, exec, &in);
  const scan::BackwardJob job{in,
                              step_view(stage.gradient()),
                              step_view(a.du),
                              step_view(a.ddelta),
                              step_view(a.dz),
                              a.dlast_state,
                              a.checkpoints,
                              a.dA,
                              a.dB,
                              a.dC,
                              a.dD,
                              a.ddelta_bias,
                              a.dinitial_state,
                              memory.cut,
                              lanes,
                              memory.blocks_per_group,
                              memory.interval,
                              memory.sum_dA,
                              memory.sum_dD,
                              memory.sum_bias,
                              memory.sum_dB,
                              memory.sum_dC,
                              memory.scratch,
                              memory.scratch_floats};
  const auto kernel = FK_CPU_DISPATCH(backward_item);
  // So little work is not worth waking a thread for.
  constexpr int64_t kInline = 1 << 16;
  const int64_t work = in.p.batch * in.p.length * in.p.channels * in.p.states;
  run_on_workers(exec, work < kInline ? 1 : memory.workers, job.items(),
                 [&](int64_t worker, int64_t item) { kernel(job, worker, item); });
  finish_sums(job, exec);
  return {};
}

}  // namespace fk::cpu
#endif  // HWY_ONCE
