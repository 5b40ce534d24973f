// What the host side of a kernel file needs: CUDA's errors as Status, the device's properties, and
// launches.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "core/exec.h"
#include "core/integers.h"
#include "core/status.h"
#include "core/tensor.h"
#include "cuda/runtime.h"

namespace fk::cuda {

// Turns a CUDA error into a Status; `what` names the call or the kernel in its message.
Status check(cudaError_t error, const char* what);

// Returns what a launch by <<<>>> itself found wrong, such as a bad configuration; call it right
// after the launch. It does not wait for the kernel, so it does not see what goes wrong inside.
Status check_launch(const char* kernel);

// The stream that a call runs on.
inline cudaStream_t stream_of(const Exec& exec) { return static_cast<cudaStream_t>(exec.stream()); }

struct DeviceProperties {
  int multiprocessors;
  int shared_bytes_per_block;  // the most a block may ask for (opt-in)
  int shared_bytes_per_multiprocessor;
  // The architecture that the device code was compiled for: 75, 80 or 90. It is less than what the
  // device is capable of where the library holds only PTX of an older architecture. Kernels with
  // sm_90's instructions need 90 here.
  int code;
};

// Returns the device's properties, which are read once and then cached. Where there is no such
// device (a workspace query on a machine without a GPU), returns those of an H200.
const DeviceProperties& device_properties(int device);

// Returns a grid of at least `blocks` blocks, counted along x, then y.
inline dim3 grid_of(int64_t blocks) {
  constexpr int64_t kMaxX = 1 << 30;
  return dim3(static_cast<unsigned>(blocks < kMaxX ? blocks : kMaxX),
              static_cast<unsigned>(ceil_div(blocks, kMaxX)));
}

struct LaunchShape {
  dim3 blocks;
  dim3 threads;            // per block
  int shared_bytes = 0;    // of dynamic shared memory per block
  bool clustered = false;  // sm_90: the blocks that differ only in z form a cluster
  // All blocks are on the device at once, or the launch fails: they may wait for each other. Such
  // a kernel never starts early.
  bool cooperative = false;
};

// Launches `kernel` on the current device; `name` is for errors and logs. If `early`, the kernel
// may start before the kernels ahead of it in the stream are done, also in a stream capture, and
// must call wait_for_earlier_kernels (cuda/dependent_launch.cuh). Where the device code is below
// sm_90, `early` and `clustered` have no effect.
Status launch(const void* kernel, const char* name, const LaunchShape& shape, cudaStream_t stream,
              const void* const* arguments, bool early);

// How many blocks of a kernel the current device can hold at once where nothing else runs on it:
// the most that a cooperative launch may have.
int64_t resident_blocks(const void* kernel, int threads, int shared_bytes);

// Launches `kernel` early (see `launch`). `arguments` become its parameters and are converted to
// their types.
template <class... Parameters>
Status launch_early(void (*kernel)(Parameters...), const char* name, const LaunchShape& shape,
                    cudaStream_t stream, const std::common_type_t<Parameters>&... arguments) {
  const void* pointers[] = {&arguments...};
  return launch(reinterpret_cast<const void*>(kernel), name, shape, stream, pointers, true);
}

}  // namespace fk::cuda
