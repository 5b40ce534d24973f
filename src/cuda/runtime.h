// The CUDA runtime as the rest of the library sees it, without CUDA's headers. Linked only where
// FK_HAVE_CUDA is defined. On a machine without a driver there are 0 devices and nothing fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/status.h"

namespace fk::cuda {

struct Gpu {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int64_t memory_bytes = 0;
  int64_t l2_bytes = 0;
};

int device_count();
std::vector<Gpu> gpus();

// The versions of the runtime this library is linked with and of the driver found ("none" if there
// is none), such as "13.0".
std::string runtime_version();
std::string driver_version();

// Makes `device` current and puts back the caller's on destruction.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  Status status() const;

 private:
  int previous_ = -1;  // -1: nothing to put back
  int error_ = 0;      // a cudaError_t
};

// `device` is the index of the GPU; the caller's current device is left as it was. Streams are
// cudaStream_t; NULL is the default stream.
Status device_malloc(int device, size_t bytes, void** pointer);
Status device_free(int device, void* pointer);
Status copy_to_device(int device, void* to, const void* from, size_t bytes);
Status copy_to_host(int device, void* to, const void* from, size_t bytes);
Status synchronize(int device, void* stream);

}  // namespace fk::cuda
