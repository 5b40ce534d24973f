#include <cstdio>
#include <fstream>

#include "cli/commands.h"
#include "core/build_info.h"
#include "core/thread_pool.h"
#include "cpu/targets.h"
#include "flashkernel/abi.h"
#if FK_HAVE_CUDA
#include "cuda/runtime.h"
#endif

namespace fk::cli {
namespace {

// Reads the value of the first line of /proc/cpuinfo that starts with `key`.
std::string cpuinfo(const std::string& key) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (line.compare(0, key.size(), key) == 0 && colon != std::string::npos) {
      return line.substr(std::min(colon + 2, line.size()));
    }
  }
  return "";
}

// Lists those features of the machine that matter to the kernels.
std::string cpu_features() {
  static const char* const kInteresting[] = {
      "sse4_1",   "sse4_2",   "avx",      "f16c",     "fma",         "avx2",        "avx_vnni",
      "avx512f",  "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16",
      "amx_bf16", "amx_int8", "asimd",    "asimdhp",  "bf16",        "sve"};
  std::string flags = cpuinfo("flags");
  if (flags.empty()) flags = cpuinfo("Features");
  flags = " " + flags + " ";
  std::string found;
  for (const char* name : kInteresting) {
    if (flags.find(std::string(" ") + name + " ") == std::string::npos) continue;
    found += (found.empty() ? "" : " ") + std::string(name);
  }
  return found;
}

void print_cuda() {
#if FK_HAVE_CUDA
  std::printf("CUDA          compiled for %s; runtime %s, driver %s\n", cuda_architectures(),
              cuda::runtime_version().c_str(), cuda::driver_version().c_str());
  const std::vector<cuda::Gpu> gpus = cuda::gpus();
  for (size_t i = 0; i < gpus.size(); ++i) {
    std::printf("GPU %zu         %s, capability %d.%d, %d multiprocessors, %.1f GiB\n", i,
                gpus[i].name.c_str(), gpus[i].major, gpus[i].minor, gpus[i].multiprocessors,
                static_cast<double>(gpus[i].memory_bytes) / (1 << 30));
  }
  if (gpus.empty()) std::printf("GPU           none visible\n");
#else
  std::printf("CUDA          not in this build\n");
#endif
}

}  // namespace

int info(bool json) {
  if (json) {
    std::printf("%s\n", fk_build_info());
    return 0;
  }
  std::printf("FlashKernel   %s, compiled by %s\n", fk_version(), compiler());
  const std::string model = cpuinfo("model name");
  std::printf("CPU           %s\n", model.empty() ? "unknown" : model.c_str());
  std::printf("features      %s\n", cpu_features().c_str());
  std::printf("target        %s (of %s), %d threads\n", cpu::active_target(),
              cpu::target_list().c_str(), num_threads());
  print_cuda();

  std::printf("\n%-27s %-12s %s\n", "op", "cpu", FK_HAVE_CUDA ? "cuda" : "");
  for (const auto& op : Registry::get().ops()) {
    DrawnCall drawn_call;
    std::string cpu = "-", cuda = "-";
    if (draw_call(*op, {}, &drawn_call).ok()) {
      cpu = implementation_of(drawn_call, kDLCPU);
      cuda = implementation_of(drawn_call, kDLCUDA);
    }
    std::printf("%-27s %-12s %s\n", op->declaration.name.c_str(), cpu.c_str(),
                FK_HAVE_CUDA ? cuda.c_str() : "");
  }
  return 0;
}

}  // namespace fk::cli
