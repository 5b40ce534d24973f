// The CUDA runtime for the parts of the library that do not include CUDA's headers. It is linked
// only where FK_HAVE_CUDA is defined. On a machine without a driver there are 0 devices, and
// nothing fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/status.h"

namespace fk::cuda {

// What `fk info` and the bindings report of a GPU.
struct Gpu {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int64_t memory_bytes = 0;
  int64_t l2_bytes = 0;
};

// The number of GPUs that are visible; 0 without a driver.
int device_count();
std::vector<Gpu> gpus();

// The versions, such as "13.0", of the runtime that this library is linked with and of the newest
// runtime that the installed driver supports ("none" without a driver).
std::string runtime_version();
std::string driver_version();

// Makes `device` the calling thread's current device for as long as the guard lives, and then
// restores the one before. `status` says whether that worked.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  Status status() const;

 private:
  int previous_ = -1;  // the device to restore, or -1 for none
  int error_ = 0;      // a cudaError_t
};

// These act on GPU number `device` and leave the caller's current device as it was. copy_to_host
// returns once the bytes are there. `stream` is a cudaStream_t; null is the default stream. Memory
// from device_malloc belongs to the caller, who returns it with device_free.
Status device_malloc(int device, size_t bytes, void** pointer);
Status device_free(int device, void* pointer);
Status copy_to_device(int device, void* to, const void* from, size_t bytes);
Status copy_to_host(int device, void* to, const void* from, size_t bytes);
Status synchronize(int device, void* stream);

}  // namespace fk::cuda
