// Tells a block of the forward where it works.
#pragma once

#include "cuda/convert.cuh"
#include "cuda/gates.cuh"
#include "cuda/parameter.cuh"
#include "ops/selective_scan/cuda/scan.h"

namespace fk::cuda {

// A block works on these channels of this segment.
struct BlockChannels {
  Segment segment;
  int64_t slot;
  int64_t channel;  // first
  int channels;     // that exist
  int group, block;

  // Returns this block among blocks of `width` channels.
  __device__ __forceinline__ static BlockChannels of_block(const ScanArgs& a, int width) {
    BlockChannels p;
    const int64_t per_group = a.channels / a.groups;
    const auto split = [&](auto block) {
      using Index = decltype(block);
      const Index blocks = static_cast<Index>(a.blocks_per_group);
      const Index groups = static_cast<Index>(a.groups);
      p.block = static_cast<int>(block % blocks);
      p.group = static_cast<int>(block / blocks % groups);
      p.slot = static_cast<int64_t>(block / blocks / groups);
    };
    if (gridDim.y == 1) {  // short divisions
      split(blockIdx.x);
    } else {
      split(blockIdx.x + uint64_t{blockIdx.y} * gridDim.x);
    }
    p.segment = a.segments[p.slot];
    p.segment.exists = p.segment.exists && p.slot < a.segments.slots;
    const int64_t within = int64_t{p.block} * width;
    p.channel = p.group * per_group + within;
    p.channels = static_cast<int>(per_group - within < width ? per_group - within : width);
    return p;
  }
  template <class T>
  __device__ __forceinline__ T* at(const StepView& view, int64_t step) const {
    return static_cast<T*>(view.data) + segment.batch * view.batch + step * view.step +
           channel * view.channel;
  }
};

// Loads the value of one channel of the block, or 0 where there is none.
template <class T>
__device__ __forceinline__ float channel_value(const ChannelView& view, const BlockChannels& place,
                                               int c) {
  if (view.data == nullptr || c >= place.channels) return 0;
  return load_either<T>(view.data, view.is_float, (place.channel + c) * view.stride);
}

}  // namespace fk::cuda
