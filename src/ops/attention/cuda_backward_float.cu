#include "ops/attention/cuda_backward_launch.cuh"

namespace fk::cuda::attention {

Status launch_backward_float(Backward p, BackwardPass pass, int dim, bool features,
                             const DeviceProperties& properties, cudaStream_t stream) {
  return launch_backward<__half, 2>(p, pass, dim, features, properties, stream);
}

}  // namespace fk::cuda::attention
