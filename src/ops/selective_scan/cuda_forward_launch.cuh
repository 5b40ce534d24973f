// The shapes of the forward's blocks, and their launch for one dtype.
#pragma once

#include "cuda/row_walk.cuh"
#include "ops/selective_scan/cuda_forward.cuh"
#include "ops/selective_scan/cuda_forward_chunks.cuh"

namespace fk::cuda {

template <class T, class Tile, ScanPass kPass>
Status launch_tile(ScanArgs a, cudaStream_t stream) {
  const int width = Tile::kNarrow ? a.block_channels : Tile::kChannels;
  a.blocks_per_group = static_cast<int>(ceil_div(a.channels / a.groups, width));
  const int64_t blocks = int64_t{a.blocks_per_group} * a.groups * a.segments.slots;
  if (blocks == 0) return {};
  const int threads = Tile::template kStage<kPass> + width / Tile::kWarpChannels * 32;
  return launch_early(scan_forward<T, Tile, kPass>, "scan_forward",
                      {grid_of(blocks), dim3(threads), Tile::kSharedBytes}, stream, a);
}

template <class T, class Tile>
Status launch_chunks(ScanArgs a, cudaStream_t stream) {
  a.blocks_per_group = static_cast<int>(ceil_div(a.channels / a.groups, Tile::kChannels));
  const int64_t blocks = int64_t{a.blocks_per_group} * a.groups * a.segments.slots;
  if (blocks == 0) return {};
  return launch_early(scan_chunks<T, Tile>, "scan_chunks",
                      {grid_of(blocks), dim3(Tile::kThreads), Tile::kSharedBytes}, stream, a);
}

// Only kFew is ever cut into segments.
template <class T>
Status launch_scan(ScanPass pass, ScanShape shape, const ScanArgs& a, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (pass == ScanPass::kStates) return launch_tile<T, FewTile, ScanPass::kStates>(a, s);
  if (shape == ScanShape::kFew) return launch_tile<T, FewTile, ScanPass::kOutputs>(a, s);
  if (shape == ScanShape::kLong) return launch_tile<T, LongTile<T>, ScanPass::kOutputs>(a, s);
  if (shape == ScanShape::kTwelve) return launch_chunks<T, TwelveTile<T>>(a, s);
  if (shape == ScanShape::kEight) return launch_chunks<T, EightTile>(a, s);
  if (shape == ScanShape::kWide) return launch_tile<T, WideTile, ScanPass::kOutputs>(a, s);
  return launch_tile<T, ManyTile, ScanPass::kOutputs>(a, s);
}

}  // namespace fk::cuda
