// Launches kernels, turns CUDA's errors into Status, and reads what the device can do.
#include <cstdio>
#include <mutex>
#include <string>

#include "core/environment.h"
#include "cuda/launch.h"

namespace fk::cuda {

namespace {

// An empty kernel that stands for all others when we ask which architecture's code the device runs:
// they are all compiled for the same list.
__global__ void any_kernel() {}

// Returns the architecture (75, 80, 90) of the code that `device` runs, or 0 where the library has
// no code for it: the launches then fail and say so.
int code_on(int device) {
  const DeviceGuard guard(device);
  cudaFuncAttributes attributes;
  if (guard.status().ok() && cudaFuncGetAttributes(&attributes, any_kernel) == cudaSuccess) {
    return attributes.ptxVersion;
  }
  static_cast<void>(cudaGetLastError());  // clears the error, or a later launch check finds it
  return 0;
}

// Says on stderr which kernel is launched, and how, if FK_LOG asks for it.
void log_launch(const char* name, const LaunchShape& shape) {
  if (!logs_dispatch()) return;
  std::fprintf(stderr,
               "flashkernel:   %s: %u x %u x %u blocks of %u threads, %d bytes of shared memory\n",
               name, shape.blocks.x, shape.blocks.y, shape.blocks.z,
               shape.threads.x * shape.threads.y * shape.threads.z, shape.shared_bytes);
}

}  // namespace

Status check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return {FK_CUDA_ERROR, std::string(what) + ": " + cudaGetErrorString(error) + " (" +
                             cudaGetErrorName(error) + ")"};
}

Status check_launch(const char* kernel) {
  if (logs_dispatch()) std::fprintf(stderr, "flashkernel:   %s\n", kernel);
  return check(cudaGetLastError(), kernel);
}

DeviceGuard::DeviceGuard(int device) {
  int current = -1;
  error_ = cudaGetDevice(&current);
  if (error_ != cudaSuccess || current == device) return;
  error_ = cudaSetDevice(device);
  if (error_ == cudaSuccess) previous_ = current;
}

Status DeviceGuard::status() const {
  return check(static_cast<cudaError_t>(error_), "cudaSetDevice");
}

DeviceGuard::~DeviceGuard() {
  // Nothing can be reported from here; the next call would meet the same error.
  if (previous_ >= 0) static_cast<void>(cudaSetDevice(previous_));
}

const DeviceProperties& device_properties(int device) {
  static constexpr DeviceProperties kH200 = {132, 227 * 1024, 228 * 1024, 90};
  static constexpr int kMaxDevices = 64;
  static DeviceProperties properties[kMaxDevices];
  static std::once_flag read[kMaxDevices];
  if (device < 0 || device >= kMaxDevices) return kH200;
  std::call_once(read[device], [device] {
    bool found = true;
    const auto get = [&](cudaDeviceAttr attribute) {
      int value = 0;
      if (cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) found = false;
      return value;
    };
    DeviceProperties& p = properties[device];
    p.multiprocessors = get(cudaDevAttrMultiProcessorCount);
    p.shared_bytes_per_block = get(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    p.shared_bytes_per_multiprocessor = get(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    if (found) {
      p.code = code_on(device);
    } else {
      static_cast<void>(cudaGetLastError());  // clears the error, or a later launch check finds it
      p = kH200;
    }
  });
  return properties[device];
}

Status launch(const void* kernel, const char* name, const LaunchShape& shape, cudaStream_t stream,
              const void* const* arguments, bool early) {
  int device = 0;
  FK_RETURN_IF_ERROR(check(cudaGetDevice(&device), "cudaGetDevice"));
  // A kernel must ask for more than 48 KB of shared memory in all. Its static arrays, of at most 8
  // KB, count too.
  constexpr int kSharedByDefault = 40 * 1024;
  if (shape.shared_bytes > kSharedByDefault) {
    FK_RETURN_IF_ERROR(
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   shape.shared_bytes),
              name));
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = early ? 1 : 0;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = shape.blocks.z;
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.blocks;
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = device_properties(device).code < 90 ? 0 : shape.clustered ? 2 : 1;
  log_launch(name, shape);
  return check(cudaLaunchKernelExC(&config, kernel, const_cast<void**>(arguments)), name);
}

}  // namespace fk::cuda
