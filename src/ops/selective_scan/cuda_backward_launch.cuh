// The shapes of the backward's blocks, and their launch for one dtype.
#pragma once

#include "cuda/row_walk.cuh"
#include "ops/selective_scan/cuda_backward.cuh"

namespace fk::cuda {

template <class T, class Tile>
Status launch_reverse_tile(ReverseArgs a, cudaStream_t stream) {
  a.scan.blocks_per_group =
      static_cast<int>(ceil_div(a.scan.channels / a.scan.groups, Tile::kChannels));
  const int64_t blocks = int64_t{a.scan.blocks_per_group} * a.scan.groups * a.scan.segments.slots;
  if (blocks == 0) return {};
  return launch_early(reverse_chunks<T, Tile>, "reverse_chunks",
                      {grid_of(blocks), Tile::kThreads, Tile::kSharedBytes}, stream, a);
}

template <class T>
Status launch_reverse(ReverseShape shape, const ReverseArgs& a, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  switch (shape) {
    case ReverseShape::kWide:
      return launch_reverse_tile<T, WideReverseTile>(a, s);
    case ReverseShape::kSmall:
      return launch_reverse_tile<T, SmallReverseTile>(a, s);
    default:
      return launch_reverse_tile<T, ManyReverseTile>(a, s);
  }
}

}  // namespace fk::cuda
