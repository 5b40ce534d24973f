// The steps of a chunk in one head, as the kernels of the backward prepare them: one warp for the
// others, from numbers that it has loaded ahead.
#pragma once

#include "ops/ssd/cuda/backward_tiles.cuh"
#include "ops/ssd/cuda/decays.cuh"

namespace fk::cuda::ssd {

using Steps = StepDecays<kSide>;
template <class T>
using Times = RawSteps<T, kSide>;

__device__ __forceinline__ int steps_of(const Segment& chunk) {
  return static_cast<int>(chunk.last - chunk.first);
}

template <class T>
__device__ __forceinline__ void load_times(const BackwardArguments& a, const Segment& chunk,
                                           int head, Times<T>* times) {
  times->load(a.in, chunk.batch, chunk.first, steps_of(chunk), head);
}

template <class T>
__device__ __forceinline__ void fill_steps(const BackwardArguments& a, const Segment& chunk,
                                           int head, const Times<T>& times, Steps* steps) {
  steps->template fill<T>(a.in, times, steps_of(chunk), a.in.A[head * a.in.A_head],
                          number_of_head<T>(a.in.dt_bias, head));
}

}  // namespace fk::cuda::ssd
