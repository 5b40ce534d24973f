// Plans of the kernels that keep the recurrent weights.
#include <algorithm>

#include "core/integers.h"
#include "ops/rnn/cuda/kept_plan.h"

namespace fk::cuda::rnn {

namespace {

constexpr int64_t kLeast = 64;  // bytes by which neighbouring vectors must differ modulo 128

// The plan with this cut of the depth, or false where it does not fit.
bool try_cut(const KeptCall& call, Exchange exchange, int slices, int lanes, KeptPlan* p) {
  const bool forward = call.direction == Direction::kForward;
  const bool tensor = call.dtype != DType::kFloat32;
  const int64_t element = size_of(call.dtype);
  *p = {};
  p->slices = slices;
  p->lanes = lanes;
  p->bias_sums = forward ? 0 : 1;
  const int of_warp = tensor ? 16 * tensor_tiles(call.direction) : 32 / lanes;
  p->rows = kKeptWarps / slices * of_warp;
  const int64_t rows_of_unit = forward ? call.gates : 1;
  // Blocks send each other 4 bytes at least.
  const int64_t even = tensor && exchange == Exchange::kShared ? 2 : 1;
  const int64_t most_units = std::min<int64_t>(p->rows / rows_of_unit, kMostUnits) / even * even;
  if (most_units == 0) return false;
  const int64_t fewest = ceil_div(call.hidden, most_units);
  if (fewest > call.most_blocks) return false;
  const int64_t units = ceil_div(ceil_div(call.hidden, fewest), even) * even;
  const int64_t blocks = ceil_div(call.hidden, units);
  p->blocks = static_cast<int>(blocks);
  p->units = static_cast<int>(units);
  p->gate_stride = static_cast<int>(ceil_div(call.hidden, even) * even);
  const int64_t depth = forward ? p->gate_stride : call.gates * p->gate_stride;
  p->entries = static_cast<int>(depth);
  const int64_t step = tensor ? kTensorBlock : 4 * kFloatRows * lanes;
  const int64_t steps = ceil_div(ceil_div(depth, slices), step);
  p->slab = static_cast<int>(steps * step);
  p->vectors = static_cast<int>(steps * (tensor ? 2 * tensor_tiles(call.direction) : kFloatRows));
  if (p->vectors > kKeptVectors) return false;
  const int64_t bytes = p->depth() * element;
  p->pitch = static_cast<int>((bytes % 128 == 0 ? bytes + kLeast : bytes) / element);
  p->sum_pitch = p->rows + (tensor ? 4 : 1);
  const int64_t rounds = ceil_div(call.count, kTogether);
  p->teams = static_cast<int>(
      exchange == Exchange::kShared ? rounds : std::min(rounds, call.most_blocks / blocks));
  const int64_t rounds_each = ceil_div(rounds, p->teams);
  p->teams = static_cast<int>(ceil_div(rounds, rounds_each));
  p->sequences = static_cast<int>(rounds_each * kTogether);
  const bool staged = vector_sets(call.dtype, exchange) > 0;
  // More blocks with fewer units each, where so a step takes one round of products.
  const int64_t fewer = kPairs * kKeptThreads / p->sequences;
  if (!staged && fewer > 0 && fewer < p->units &&
      ceil_div(call.hidden, fewer) * p->teams <= call.most_blocks) {
    p->units = static_cast<int>(fewer);
    p->blocks = static_cast<int>(ceil_div(call.hidden, fewer));
  }
  const int most_together = kPairs * kKeptThreads / p->units / kTogether * kTogether;
  p->together = staged ? kTogether : std::min(p->sequences, std::max(most_together, kTogether));
  while (p->together > kTogether &&
         p->shared_bytes(call.dtype, exchange) > call.most_shared_bytes) {
    p->together -= kTogether;
  }
  return p->shared_bytes(call.dtype, exchange) <= call.most_shared_bytes;
}

}  // namespace

bool plan_kept(const KeptCall& call, Exchange exchange, KeptPlan* plan) {
  if (call.hidden == 0 || call.count == 0 || call.count > INT32_MAX / kTogether ||
      call.hidden > INT16_MAX) {
    return false;
  }
  bool found = false;
  for (const int lanes : {1, 2, 4}) {
    if (lanes > 1 && call.dtype != DType::kFloat32) break;
    for (const int slices : {1, 2, 4, 8}) {
      KeptPlan p;
      if (!try_cut(call, exchange, slices, lanes, &p)) continue;
      const bool better = !found || p.sequences < plan->sequences ||
                          (p.sequences == plan->sequences && p.blocks > plan->blocks);
      if (better) *plan = p;
      found = true;
    }
  }
  return found;
}

}  // namespace fk::cuda::rnn
