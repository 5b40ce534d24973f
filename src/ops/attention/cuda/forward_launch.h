// This file says how the forward's kernels are launched, by the type of their operands.
#pragma once

#include "cuda/launch.h"
#include "ops/attention/cuda/forward.cuh"

namespace fk::cuda::attention {

// Launches the kernel for operands of `kTerms` elements of type T each: float16 and bfloat16 have
// one, float32 is two of float16. `dim` is dim_of(problem); `features` is what ForwardTile calls
// so. Sets p.tiles.
template <class T, int kTerms>
Status launch_forward(const Forward& p, int dim, bool features, const DeviceProperties& properties,
                      cudaStream_t stream);

}  // namespace fk::cuda::attention
