// The forward's kernels by operands' type, each compiled in a file of its own.
#pragma once

#include "cuda/launch.h"
#include "ops/attention/cuda_forward.cuh"

namespace fk::cuda::attention {

// `dim` is dim_of(problem); `features` as in ForwardTile. Sets p.tiles.
Status launch_forward_half(Forward p, int dim, bool features, const DeviceProperties& properties,
                           cudaStream_t stream);
Status launch_forward_bfloat16(Forward p, int dim, bool features,
                               const DeviceProperties& properties, cudaStream_t stream);
// Operands of two terms.
Status launch_forward_float(Forward p, int dim, bool features, const DeviceProperties& properties,
                            cudaStream_t stream);

// Hopper (cuda_sm90_float.cuh): float32 as it is, aligned to 16 bytes, at most 128 columns, scores
// only scaled.
Status launch_forward_float_sm90(const Forward& p, int dim, const DeviceProperties& properties,
                                 cudaStream_t stream);

}  // namespace fk::cuda::attention
