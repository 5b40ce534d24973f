// What the host side of a kernel file needs: errors as Status, the device of a call, its
// properties.
#pragma once

#include <cuda_runtime_api.h>

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
  int max_threads_per_multiprocessor;
  int shared_bytes_per_block;  // the most a block may ask for (opt-in)
  int shared_bytes_per_multiprocessor;
  int capability;  // 10 * major + minor: 75, 80, 90
  // What the device code was compiled for, in the same count: less than the capability where the
  // library holds PTX of an older architecture only. sm_90's instructions need 90 here.
  int code;
};

// Read once per device, then cached. Where there is no such device (a workspace query on a machine
// without a GPU), those of an H200.
const DeviceProperties& device_properties(int device);

// Launches `kernel` so that it may start before the kernels ahead of it in the stream are done.
// It must call wait_for_earlier_kernels (dependent_launch.cuh). Below sm_90, a plain launch.
Status launch_early(int device, const void* kernel, const char* name, dim3 grid, int threads,
                    void** arguments, cudaStream_t stream);

// Raises a kernel's limit of dynamic shared memory; needed above 48 KB.
Status allow_shared_bytes(const void* kernel, int bytes);

}  // namespace fk::cuda
