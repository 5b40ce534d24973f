#include "softgpu/runtime/device.h"

#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>

#include "softgpu/runtime/errors.h"
#include "softgpu/runtime/fat_binary.h"

namespace fk::softgpu {
namespace {

void print_leaks() {
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  for (const std::string& leak : device.memory().leaks()) {
    std::fprintf(stderr, "softgpu: never freed: %s\n", leak.c_str());
  }
}

std::string demangled(const std::string& name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  const std::string result = text != nullptr ? text : name;
  std::free(text);
  return result;
}

// Reads the images and parses the one that this chip would run.
void load(LoadedBinary* loaded, int architecture) {
  loaded->read = true;
  const FatBinary binary = read_fat_binary(loaded->wrapper);
  if (!binary.problem.empty()) {
    loaded->error = cudaErrorInvalidKernelImage;
    loaded->problem = binary.problem;
    return;
  }
  const PtxImage* image = choose_image(binary, architecture);
  if (image == nullptr) {
    loaded->error = cudaErrorNoKernelImageForDevice;
    loaded->problem = "no PTX for compute capability " + std::to_string(architecture) + " or less";
    return;
  }
  try {
    loaded->module = Module::parse(image->ptx, image->source);
  } catch (const ParseError& error) {
    loaded->error = cudaErrorInvalidKernelImage;
    loaded->problem =
        image->source + ": line " + std::to_string(error.line) + " of the PTX: " + error.what();
  }
}

std::string shape_json(const uint32_t (&shape)[3]) {
  return "[" + std::to_string(shape[0]) + ", " + std::to_string(shape[1]) + ", " +
         std::to_string(shape[2]) + "]";
}

}  // namespace

// The device is never destroyed: kernels are unregistered after everything else, and leaks are told
// at the end.
Device& Device::get() {
  static Device* device = [] {
    auto* made = new Device;
    return made;
  }();
  static const int registered = std::atexit(print_leaks);
  static_cast<void>(registered);
  return *device;
}

Device::Device() : settings_(settings_from_environment()), gpu_(Gpu::create(settings_.chip)) {}

LoadedBinary* Device::add_binary(const void* wrapper) {
  binaries_.push_back(std::make_unique<LoadedBinary>(wrapper));
  return binaries_.back().get();
}

void Device::add_kernel(const void* host_function, LoadedBinary* binary, const char* name) {
  Kernel& kernel = kernels_[host_function];
  kernel.binary = binary;
  kernel.name = name;
}

cudaError_t Device::find(const void* host_function, Kernel** kernel, const KernelInfo** info,
                         Module** module) {
  const auto found = kernels_.find(host_function);
  if (found == kernels_.end()) {
    return fail(cudaErrorInvalidDeviceFunction, "no kernel was registered for this function");
  }
  *kernel = &found->second;
  const std::string& name = found->second.name;
  *module = found->second.replacement.get();
  if (*module == nullptr) {
    LoadedBinary& binary = *found->second.binary;
    if (!binary.read) load(&binary, chip().architecture);
    if (binary.error != cudaSuccess) return fail(binary.error, name + ": " + binary.problem);
    *module = binary.module.get();
  }
  *info = (*module)->find(name);
  if (*info == nullptr) {
    return fail(cudaErrorInvalidDeviceFunction, name + ": not in the PTX for compute capability " +
                                                    std::to_string((*module)->architecture()));
  }
  return cudaSuccess;
}

Kernel* Device::named(const std::string& kernel) {
  for (auto& [host_function, registered] : kernels_) {
    if (registered.name == kernel) return &registered;
  }
  return nullptr;
}

std::string Device::ptx_of(const std::string& kernel) {
  const Kernel* registered = named(kernel);
  if (registered == nullptr) return "";
  const FatBinary binary = read_fat_binary(registered->binary->wrapper);
  const PtxImage* image = choose_image(binary, chip().architecture);
  return image == nullptr ? "" : image->ptx;
}

std::string Device::replace_ptx(const std::string& kernel, const std::string& ptx) {
  Kernel* registered = named(kernel);
  if (registered == nullptr) return kernel + ": there is no such kernel";
  registered->replacement = nullptr;
  if (ptx.empty()) return "";
  try {
    std::unique_ptr<Module> module = Module::parse(ptx, "replaced PTX");
    if (module->find(kernel) == nullptr) return kernel + ": not in the PTX given";
    registered->replacement = std::move(module);
    return "";
  } catch (const ParseError& error) {
    return "line " + std::to_string(error.line) + ": " + error.what();
  }
}

std::string Device::decode_all(size_t* kernels) {
  *kernels = 0;
  std::string problems;
  for (const auto& binary : binaries_) {
    if (!binary->read) load(binary.get(), chip().architecture);
    if (binary->error == cudaErrorNoKernelImageForDevice) continue;  // for newer chips alone
    if (binary->error != cudaSuccess) {
      problems += binary->problem + "\n";
      continue;
    }
    *kernels += binary->module->kernels().size();
    try {
      binary->module->decode_all();
    } catch (const ParseError& error) {
      problems += std::string(error.what()) + "\n";
    }
  }
  return problems;
}

void Device::record(const Launch& launch, const Counters& counters, double seconds) {
  if (settings_.log_launches) {
    std::fprintf(
        stderr, "softgpu: %s: %u x %u x %u blocks of %u threads, %llu warp instructions, %.1f ms\n",
        launch.kernel.c_str(), launch.grid[0], launch.grid[1], launch.grid[2],
        launch.block[0] * launch.block[1] * launch.block[2],
        static_cast<unsigned long long>(counters.warp_instructions), 1e3 * seconds);
  }
  if (!recording_ && settings_.counters_file.empty()) return;
  std::string json = "{\"kernel\": \"" + launch.kernel + "\", \"name\": \"" +
                     demangled(launch.kernel) + "\", \"grid\": " + shape_json(launch.grid) +
                     ", \"block\": " + shape_json(launch.block) +
                     ", \"cluster\": " + shape_json(launch.cluster) +
                     ", \"dynamic_shared_bytes\": " + std::to_string(launch.dynamic_shared_bytes) +
                     ", \"shared_bytes\": " +
                     std::to_string(launch.module->find(launch.kernel)->static_shared_bytes +
                                    launch.dynamic_shared_bytes) +
                     ", \"counters\": " + counters.to_json() + "}";
  if (!settings_.counters_file.empty()) {
    if (std::FILE* file = std::fopen(settings_.counters_file.c_str(), "a")) {
      std::fprintf(file, "%s\n", json.c_str());
      std::fclose(file);
    }
  }
  if (recording_) launches_.push_back(std::move(json));
}

std::string Device::take_launches() {
  std::string list = "[";
  for (const std::string& launch : launches_) {
    if (list.size() > 1) list += ",\n";
    list += launch;
  }
  launches_.clear();
  return list + "]";
}

void Device::record_launches(bool on) {
  recording_ = on;
  settings_.launch.count_memory = on || !settings_.counters_file.empty();
  launches_.clear();
}

}  // namespace fk::softgpu
