// This file answers what a program asks of the GPU, of its streams and of a kernel, as the chip
// does.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <string>

#include "softgpu/runtime/device.h"
#include "softgpu/runtime/errors.h"
#include "softgpu/runtime/launch.h"

using namespace fk::softgpu;

namespace {

cudaError_t check_device(int device) {
  if (device == 0) return cudaSuccess;
  return fail(cudaErrorInvalidDevice, "device " + std::to_string(device) + " of 1");
}

// Returns false where the attribute is not known here.
bool attribute_of(const Chip& chip, cudaDeviceAttr attribute, int* value) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = chip.architecture / 10;
      return true;
    case cudaDevAttrComputeCapabilityMinor:
      *value = chip.architecture % 10;
      return true;
    case cudaDevAttrMultiProcessorCount:
      *value = chip.multiprocessors;
      return true;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = chip.shared_bytes_per_block_default;
      return true;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = chip.shared_bytes_per_block;
      return true;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = chip.shared_bytes_per_multiprocessor;
      return true;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      *value = chip.reserved_shared_bytes_per_block;
      return true;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
    case cudaDevAttrMaxRegistersPerBlock:
      *value = chip.registers_per_multiprocessor;
      return true;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = chip.threads_per_block;
      return true;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = chip.threads_per_multiprocessor;
      return true;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = chip.blocks_per_multiprocessor;
      return true;
    case cudaDevAttrWarpSize:
      *value = 32;
      return true;
    case cudaDevAttrL2CacheSize:
      *value = static_cast<int>(chip.l2_bytes);
      return true;
    case cudaDevAttrClusterLaunch:
      *value = chip.architecture >= 90 ? 1 : 0;
      return true;
    case cudaDevAttrUnifiedAddressing:
      *value = 1;
      return true;
    default:
      return false;
  }
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return corrupted();
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return corrupted();
}

cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t error = check_device(device)) return error;
  return corrupted();
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (const cudaError_t error = check_device(device)) return error;
  if (attribute_of(Device::get().chip(), attribute, value)) return corrupted();
  return fail(cudaErrorInvalidValue, "device attribute " + std::to_string(attribute) +
                                         " is not known to the software GPU");
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (const cudaError_t error = check_device(device)) return error;
  const Chip& chip = Device::get().chip();
  cudaDeviceProp p = {};
  std::snprintf(p.name, sizeof p.name, "%s in software", chip.name.c_str());
  p.major = chip.architecture / 10;
  p.minor = chip.architecture % 10;
  p.totalGlobalMem = chip.memory_bytes;
  p.multiProcessorCount = chip.multiprocessors;
  p.l2CacheSize = static_cast<int>(chip.l2_bytes);
  p.warpSize = 32;
  p.maxThreadsPerBlock = chip.threads_per_block;
  p.maxThreadsPerMultiProcessor = chip.threads_per_multiprocessor;
  p.maxBlocksPerMultiProcessor = chip.blocks_per_multiprocessor;
  p.regsPerBlock = p.regsPerMultiprocessor = chip.registers_per_multiprocessor;
  p.sharedMemPerBlock = static_cast<size_t>(chip.shared_bytes_per_block_default);
  p.sharedMemPerBlockOptin = static_cast<size_t>(chip.shared_bytes_per_block);
  p.sharedMemPerMultiprocessor = static_cast<size_t>(chip.shared_bytes_per_multiprocessor);
  p.reservedSharedMemPerBlock = static_cast<size_t>(chip.reserved_shared_bytes_per_block);
  p.unifiedAddressing = 1;
  *properties = p;
  return corrupted();
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* host_function) {
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  Kernel* kernel = nullptr;
  const KernelInfo* info = nullptr;
  Module* module = nullptr;
  if (const cudaError_t error = device.find(host_function, &kernel, &info, &module)) return error;
  cudaFuncAttributes a = {};
  a.ptxVersion = module->architecture();
  a.binaryVersion = device.chip().architecture;  // what the driver would make of the PTX
  a.sharedSizeBytes = info->static_shared_bytes;
  a.constSizeBytes = info->constant_bytes;
  a.maxThreadsPerBlock = info->threads_limit();
  a.maxDynamicSharedSizeBytes = static_cast<int>(kernel->max_dynamic_shared_bytes);
  *attributes = a;
  return corrupted();
}

cudaError_t cudaFuncSetAttribute(const void* host_function, cudaFuncAttribute attribute,
                                 int value) {
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  Kernel* kernel = nullptr;
  const KernelInfo* info = nullptr;
  Module* module = nullptr;
  if (const cudaError_t error = device.find(host_function, &kernel, &info, &module)) return error;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) {
    return fail(cudaErrorNotSupported, "kernel attribute " + std::to_string(attribute) +
                                           " is not known to the software GPU");
  }
  const int most =
      device.chip().shared_bytes_per_block - static_cast<int>(info->static_shared_bytes);
  if (value < 0 || value > most) {
    return fail(cudaErrorInvalidValue, info->name + ": " + std::to_string(value) +
                                           " bytes of dynamic shared memory; expected 0 to " +
                                           std::to_string(most));
  }
  kernel->max_dynamic_shared_bytes = static_cast<size_t>(value);
  return corrupted();
}

// Everything is done when its call returns.
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const cudaError_t error = check_stream(stream)) return error;
  return corrupted();
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  if (const cudaError_t error = check_stream(stream)) return error;
  *status = cudaStreamCaptureStatusNone;
  return corrupted();
}

}  // extern "C"
