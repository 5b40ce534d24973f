#include "core/build_info.h"

#include "core/thread_pool.h"
#include "cpu/targets.h"
#if FK_HAVE_CUDA
#include "cuda/runtime.h"
#endif

namespace fk {

const char* cuda_architectures() { return FK_CUDA_ARCHITECTURES; }

const char* compiler() {
#ifdef __clang__
  return __VERSION__;  // begins with its name
#else
  return "GCC " __VERSION__;
#endif
}

std::string build_info_json() {
  std::string json =
      "{\"version\": \"" FK_VERSION "\", \"compiler\": \"" + std::string(compiler()) + "\"";
  json += ", \"threads\": " + std::to_string(num_threads());
  json += ", \"cpu_target\": \"" + std::string(cpu::active_target()) + "\"";
  json += ", \"cpu_targets\": \"" + cpu::target_list() + "\"";
  json += ", \"cuda_architectures\": \"" + std::string(cuda_architectures()) + "\", \"gpus\": [";
#if FK_HAVE_CUDA
  bool first = true;
  for (const cuda::Gpu& gpu : cuda::gpus()) {
    if (!first) json += ", ";
    first = false;
    json += "{\"name\": \"" + gpu.name + "\", \"capability\": \"" + std::to_string(gpu.major) +
            "." + std::to_string(gpu.minor) +
            "\", \"multiprocessors\": " + std::to_string(gpu.multiprocessors) +
            ", \"memory_bytes\": " + std::to_string(gpu.memory_bytes) + "}";
  }
  json += "], \"cuda_runtime\": \"" + cuda::runtime_version() + "\", \"cuda_driver\": \"" +
          cuda::driver_version() + "\"}";
#else
  json += "]}";
#endif
  return json;
}

}  // namespace fk
