// ssd on the CPU: the gradients of the state that the pieces of cut sequences end with. It is what
// states.cc does, from the end: each piece is walked from a gradient of 0 (all but the first of a
// sequence), and a short walk over the pieces adds what comes after.

#include "ops/ssd/ssd.h"

#ifndef FK_OPS_SSD_CPU_GRADIENT_STATES_ONCE_
#define FK_OPS_SSD_CPU_GRADIENT_STATES_ONCE_

#include "ops/ssd/cpu/backward_plan.h"

namespace fk::ssd {
namespace {

struct GradientStatesJob {
  const Plan& plan;
  const Inputs& in;
  View dy, dfinal_state;
  const Piece* pieces;
  int64_t count;
  float *states, *decays;
};

}  // namespace
}  // namespace fk::ssd

#endif  // FK_OPS_SSD_CPU_GRADIENT_STATES_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/ssd/cpu/gradient_states.cc"
#include "cpu/foreach_target.h"
#include "ops/ssd/cpu/backward_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using ssd::GradientStatesJob;

// Computes what a piece makes of gradients of 0 at its end, for a block of heads, and its decays.
void walk_piece_back(const GradientStatesJob& job, const ChunkScratch& scratch, int64_t item) {
  const Plan& plan = job.plan;
  const Piece& piece = job.pieces[item / plan.blocks()];
  if (piece.first) return;
  const HeadBlock block(plan, item % plan.blocks());
  const int64_t at = item / plan.blocks() * plan.p.heads + block.first;
  std::fill_n(job.decays + at, block.count, 1.0f);
  const int64_t chunks = ceil_div(piece.end - piece.begin, plan.chunk);
  for (int64_t c = chunks - 1; c >= 0; --c) {
    const int64_t begin = piece.begin + c * plan.chunk;
    const Chunk chunk{piece.batch, begin, std::min(plan.chunk, piece.end - begin)};
    pack_rows(rows_of_head(job.in.C, chunk.batch, chunk.begin, block.group), chunk.count,
              plan.p.states, scratch.C, plan.state_width);
    for (int64_t i = 0; i < block.count; ++i) {
      const int64_t head = block.first + i;
      const float decay = prepare_steps(plan, job.in, chunk, head, scratch.steps);
      load_gradient(plan, job.dy, job.in.z, chunk, head, scratch.weighted, scratch.x);
      retreat_state(plan, chunk, decay, scratch, scratch.x, c == chunks - 1,
                    job.states + (at + i) * plan.state_size());
      job.decays[at + i] *= decay;
    }
  }
}

// Replaces, for one head of all sequences, what pieces make by what they end with. `after` and
// `turned` are memory for a state.
void join_pieces_back(const GradientStatesJob& job, int64_t head, float* after, float* turned) {
  const F32 d;
  const Plan& plan = job.plan;
  const int64_t lanes = hn::Lanes(d), size = plan.state_size();
  for (int64_t k = job.count - 1; k >= 0; --k) {
    const Piece& piece = job.pieces[k];
    const int64_t at = k * plan.p.heads + head;
    float* state = job.states + at * size;
    if (piece.last && job.dfinal_state.data != nullptr) {
      load_state(plan, state_of_head(job.dfinal_state, piece.sequence, head), turned, after);
    } else if (piece.last) {
      std::fill_n(after, size, 0.0f);
    }
    const Vec decay = hn::Set(d, piece.first ? 0.0f : job.decays[at]);
    for (int64_t i = 0; i < size; i += lanes) {
      const Vec end = hn::LoadU(d, after + i);
      if (!piece.first) {
        hn::StoreU(hn::MulAdd(decay, end, hn::LoadU(d, state + i)), d, after + i);
      }
      hn::StoreU(end, d, state + i);
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

FK_CPU_EXPORT(walk_piece_back);
FK_CPU_EXPORT(join_pieces_back);

}  // namespace

void find_piece_gradients(const ssd::Plan& plan, const ssd::Inputs& in, const ssd::View& dy,
                          const ssd::View& dfinal_state, const ssd::Piece* pieces, int64_t count,
                          const ssd::WorkerScratch<ssd::ChunkScratch>& scratch,
                          const ssd::PieceStates& out, const Exec& exec) {
  const ssd::GradientStatesJob job{plan,   in,    dy,         dfinal_state,
                                   pieces, count, out.states, out.decays};
  const auto walk = FK_CPU_DISPATCH(walk_piece_back);
  const auto join = FK_CPU_DISPATCH(join_pieces_back);
  run_on_workers(exec, plan.workers, count * plan.blocks(),
                 [&](int64_t worker, int64_t item) { walk(job, scratch[worker], item); });
  run_on_workers(exec, plan.workers, plan.p.heads, [&](int64_t worker, int64_t head) {
    const ssd::ChunkScratch own = scratch[worker];
    join(job, head, own.carried, own.turned);
  });
}

}  // namespace fk::cpu
#endif  // HWY_ONCE
