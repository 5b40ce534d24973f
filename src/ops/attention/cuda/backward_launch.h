// This file says how the backward's kernels are launched, by the type of their operands.
#pragma once

#include "cuda/launch.h"
#include "ops/attention/cuda/backward.cuh"

namespace fk::cuda::attention {

enum class BackwardPass {
  kKeys,     // dk and dv, and dq where p.dq_sums is given
  kQueries,  // dq without atomics
  kBias      // dbias
};

// Launches the kernels of a pass for operands of `kTerms` elements of type T each: float16 and
// bfloat16 have one, float32 is two of float16. `dim` is dim_of(problem); `features` is what
// BackwardTile calls so. Sets p.tiles.
template <class T, int kTerms>
Status launch_backward(const Backward& p, BackwardPass pass, int dim, bool features,
                       const DeviceProperties& properties, cudaStream_t stream);

}  // namespace fk::cuda::attention
