#include "softgpu/runtime/launch.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "softgpu/runtime/device.h"
#include "softgpu/runtime/errors.h"

namespace fk::softgpu {
namespace {

uint64_t volume(const dim3& shape) { return uint64_t{shape.x} * shape.y * shape.z; }

std::string text_of(const dim3& shape) {
  return std::to_string(shape.x) + " x " + std::to_string(shape.y) + " x " +
         std::to_string(shape.z);
}

cudaError_t check_shape(const KernelInfo& info, const LaunchRequest& request, const Chip& chip) {
  const dim3 &grid = request.grid, &block = request.block;
  if (volume(grid) == 0 || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535) {
    return fail(cudaErrorInvalidConfiguration,
                info.name + ": a grid of " + text_of(grid) +
                    " blocks; expected 1 to 2147483647 x 65535 x 65535");
  }
  const auto most = static_cast<uint64_t>(chip.threads_per_block);
  if (volume(block) == 0 || block.z > 64 || volume(block) > most) {
    return fail(cudaErrorInvalidConfiguration, info.name + ": a block of " + text_of(block) +
                                                   " threads; expected 1 to " +
                                                   std::to_string(most) + ", at most 64 along z");
  }
  if (volume(block) > static_cast<uint64_t>(info.threads_limit())) {
    return fail(cudaErrorLaunchOutOfResources,
                info.name + ": a block of " + std::to_string(volume(block)) +
                    " threads; its launch bounds allow " + std::to_string(info.threads_limit()));
  }
  return cudaSuccess;
}

cudaError_t check_cluster(const KernelInfo& info, const LaunchRequest& request, const Chip& chip) {
  const dim3 &grid = request.grid, &cluster = request.cluster;
  if (volume(cluster) == 1) return cudaSuccess;
  constexpr uint64_t kPortable = 8;
  const bool fits = volume(cluster) > 0 && volume(cluster) <= kPortable &&
                    grid.x % cluster.x == 0 && grid.y % cluster.y == 0 && grid.z % cluster.z == 0;
  if (chip.architecture < 90 || !fits) {
    return fail(cudaErrorInvalidClusterSize,
                info.name + ": clusters of " + text_of(cluster) + " blocks in a grid of " +
                    text_of(grid) +
                    (chip.architecture < 90 ? "; this chip has none" : "; expected at most 8"));
  }
  return cudaSuccess;
}

cudaError_t check_resources(const KernelInfo& info, const LaunchRequest& request,
                            const Kernel& kernel, Gpu& gpu) {
  const auto by_default = static_cast<size_t>(gpu.chip().shared_bytes_per_block_default);
  const size_t asked = info.static_shared_bytes + request.dynamic_shared_bytes;
  const bool allowed =
      asked <= by_default || request.dynamic_shared_bytes <= kernel.max_dynamic_shared_bytes;
  if (!allowed) {
    return fail(cudaErrorInvalidValue,
                info.name + ": " + std::to_string(info.static_shared_bytes) + " + " +
                    std::to_string(request.dynamic_shared_bytes) +
                    " bytes of shared memory; allowed are " + std::to_string(by_default) +
                    ", or of dynamic ones the " + std::to_string(kernel.max_dynamic_shared_bytes) +
                    " that cudaFuncSetAttribute set");
  }
  const auto threads = static_cast<int>(volume(request.block));
  const int fit = gpu.blocks_per_multiprocessor(info, threads, request.dynamic_shared_bytes);
  if (fit == 0) {
    return fail(cudaErrorLaunchOutOfResources,
                info.name + ": no block of " + std::to_string(threads) + " threads with " +
                    std::to_string(asked) + " bytes of shared memory fits on a multiprocessor");
  }
  const uint64_t at_once =
      static_cast<uint64_t>(fit) * static_cast<uint64_t>(gpu.chip().multiprocessors);
  if (request.cooperative && volume(request.grid) > at_once) {
    return fail(cudaErrorCooperativeLaunchTooLarge,
                info.name + ": a cooperative launch of " + std::to_string(volume(request.grid)) +
                    " blocks; " + std::to_string(at_once) + " fit on the chip at once");
  }
  return cudaSuccess;
}

void put(const dim3& from, uint32_t (&to)[3]) {
  to[0] = from.x;
  to[1] = from.y;
  to[2] = from.z;
}

// Names kernels that read shared memory which nobody wrote, or which is written meanwhile, and make
// nothing of what they get: it is NaN here, which the tests of their results would show. Others are
// those of which several threads store the same.
struct Waiver {
  const char* part_of_name;
  bool LaunchOptions::*check;
  const char* reason;
};
constexpr Waiver kWaivers[] = {
    {"8scan_fewI", &LaunchOptions::report_uninitialised,
     "each thread loads the steps after next, behind the last tile, too"},
    {"12scan_forwardI", &LaunchOptions::report_uninitialised,
     "threads of channels that are not there scan with the others"},
    {"13forward_floatI", &LaunchOptions::report_uninitialised,
     "a row's maximum and sum are fetched with the eight bytes behind them"},
    {"25attention_backward_kernelI", &LaunchOptions::report_overwritten_products,
     "behind the last step it multiplies whatever stands there: a branch would cost more"},
    {"30attention_backward_wide_kernelI", &LaunchOptions::report_overwritten_products,
     "as the kernel above"},
    {"30attention_backward_pair_kernelI", &LaunchOptions::report_overwritten_products,
     "as the kernel above"},
    {"17attention_forwardI", &LaunchOptions::report_equal_stores,
     "each warpgroup clears the values behind the last key, which all of them multiply"},
};

cudaError_t run(const Launch& launch, Device& device) {
  const auto start = std::chrono::steady_clock::now();
  LaunchOptions options = device.settings().launch;
  for (const Waiver& waiver : kWaivers) {
    if (launch.kernel.find(waiver.part_of_name) != std::string::npos) {
      options.*waiver.check = false;
    }
  }
  LaunchResult result;
  try {
    result = device.gpu().launch(launch, options);
  } catch (const ParseError& error) {
    return fail(
        cudaErrorInvalidKernelImage,
        launch.kernel + ": line " + std::to_string(error.line) + " of the PTX: " + error.what());
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  device.record(launch, result.counters, seconds.count());
  for (const Report& report : result.reports) {
    std::fprintf(stderr, "softgpu: %s\n", report.to_string().c_str());
    static_cast<void>(corrupt(report));
  }
  return corrupted();
}

}  // namespace

cudaError_t check_stream(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) {
    return cudaSuccess;
  }
  return fail(cudaErrorInvalidResourceHandle, "the software GPU has the default streams only");
}

cudaError_t launch_kernel(const void* host_function, const LaunchRequest& request,
                          cudaStream_t stream, void** arguments) {
  if (corrupted() != cudaSuccess) return corrupted();
  if (const cudaError_t error = check_stream(stream)) return error;
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  Kernel* kernel = nullptr;
  const KernelInfo* info = nullptr;
  Module* module = nullptr;
  if (const cudaError_t error = device.find(host_function, &kernel, &info, &module)) return error;
  if (const cudaError_t error = check_shape(*info, request, device.chip())) return error;
  if (const cudaError_t error = check_cluster(*info, request, device.chip())) return error;
  if (const cudaError_t error = check_resources(*info, request, *kernel, device.gpu())) {
    return error;
  }
  std::vector<unsigned char> parameters(info->parameter_bytes);
  for (size_t i = 0; i < info->parameters.size(); ++i) {
    const Parameter& parameter = info->parameters[i];
    std::memcpy(parameters.data() + parameter.offset, arguments[i], parameter.size);
  }
  Launch launch;
  launch.module = module;
  launch.kernel = kernel->name;
  put(request.grid, launch.grid);
  put(request.block, launch.block);
  put(request.cluster, launch.cluster);
  launch.dynamic_shared_bytes = request.dynamic_shared_bytes;
  launch.max_dynamic_shared_bytes = kernel->max_dynamic_shared_bytes;
  launch.parameters = parameters.data();
  launch.early = request.early;
  return run(launch, device);
}

}  // namespace fk::softgpu

using namespace fk::softgpu;

extern "C" cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config,
                                           const void* host_function, void** arguments) {
  LaunchRequest request = {config->gridDim, config->blockDim, {1, 1, 1}, config->dynamicSmemBytes};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    switch (attribute.id) {
      case cudaLaunchAttributeClusterDimension:
        request.cluster = {attribute.val.clusterDim.x, attribute.val.clusterDim.y,
                           attribute.val.clusterDim.z};
        break;
      case cudaLaunchAttributeProgrammaticStreamSerialization:
        request.early = attribute.val.programmaticStreamSerializationAllowed != 0;
        break;
      case cudaLaunchAttributeCooperative:
        request.cooperative = attribute.val.cooperative != 0;
        break;
      default:
        return fail(cudaErrorNotSupported, "launch attribute " + std::to_string(attribute.id) +
                                               " is not known to the software GPU");
    }
  }
  return launch_kernel(host_function, request, config->stream, arguments);
}
