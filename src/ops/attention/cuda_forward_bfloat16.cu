#include "ops/attention/cuda_forward_launch.cuh"

namespace fk::cuda::attention {

Status launch_forward_bfloat16(Forward p, int dim, bool features,
                               const DeviceProperties& properties, cudaStream_t stream) {
  return launch_forward<__nv_bfloat16, 1>(p, dim, features, properties, stream);
}

}  // namespace fk::cuda::attention
