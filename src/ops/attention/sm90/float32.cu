#include "ops/attention/cuda/forward_launch.h"
#include "ops/attention/cuda/plan.h"
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

}  // namespace

Status launch_forward_float_sm90(const Forward& p, int dim, const DeviceProperties& properties,
                                 cudaStream_t stream) {
  return dim == 64 ? launch_float<64>(p, properties, stream)
                   : launch_float<128>(p, properties, stream);
}

}  // namespace fk::cuda::attention
