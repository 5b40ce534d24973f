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

// Lets a kernel use so much dynamic shared memory. It must ask for more than 48 KB in all; its
// static arrays, of at most 8 KB, count too.
Status allow_shared_bytes(const void* kernel, int bytes) {
  constexpr int kByDefault = 40 * 1024;
  if (bytes <= kByDefault) return {};
  return check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "cudaFuncSetAttribute");
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

int64_t resident_blocks(const void* kernel, int threads, int shared_bytes) {
  int device = 0, blocks = 0;
  const bool found =
      cudaGetDevice(&device) == cudaSuccess && allow_shared_bytes(kernel, shared_bytes).ok() &&
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(
          &blocks, kernel, threads, static_cast<size_t>(shared_bytes)) == cudaSuccess;
  if (!found) {
    static_cast<void>(cudaGetLastError());  // clears the error, or a later launch check finds it
    return 0;
  }
  return int64_t{blocks} * device_properties(device).multiprocessors;
}

Status launch(const void* kernel, const char* name, const LaunchShape& shape, cudaStream_t stream,
              const void* const* arguments, bool early) {
  int device = 0;
  FK_RETURN_IF_ERROR(check(cudaGetDevice(&device), "cudaGetDevice"));
  FK_RETURN_IF_ERROR(allow_shared_bytes(kernel, shape.shared_bytes));
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (shape.cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  } else if (device_properties(device).code >= 90) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = early ? 1 : 0;
    if (shape.clustered) {
      attributes[count].id = cudaLaunchAttributeClusterDimension;
      attributes[count].val.clusterDim.x = attributes[count].val.clusterDim.y = 1;
      attributes[count++].val.clusterDim.z = shape.blocks.z;
    }
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.blocks;
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  log_launch(name, shape);
  return check(cudaLaunchKernelExC(&config, kernel, const_cast<void**>(arguments)), name);
}

}  // namespace fk::cuda
