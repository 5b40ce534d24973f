// This file declares the one GPU of the process, its kernels, and what was launched on it.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "softgpu/runtime/settings.h"
#include "softgpu/softgpu.h"

namespace fk::softgpu {

// Holds one translation unit's device code, read when its first kernel is asked for.
struct LoadedBinary {
  explicit LoadedBinary(const void* wrapper) : wrapper(wrapper) {}
  const void* wrapper;
  bool read = false;
  cudaError_t error = cudaSuccess;  // why there is no module
  std::string problem;
  std::unique_ptr<Module> module;
};

struct Kernel {
  LoadedBinary* binary = nullptr;
  std::string name;                     // mangled
  size_t max_dynamic_shared_bytes = 0;  // as cudaFuncSetAttribute set it
  std::unique_ptr<Module> replacement;  // runs in place of the binary's code, where there is one
};

// One thread at a time uses the device: whoever calls a function holds `mutex`.
class Device {
 public:
  static Device& get();

  std::mutex mutex;
  Gpu& gpu() { return *gpu_; }
  Memory& memory() { return gpu_->memory(); }
  const Chip& chip() const { return gpu_->chip(); }
  Settings& settings() { return settings_; }

  LoadedBinary* add_binary(const void* wrapper);
  void add_kernel(const void* host_function, LoadedBinary* binary, const char* name);

  // Finds the kernel of a host function and loads its code. Returns cudaSuccess, or the error as
  // errors.h's fail() gives it.
  cudaError_t find(const void* host_function, Kernel** kernel, const KernelInfo** info,
                   Module** module);

  // Returns the PTX of a kernel's translation unit, or "" where no kernel has this mangled name.
  std::string ptx_of(const std::string& kernel);
  // Runs other PTX for one kernel from now on; an empty text restores the binary's. Returns an
  // empty string, or why that cannot be done.
  std::string replace_ptx(const std::string& kernel, const std::string& ptx);

  // Decodes all kernels that this chip would run, and counts them. Returns what is not understood,
  // a line each.
  std::string decode_all(size_t* kernels);

  // Appends one launch to the file of counters, if there is one, and to those that are taken.
  void record(const Launch& launch, const Counters& counters, double seconds);
  // Returns a JSON list of the launches since the last call; only while record_launches(true).
  std::string take_launches();
  void record_launches(bool on);

 private:
  Device();
  Kernel* named(const std::string& kernel);

  Settings settings_;
  std::unique_ptr<Gpu> gpu_;
  std::vector<std::unique_ptr<LoadedBinary>> binaries_;
  std::map<const void*, Kernel> kernels_;
  bool recording_ = false;
  std::vector<std::string> launches_;
};

}  // namespace fk::softgpu
