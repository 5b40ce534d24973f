// Launches, as the CUDA runtime would take or refuse them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace fk::softgpu {

struct LaunchRequest {
  dim3 grid, block, cluster;
  size_t dynamic_shared_bytes = 0;
  bool early = false;  // programmatic stream serialization: may start ahead of earlier kernels' end
  bool cooperative = false;  // all blocks are on the chip at once, or the launch is refused
};

// Runs a kernel to its end: streams are in order, and a kernel is done when its launch returns. So
// an error of the kernel itself is returned here, where CUDA would tell it later.
cudaError_t launch_kernel(const void* host_function, const LaunchRequest& request,
                          cudaStream_t stream, void** arguments);

// Returns cudaSuccess where the stream is one that this stand-in has: the default ones.
cudaError_t check_stream(cudaStream_t stream);

}  // namespace fk::softgpu
