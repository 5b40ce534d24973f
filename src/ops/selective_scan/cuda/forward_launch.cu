// How the forward's kernels are launched, for each dtype.
#include "cuda/row_partition.cuh"
#include "cuda/tma.h"
#include "ops/selective_scan/cuda/forward.cuh"
#include "ops/selective_scan/cuda/forward_chunks.cuh"
#include "ops/selective_scan/cuda/forward_few.cuh"
#include "ops/selective_scan/cuda/forward_short.cuh"

namespace fk::cuda {

template <class T, class Tile>
Status launch_tile(ScanArgs a, cudaStream_t stream) {
  const int width = Tile::kNarrow ? a.block_channels : Tile::kChannels;
  a.blocks_per_group = static_cast<int>(ceil_div(a.channels / a.groups, width));
  const int64_t blocks = int64_t{a.blocks_per_group} * a.groups * a.segments.slots;
  if (blocks == 0) return {};
  const int threads = Tile::kStage + width / Tile::kWarpChannels * 32;
  return launch_early(scan_forward<T, Tile>, "scan_forward",
                      {grid_of(blocks), dim3(threads), Tile::kSharedBytes}, stream, a);
}

template <class T, class Tile>
Status launch_few(ScanPass pass, ScanArgs a, cudaStream_t stream) {
  a.blocks_per_group = static_cast<int>(ceil_div(a.channels / a.groups, a.block_channels));
  const int64_t blocks = int64_t{a.blocks_per_group} * a.groups * a.segments.slots;
  if (blocks == 0) return {};
  const int scanning = a.block_channels / Tile::kWarpChannels * 32;
  const auto launch = [&](auto kernel, int staging) {
    return launch_early(kernel, "scan_few",
                        {grid_of(blocks), dim3(staging + scanning), Tile::kSharedBytes}, stream, a);
  };
  return pass == ScanPass::kStates ? launch(scan_few<T, Tile, ScanPass::kStates>,
                                            Tile::template kStage<ScanPass::kStates>)
                                   : launch(scan_few<T, Tile, ScanPass::kOutputs>,
                                            Tile::template kStage<ScanPass::kOutputs>);
}

template <class T>
Status launch_short(ScanArgs a, cudaStream_t stream) {
  a.block_channels = ShortTile::kChannels;
  a.blocks_per_group = static_cast<int>(ceil_div(a.channels / a.groups, a.block_channels));
  const int64_t blocks = int64_t{a.blocks_per_group} * a.groups * a.segments.slots;
  if (blocks == 0) return {};
  return launch_early(scan_short<T>, "scan_short",
                      {grid_of(blocks), ShortTile::kThreads, ShortTile::kSharedBytes}, stream, a);
}

template <class T>
Status launch_chunks(ScanArgs a, cudaStream_t stream) {
  a.blocks_per_group = static_cast<int>(ceil_div(a.channels / a.groups, ChunkTile::kChannels));
  const int64_t per_group = a.channels / a.groups;
  a.group_channels = static_cast<int>(per_group);
  const dim3 grid(static_cast<unsigned>(a.blocks_per_group),
                  static_cast<unsigned>(a.groups * a.batch), ChunkTile::kTurns);
  if (grid.x * grid.y == 0) return {};
  ChunkMaps maps = {};
  const auto describe = [&](const StepView& v, CUtensorMap* map) -> Status {
    if (v.data == nullptr) return {};
    using Tile = ChunkTile;
    const int64_t group = per_group * v.channel * 2, channel = v.channel * 2, step = v.step * 2;
    const TensorMapShape by_step = {4,
                                    {per_group, a.groups, a.length, a.batch},
                                    {0, group, step, v.batch * 2},
                                    {Tile::kChannels, 1, Tile::kT, 1}};
    const TensorMapShape by_channel = {4,
                                       {a.length, per_group, a.groups, a.batch},
                                       {0, channel, group, v.batch * 2},
                                       {Tile::kColumn, Tile::kChannels, 1, 1}};
    return make_tensor_map(map, v.data, v.dtype, a.time_contiguous ? by_channel : by_step,
                           a.time_contiguous);
  };
  FK_RETURN_IF_ERROR(describe(a.delta, &maps.delta));
  FK_RETURN_IF_ERROR(describe(a.u, &maps.u));
  FK_RETURN_IF_ERROR(describe(a.z, &maps.z));
  FK_RETURN_IF_ERROR(describe(a.y, &maps.y));
  return launch_early(a.time_contiguous ? scan_chunks<T, true> : scan_chunks<T, false>,
                      "scan_chunks", {grid, ChunkTile::kThreads, ChunkTile::kSharedBytes, true},
                      stream, a, maps);
}

// Only kFew and kSmall are ever cut into segments.
template <class T>
Status launch_scan(ScanPass pass, ScanShape shape, const ScanArgs& a, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (shape == ScanShape::kFew) return launch_few<T, FewTile>(pass, a, s);
  if (shape == ScanShape::kSmall) return launch_few<T, SmallTile>(pass, a, s);
  if (shape == ScanShape::kShort) return launch_short<T>(a, s);
  if constexpr (sizeof(T) == 2) {
    if (shape == ScanShape::kChunks) return launch_chunks<T>(a, s);
  }
  if (shape == ScanShape::kWide) return launch_tile<T, WideTile>(a, s);
  return launch_tile<T, ManyTile>(a, s);
}

template Status launch_scan<__nv_bfloat16>(ScanPass, ScanShape, const ScanArgs&, void*);
template Status launch_scan<float>(ScanPass, ScanShape, const ScanArgs&, void*);
template Status launch_scan<__half>(ScanPass, ScanShape, const ScanArgs&, void*);

}  // namespace fk::cuda
