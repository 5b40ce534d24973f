// This file serves memory, which is allocated by the software GPU, or host memory that is presented
// as a GPU's for the length of a call.
#include <cuda_runtime_api.h>

#include <cstring>
#include <string>

#include "softgpu/runtime/device.h"
#include "softgpu/runtime/errors.h"
#include "softgpu/runtime/launch.h"

using namespace fk::softgpu;

namespace {

// Checks that a copy's end is what its kind says: all of it memory of the GPU, or none of its own.
cudaError_t check_end(Memory& memory, const void* pointer, size_t bytes, bool on_device,
                      const char* which) {
  if (on_device && !memory.contains(pointer, bytes)) {
    return fail(cudaErrorInvalidValue,
                std::string("the copy's ") + which + ", " + std::to_string(bytes) +
                    " bytes, is not all the GPU's: " + memory.describe(pointer));
  }
  if (!on_device && memory.is_allocated(pointer)) {
    return fail(cudaErrorInvalidMemcpyDirection, std::string("the copy's ") + which +
                                                     " is said to be the host's, but is " +
                                                     memory.describe(pointer));
  }
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  if (corrupted() != cudaSuccess) return corrupted();
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  *pointer = bytes == 0 ? nullptr : device.memory().allocate(bytes, "cudaMalloc");
  if (bytes == 0 || *pointer != nullptr) return cudaSuccess;
  return fail(cudaErrorMemoryAllocation, std::to_string(bytes) + " bytes asked for, " +
                                             std::to_string(device.memory().allocated_bytes()) +
                                             " of " + std::to_string(device.chip().memory_bytes) +
                                             " in use");
}

// Memory is given back after a kernel's error, too, as it is when a process ends.
cudaError_t cudaFree(void* pointer) {
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  if (pointer != nullptr && !device.memory().free(pointer)) {
    return fail(cudaErrorInvalidValue,
                "cudaFree of what is no allocation: " + device.memory().describe(pointer));
  }
  return corrupted();
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (corrupted() != cudaSuccess) return corrupted();
  if (bytes == 0) return cudaSuccess;
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  if (kind != cudaMemcpyDefault) {
    if (const cudaError_t error = check_end(device.memory(), to, bytes, to_device, "destination")) {
      return error;
    }
    if (const cudaError_t error = check_end(device.memory(), from, bytes, from_device, "source")) {
      return error;
    }
  }
  std::memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (corrupted() != cudaSuccess) return corrupted();
  if (const cudaError_t error = check_stream(stream)) return error;
  if (bytes == 0) return cudaSuccess;
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  if (const cudaError_t error = check_end(device.memory(), to, bytes, true, "destination")) {
    return error;
  }
  std::memset(to, value, bytes);
  return cudaSuccess;
}

}  // extern "C"
