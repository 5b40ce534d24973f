// The backward's kernels by operands' type, each compiled in a file of its own.
#pragma once

#include "cuda/launch.h"
#include "ops/attention/cuda_backward.cuh"

namespace fk::cuda::attention {

enum class BackwardPass {
  kKeys,     // dk and dv, and dq where p.dq_sums is given
  kQueries,  // dq without atomics
  kBias      // dbias
};

// `dim` is dim_of(problem); `features` as in BackwardTile. Sets p.tiles.
Status launch_backward_half(Backward p, BackwardPass pass, int dim, bool features,
                            const DeviceProperties& properties, cudaStream_t stream);
Status launch_backward_bfloat16(Backward p, BackwardPass pass, int dim, bool features,
                                const DeviceProperties& properties, cudaStream_t stream);
// Operands of two terms.
Status launch_backward_float(Backward p, BackwardPass pass, int dim, bool features,
                             const DeviceProperties& properties, cudaStream_t stream);

}  // namespace fk::cuda::attention
