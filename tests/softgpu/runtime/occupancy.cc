// This file answers how many blocks fit on the GPU at once.
#include <cuda_runtime_api.h>

#include "softgpu/runtime/device.h"
#include "softgpu/runtime/errors.h"

using namespace fk::softgpu;

extern "C" cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks,
                                                                     const void* host_function,
                                                                     int threads,
                                                                     size_t shared_bytes) {
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  Kernel* kernel = nullptr;
  const KernelInfo* info = nullptr;
  Module* module = nullptr;
  if (const cudaError_t error = device.find(host_function, &kernel, &info, &module)) return error;
  *blocks = device.gpu().blocks_per_multiprocessor(*info, threads, shared_bytes);
  return corrupted();
}
