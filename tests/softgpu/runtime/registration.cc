// This file holds what nvcc's host code calls by itself: before main to register its kernels, and
// around each <<<...>>>. The functions are documented nowhere; their types are those of CUDA 12 and
// 13's crt/host_runtime.h.
#include <cuda_runtime_api.h>

#include <vector>

#include "softgpu/runtime/device.h"
#include "softgpu/runtime/launch.h"

using namespace fk::softgpu;

namespace {

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
// Holds this thread's launches whose arguments are being made.
thread_local std::vector<Configuration> configurations;

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  return reinterpret_cast<void**>(device.add_binary(wrapper));
}

void __cudaRegisterFatBinaryEnd(void**) {}

// The kernels stay: those of a library are unregistered at the end of the process.
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void** binary, const char* host_function, char*, const char* name, int,
                            uint3*, uint3*, dim3*, dim3*, int*) {
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  device.add_kernel(host_function, reinterpret_cast<LoadedBinary*>(binary), name);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                     CUstream_st* stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                       void* stream) {
  const Configuration top = configurations.back();
  configurations.pop_back();
  *grid = top.grid;
  *block = top.block;
  *shared_bytes = top.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = top.stream;
  return cudaSuccess;
}

// A kernel's handle is here the address of its host function.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host_function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host_function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared_bytes, cudaStream_t stream) {
  return launch_kernel(reinterpret_cast<const void*>(kernel),
                       {grid, block, {1, 1, 1}, shared_bytes}, stream, arguments);
}

// The host code of CUDA 12 calls this instead.
cudaError_t cudaLaunchKernel(const void* host_function, dim3 grid, dim3 block, void** arguments,
                             size_t shared_bytes, cudaStream_t stream) {
  return launch_kernel(host_function, {grid, block, {1, 1, 1}, shared_bytes}, stream, arguments);
}

}  // extern "C"
