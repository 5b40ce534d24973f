// ssd on the CPU, forward.
//
// Floor: of a chunk of Q steps in one head, Q Q P / 2 multiply-adds for what steps of the chunk
// make of each other, and N P Q each for what they take from the state and add to it; C B^T is
// shared by the heads of a group. Its Q Q / 2 exponentials are about a twentieth of that.
//
// An item (plan.h) goes through its chunks; in each, head after head: y = decay o (C state), then
// strip by strip y += (C B^T o decays o dt) x, then the state. Operands stay in the first two
// levels of cache.

#include "ops/ssd/ssd.h"

#ifndef FK_OPS_SSD_CPU_FORWARD_ONCE_
#define FK_OPS_SSD_CPU_FORWARD_ONCE_

#include "ops/ssd/cpu/plan.h"

namespace fk::ssd {
namespace {

struct ForwardScratch {
  ChunkScratch chunk;
  float *strip, *y;  // a strip of the chunk's matrix; what comes out
  float* states;     // of the block's heads

  ForwardScratch(const Plan& plan, WorkspaceParts& parts) : chunk(plan, parts) {
    strip = parts.take(kStrip * plan.chunk_width);
    y = parts.take(plan.chunk_width * plan.channel_width);
    states = parts.take(plan.block_heads * plan.state_size());
  }
};

struct ForwardMemory {
  Piece* pieces;
  WorkerScratch<ForwardScratch> scratch;
  WorkerScratch<ChunkScratch> walks;
  PieceStates piece_states;

  ForwardMemory(const Plan& plan, WorkspaceParts& parts)
      : pieces(parts.take<Piece>(plan.most_pieces())),
        scratch(plan, parts),
        walks(plan, parts),
        piece_states(plan, true, parts) {}
};

struct ForwardJob {
  const Plan& plan;
  Inputs in;
  View y, final_state;
  const Piece* pieces;
  const float* piece_states;  // what each piece begins with; NULL: pieces are whole sequences
};

}  // namespace
}  // namespace fk::ssd

#endif  // FK_OPS_SSD_CPU_FORWARD_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/ssd/cpu/forward.cc"
#include "cpu/foreach_target.h"
#include "ops/ssd/cpu/chunk_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using ssd::ForwardJob;
using ssd::ForwardScratch;

// Adds D x, multiplies by the gate, and stores.
HWY_INLINE void finish_outputs(const ForwardJob& job, const Chunk& chunk, int64_t head,
                               const ChunkScratch& scratch, float* y) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), p = job.plan.channel_width;
  const bool gated = job.in.z.data != nullptr;
  float* const z = scratch.weighted;
  if (gated) {
    pack_rows(rows_of_head(job.in.z, chunk.batch, chunk.begin, head), chunk.count,
              job.plan.p.channels, z, p);
  }
  if (gated || job.in.D) {
    for (int64_t i = 0; i < chunk.count * p; i += p) {
      for (int64_t c = 0; c < p; c += lanes) {
        Vec out = hn::MulAdd(hn::LoadU(d, scratch.skip + c), hn::LoadU(d, scratch.x + i + c),
                             hn::LoadU(d, y + i + c));
        if (gated) out = hn::Mul(out, Silu(d, hn::LoadU(d, z + i + c)));
        hn::StoreU(out, d, y + i + c);
      }
    }
  }
  unpack_rows(y, p, chunk.count, job.plan.p.channels, nullptr,
              rows_of_head(job.y, chunk.batch, chunk.begin, head));
}

// Computes one item: a block of heads of a piece.
void forward_item(const ForwardJob& job, const ForwardScratch& memory, int64_t item) {
  const Plan& plan = job.plan;
  const ChunkScratch& scratch = memory.chunk;
  const Piece& piece = job.pieces[item / plan.blocks()];
  const HeadBlock block(plan, item % plan.blocks());
  const int64_t size = plan.state_size();
  bool is_zero = job.piece_states == nullptr && job.in.initial_state.data == nullptr;
  for (int64_t i = 0; i < block.count && !is_zero; ++i) {
    float* state = memory.states + i * size;
    if (job.piece_states != nullptr) {
      const int64_t at = item / plan.blocks() * plan.p.heads + block.first + i;
      std::copy_n(job.piece_states + at * size, size, state);
    } else {
      load_state(plan, state_of_head(job.in.initial_state, piece.sequence, block.first + i),
                 scratch.turned, state);
    }
  }
  const bool wants_state = piece.last && job.final_state.data != nullptr;
  for_each_chunk(plan, piece, [&](const Chunk& chunk) HWY_ATTR {
    load_shared(plan, job.in, chunk, block.group, scratch, true);
    const bool is_last = chunk.begin + chunk.count == piece.end;
    for (int64_t i = 0; i < block.count; ++i) {
      const int64_t head = block.first + i;
      float* state = memory.states + i * size;
      const float decay = prepare_steps(plan, job.in, chunk, head, scratch.steps);
      pack_rows(rows_of_head(job.in.x, chunk.batch, chunk.begin, head), chunk.count,
                plan.p.channels, scratch.x, plan.channel_width);
      if (job.y.data != nullptr) {
        chunk_outputs(plan, scratch, chunk, state, is_zero, memory.strip, memory.y);
      }
      if (!is_last || wants_state) {
        advance_state(plan, chunk, decay, scratch, is_zero, state);
      }
      if (job.y.data != nullptr) {
        load_skip(plan, job.in.D, head, scratch.skip);
        finish_outputs(job, chunk, head, scratch, memory.y);
      }
    }
    is_zero = false;
  });
  for (int64_t i = 0; wants_state && i < block.count; ++i) {
    float* state = memory.states + i * size;
    if (is_zero) std::fill_n(state, size, 0.0f);  // a sequence without steps
    store_state(plan, state, scratch.turned,
                state_of_head(job.final_state, piece.sequence, block.first + i));
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {
namespace {

FK_CPU_EXPORT(forward_item);

}  // namespace

Status run(const SsdFwd& a, const Exec& exec) {
  const ssd::Plan plan = ssd::plan_of(ssd::problem_of(a), a.x.dtype);
  WorkspaceParts parts(exec.workspace());
  const ssd::ForwardMemory memory(plan, parts);
  const int64_t pieces = list_pieces(plan, memory.pieces);
  const ssd::Inputs in(a);
  if (plan.cuts_sequences()) {
    find_piece_states(plan, in, memory.pieces, pieces, memory.walks, memory.piece_states, exec);
  }
  const ssd::ForwardJob job{plan,
                            in,
                            ssd::view_of(a.y),
                            ssd::view_of(a.final_state),
                            memory.pieces,
                            memory.piece_states.states};
  const auto kernel = FK_CPU_DISPATCH(forward_item);
  run_on_workers(exec, plan.workers, pieces * plan.blocks(),
                 [&](int64_t worker, int64_t item) { kernel(job, memory.scratch[worker], item); });
  return {};
}

size_t workspace(const SsdFwd& a) {
  const ssd::Plan plan = ssd::plan_of(ssd::problem_of(a), a.x.dtype);
  WorkspaceParts parts;
  const ssd::ForwardMemory memory(plan, parts);
  return parts.bytes();
}

}  // namespace fk::cpu
#endif  // HWY_ONCE
