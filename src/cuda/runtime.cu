// The CUDA runtime's calls behind runtime.h.
#include <cuda_runtime_api.h>

#include "cuda/launch.h"
#include "cuda/runtime.h"

namespace fk::cuda {

namespace {

// Turns CUDA's version number, 1000 * major + 10 * minor, into text; 0 means that there is none.
std::string version_string(int version) {
  if (version == 0) return "none";
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// Runs `call` while `device` is current and returns its error; `what` names the call in it.
template <class Call>
Status on_device(int device, const char* what, const Call& call) {
  const DeviceGuard guard(device);
  FK_RETURN_IF_ERROR(guard.status());
  return check(call(), what);
}

}  // namespace

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  // Having no driver or no GPU is an answer. The error is cleared, or a later launch check would
  // find it.
  static_cast<void>(cudaGetLastError());
  return 0;
}

std::vector<Gpu> gpus() {
  std::vector<Gpu> result;
  for (int device = 0; device < device_count(); ++device) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      continue;
    }
    Gpu gpu;
    gpu.name = properties.name;
    gpu.major = properties.major;
    gpu.minor = properties.minor;
    gpu.multiprocessors = properties.multiProcessorCount;
    gpu.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    gpu.l2_bytes = properties.l2CacheSize;
    result.push_back(gpu);
  }
  return result;
}

std::string runtime_version() {
  int version = 0;
  static_cast<void>(cudaRuntimeGetVersion(&version));
  return version_string(version);
}

std::string driver_version() {
  int version = 0;
  static_cast<void>(cudaDriverGetVersion(&version));
  return version_string(version);
}

Status device_malloc(int device, size_t bytes, void** pointer) {
  return on_device(device, "cudaMalloc", [&] { return cudaMalloc(pointer, bytes); });
}

Status device_free(int device, void* pointer) {
  return on_device(device, "cudaFree", [&] { return cudaFree(pointer); });
}

Status copy_to_device(int device, void* to, const void* from, size_t bytes) {
  return on_device(device, "cudaMemcpy to the device",
                   [&] { return cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice); });
}

Status copy_to_host(int device, void* to, const void* from, size_t bytes) {
  return on_device(device, "cudaMemcpy to the host",
                   [&] { return cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost); });
}

Status synchronize(int device, void* stream) {
  return on_device(device, "cudaStreamSynchronize",
                   [&] { return cudaStreamSynchronize(static_cast<cudaStream_t>(stream)); });
}

}  // namespace fk::cuda
