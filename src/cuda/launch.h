// What the host side of a kernel file needs: errors as Status, the device of a call, its
// properties.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "core/exec.h"
#include "core/status.h"
#include "core/tensor.h"
#include "cuda/runtime.h"

namespace fk::cuda {

// `what` names the call or the kernel in the message.
Status check(cudaError_t error, const char* what);

// To be returned after each launch: what the launch itself could find wrong. Does not wait.
Status check_launch(const char* kernel);

inline cudaStream_t stream_of(const Exec& exec) { return static_cast<cudaStream_t>(exec.stream()); }

struct DeviceProperties {
  int multiprocessors;
  int shared_bytes_per_block;  // the most a block may ask for (opt-in)
  int shared_bytes_per_multiprocessor;
  // What the device code was compiled for: 75, 80, 90. Less than the device is capable of where the
  // library holds PTX of an older architecture only. sm_90's instructions need 90 here.
  int code;
};

// Read once per device, then cached. Where there is no such device (a workspace query on a machine
// without a GPU), those of an H200.
const DeviceProperties& device_properties(int device);

struct LaunchShape {
  dim3 blocks;
  dim3 threads;  // per block
  int shared_bytes = 0;
  bool clustered = false;  // the blocks of one place, counted along z, are a cluster: sm_90
};

// Launches `kernel` on the current device. `early`: so that it may start before the kernels ahead
// of it in the stream are done; in a stream capture too. It must call wait_for_earlier_kernels
// (dependent_launch.cuh). Where the device code is below sm_90, a plain launch.
Status launch(const void* kernel, const char* name, const LaunchShape& shape, cudaStream_t stream,
              const void* const* arguments, bool early);

// `arguments` become the kernel's parameters, converted where they differ.
template <class... Parameters>
Status launch_early(void (*kernel)(Parameters...), const char* name, const LaunchShape& shape,
                    cudaStream_t stream, const std::common_type_t<Parameters>&... arguments) {
  const void* pointers[] = {&arguments...};
  return launch(reinterpret_cast<const void*>(kernel), name, shape, stream, pointers, true);
}

}  // namespace fk::cuda
