// This file says which calls of attention's forward of float32 run on Hopper's kernel, and with
// which tiles. The kernel is in sm90/float32.cuh.
#include "ops/attention/cuda/forward_plan.h"
#include "ops/attention/sm90/float32.cuh"

namespace fk::cuda::attention {

namespace {

template <int kDim>
Status launch_float(Forward p, const DeviceProperties& properties, cudaStream_t stream) {
  using Tile = FloatTile<kDim>;
  p.tiles = static_cast<int>(tile_count(p.problem, p.problem.q_len, Tile::kRows));
  p.together = heads_together(p.problem, p.tiles, p.problem.heads, properties.multiprocessors);
  // Two blocks share a tile where tiles are few, or, under masks, where the longest would take
  // longer than their share of all. Four find too little room: clusters keep to a part of the chip.
  const int64_t tiles = p.tiles * p.problem.heads * p.problem.batch;
  const bool few = 2 * tiles <= properties.multiprocessors;
  const bool unequal = !p.problem.mask.unlimited() && tiles <= properties.multiprocessors &&
                       p.problem.k_len >= 8 * Tile::kKeys;
  const int parts = !p.problem.packed && p.problem.k_len > Tile::kKeys && (few || unequal) ? 2 : 1;
  return launch_tile<FloatBlock<Tile>>(forward_float<Tile>, "attention forward_float",
                                       tile_grid(p.problem, p.tiles, p.problem.heads), p, stream,
                                       parts);
}

// The kernel takes float32 as it is, and q and k rotated ahead.
void keep_float32(ForwardPlan* plan) { plan->q.form = plan->k.form = plan->v.form = Form::kSame; }

}  // namespace
}  // namespace fk::cuda::attention

namespace fk::cuda_sm90 {

using cuda::attention::ForwardPlan;

bool accepts_float32(const AttentionFwd& a) {
  if (a.q.dtype != DType::kFloat32) return false;
  const int code = cuda::device_properties(a.q.device_id).code;
  if (code < 90) return false;
  WorkspaceParts parts;
  ForwardPlan plan(a, code, &parts);
  const attention::Problem& problem = plan.problem;
  if (cuda::attention::dim_of(problem) > 128) return false;
  if (!cuda::attention::score_change_of(a, problem).plain) return false;
  cuda::attention::keep_float32(&plan);
  return plan.q.operand(problem).vectors && plan.k.operand(problem).vectors &&
         plan.v.operand(problem).vectors;
}

Status run_float32(const AttentionFwd& a, const Exec& exec) {
  const cuda::DeviceProperties& properties = cuda::device_properties(a.q.device_id);
  const cudaStream_t stream = cuda::stream_of(exec);
  WorkspaceParts parts(exec.workspace());
  ForwardPlan plan(a, properties.code, &parts);
  if (plan.empty()) return {};
  cuda::attention::keep_float32(&plan);
  FK_RETURN_IF_ERROR(cuda::attention::prepare(plan.problem, {&plan.q, &plan.k, &plan.v}, stream));
  const cuda::attention::Forward p = plan.arguments(a);
  return cuda::attention::dim_of(plan.problem) == 64
             ? cuda::attention::launch_float<64>(p, properties, stream)
             : cuda::attention::launch_float<128>(p, properties, stream);
}

}  // namespace fk::cuda_sm90
