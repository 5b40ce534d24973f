// This file answers what tests ask of the software GPU from Python, through ctypes:
// tests/softgpu/software_gpu.py.
#include <string>

#include "flashkernel/abi.h"
#include "softgpu/runtime/device.h"
#include "softgpu/runtime/errors.h"

using namespace fk::softgpu;

namespace {

// Returns a text that lives until this thread's next call.
const char* keep(std::string text) {
  static thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

}  // namespace

extern "C" {

// Returns what went wrong since the last call, a line each, or "". The GPU takes launches again.
FK_API const char* fk_softgpu_take_problems() { return keep(forget_problems()); }

// Returns the allocations that were not freed, a line each.
FK_API const char* fk_softgpu_allocations() {
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  std::string lines;
  for (const std::string& line : device.memory().leaks()) lines += line + "\n";
  return keep(lines);
}

// Says whether launches are kept with their counters, for fk_softgpu_take_launches.
FK_API void fk_softgpu_record(bool on) {
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  device.record_launches(on);
}

// Returns a JSON list of the launches since the last call.
FK_API const char* fk_softgpu_take_launches() {
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  return keep(device.take_launches());
}

// Returns the PTX of a kernel's translation unit, by its mangled name, or "" where there is no such
// kernel.
FK_API const char* fk_softgpu_ptx(const char* kernel) {
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  return keep(device.ptx_of(kernel));
}

// Runs other PTX for one kernel, so that tests can spoil it; "" restores its own. Returns "", or
// why that cannot be done.
FK_API const char* fk_softgpu_replace_ptx(const char* kernel, const char* ptx) {
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  return keep(device.replace_ptx(kernel, ptx));
}

// Decodes every kernel of the library; *kernels becomes their number. Returns what is not
// understood, a line each.
FK_API const char* fk_softgpu_decode_all(uint64_t* kernels) {
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  size_t count = 0;
  std::string problems = device.decode_all(&count);
  *kernels = count;
  return keep(std::move(problems));
}

// Sets the order in which things happen in later launches: LaunchOptions::seed and check_races.
FK_API void fk_softgpu_schedule(uint64_t seed, bool check_races) {
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  device.settings().launch.seed = seed;
  device.settings().launch.check_races = check_races;
}

// Later launches run about so many clusters each, spread over the grid: LaunchOptions::sample.
FK_API void fk_softgpu_sample(uint64_t clusters) {
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  device.settings().launch.sample = clusters;
}

// Returns the chip that the software GPU stands for.
FK_API const char* fk_softgpu_chip() { return keep(Device::get().chip().name); }

}  // extern "C"
