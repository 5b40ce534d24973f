// ssd on the CPU: the states that the pieces of cut sequences begin with.
//
// Floor: N P Q multiply-adds for each chunk and head, a third of the forward's; it is spent only
// where there would be too few items for all workers. Each piece is walked from a state of 0 (all
// but the last of a sequence), and then a short walk over the pieces adds what came before: a
// piece's decay as a whole is the product of its chunks'.

#include "ops/ssd/ssd.h"

#ifndef FK_OPS_SSD_CPU_STATES_ONCE_
#define FK_OPS_SSD_CPU_STATES_ONCE_

#include "ops/ssd/cpu/plan.h"

namespace fk::ssd {
namespace {

struct StatesJob {
  const Plan& plan;
  const Inputs& in;
  const Piece* pieces;
  int64_t count;
  float *states, *decays;
};

}  // namespace
}  // namespace fk::ssd

#endif  // FK_OPS_SSD_CPU_STATES_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/ssd/cpu/states.cc"
#include "cpu/foreach_target.h"
#include "ops/ssd/cpu/chunk_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using ssd::StatesJob;

// Computes what a piece adds to the states of a block of heads, and its decays.
void walk_piece(const StatesJob& job, const ChunkScratch& scratch, int64_t item) {
  const Plan& plan = job.plan;
  const Piece& piece = job.pieces[item / plan.blocks()];
  if (piece.last) return;
  const HeadBlock block(plan, item % plan.blocks());
  const int64_t at = item / plan.blocks() * plan.p.heads + block.first;
  std::fill_n(job.decays + at, block.count, 1.0f);
  for_each_chunk(plan, piece, [&](const Chunk& chunk) HWY_ATTR {
    load_shared(plan, job.in, chunk, block.group, scratch, false);
    for (int64_t i = 0; i < block.count; ++i) {
      const int64_t head = block.first + i;
      const float decay = prepare_steps(plan, job.in, chunk, head, scratch.steps);
      pack_rows(rows_of_head(job.in.x, chunk.batch, chunk.begin, head), chunk.count,
                plan.p.channels, scratch.x, plan.channel_width);
      advance_state(plan, chunk, decay, scratch, chunk.begin == piece.begin,
                    job.states + (at + i) * plan.state_size());
      job.decays[at + i] *= decay;
    }
  });
}

// Replaces, for one head of all sequences, what pieces add by what they begin with. `before` and
// `turned` are memory for a state.
void join_pieces(const StatesJob& job, int64_t head, float* before, float* turned) {
  const F32 d;
  const Plan& plan = job.plan;
  const int64_t lanes = hn::Lanes(d), size = plan.state_size();
  for (int64_t k = 0; k < job.count; ++k) {
    const Piece& piece = job.pieces[k];
    const int64_t at = k * plan.p.heads + head;
    float* state = job.states + at * size;
    if (piece.first && job.in.initial_state.data != nullptr) {
      load_state(plan, state_of_head(job.in.initial_state, piece.sequence, head), turned, before);
    } else if (piece.first) {
      std::fill_n(before, size, 0.0f);
    }
    const Vec decay = hn::Set(d, piece.last ? 0.0f : job.decays[at]);
    for (int64_t i = 0; i < size; i += lanes) {
      const Vec begin = hn::LoadU(d, before + i);
      if (!piece.last) {
        hn::StoreU(hn::MulAdd(decay, begin, hn::LoadU(d, state + i)), d, before + i);
      }
      hn::StoreU(begin, d, state + i);
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {
namespace {

FK_CPU_EXPORT(walk_piece);
FK_CPU_EXPORT(join_pieces);

}  // namespace

void find_piece_states(const ssd::Plan& plan, const ssd::Inputs& in, const ssd::Piece* pieces,
                       int64_t count, const ssd::WorkerScratch<ssd::ChunkScratch>& scratch,
                       const ssd::PieceStates& out, const Exec& exec) {
  const ssd::StatesJob job{plan, in, pieces, count, out.states, out.decays};
  const auto walk = FK_CPU_DISPATCH(walk_piece);
  const auto join = FK_CPU_DISPATCH(join_pieces);
  run_on_workers(exec, plan.workers, count * plan.blocks(),
                 [&](int64_t worker, int64_t item) { walk(job, scratch[worker], item); });
  run_on_workers(exec, plan.workers, plan.p.heads, [&](int64_t worker, int64_t head) {
    const ssd::ChunkScratch own = scratch[worker];
    join(job, head, own.carried, own.turned);
  });
}

}  // namespace fk::cpu
#endif  // HWY_ONCE
