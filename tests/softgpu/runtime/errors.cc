#include "softgpu/runtime/errors.h"

#include <atomic>
#include <mutex>
#include <set>
#include <utility>

namespace fk::softgpu {
namespace {

struct Name {
  cudaError_t error;
  const char* name;
  const char* text;
};
#define FK_NAMED(error, text) \
  { error, #error, text }
constexpr Name kNames[] = {
    FK_NAMED(cudaSuccess, "no error"),
    FK_NAMED(cudaErrorInvalidValue, "invalid argument"),
    FK_NAMED(cudaErrorMemoryAllocation, "out of memory"),
    FK_NAMED(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    FK_NAMED(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    FK_NAMED(cudaErrorInvalidDeviceFunction, "invalid device function"),
    FK_NAMED(cudaErrorInvalidDevice, "invalid device ordinal"),
    FK_NAMED(cudaErrorInvalidKernelImage, "device kernel image is invalid"),
    FK_NAMED(cudaErrorNoKernelImageForDevice,
             "no kernel image is available for execution on the device"),
    FK_NAMED(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    FK_NAMED(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    FK_NAMED(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    FK_NAMED(cudaErrorLaunchTimeout, "the launch timed out and was terminated"),
    FK_NAMED(cudaErrorMisalignedAddress, "misaligned address"),
    FK_NAMED(cudaErrorLaunchFailure, "unspecified launch failure"),
    FK_NAMED(cudaErrorNotSupported, "operation not supported"),
    FK_NAMED(cudaErrorInvalidClusterSize, "invalid cluster size"),
    FK_NAMED(cudaErrorCooperativeLaunchTooLarge, "too many blocks in cooperative launch"),
};
#undef FK_NAMED

const Name* find(cudaError_t error) {
  for (const Name& name : kNames) {
    if (name.error == error) return &name;
  }
  return nullptr;
}

thread_local cudaError_t last = cudaSuccess;
thread_local cudaError_t detailed = cudaSuccess;
thread_local std::string detail_of_thread;

std::atomic<cudaError_t> sticky{cudaSuccess};
std::mutex mutex;           // of what follows
std::string first_problem;  // of the sticky error
std::string problems;

// Returns a text that lives as long as the process, as those of the CUDA runtime do.
const char* keep(const std::string& text) {
  static std::set<std::string>* texts = new std::set<std::string>;
  const std::lock_guard<std::mutex> lock(mutex);
  return texts->insert(text).first->c_str();
}

}  // namespace

cudaError_t fail(cudaError_t error, const std::string& detail) {
  last = detailed = error;
  detail_of_thread = detail;
  return error;
}

cudaError_t error_of(Problem problem) {
  switch (problem) {
    case Problem::kOutOfBounds:
    case Problem::kFreed:
    case Problem::kReadOnly:
      return cudaErrorIllegalAddress;
    case Problem::kMisaligned:
      return cudaErrorMisalignedAddress;
    case Problem::kDeadlock:
    case Problem::kTimeout:
      return cudaErrorLaunchTimeout;
    default:
      return cudaErrorLaunchFailure;
  }
}

cudaError_t corrupt(const Report& report) {
  const std::string text = report.to_string();
  const std::lock_guard<std::mutex> lock(mutex);
  if (sticky == cudaSuccess) {
    sticky = error_of(report.problem);
    first_problem = text;
  }
  problems += text + "\n";
  return sticky;
}

cudaError_t corrupted() { return sticky; }

std::string forget_problems() {
  const std::lock_guard<std::mutex> lock(mutex);
  sticky = last = cudaSuccess;
  first_problem.clear();
  return std::exchange(problems, "");
}

}  // namespace fk::softgpu

using namespace fk::softgpu;

extern "C" {

cudaError_t cudaGetLastError() {
  if (corrupted() != cudaSuccess) return corrupted();
  return std::exchange(last, cudaSuccess);
}

const char* cudaGetErrorName(cudaError_t error) {
  const Name* name = find(error);
  return name == nullptr ? "unrecognized error code" : name->name;
}

const char* cudaGetErrorString(cudaError_t error) {
  const Name* name = find(error);
  std::string text = name == nullptr ? "unrecognized error code" : name->text;
  std::string detail;
  if (error != cudaSuccess && error == sticky) {
    const std::lock_guard<std::mutex> lock(mutex);
    detail = first_problem;
  } else if (error != cudaSuccess && error == detailed) {
    detail = detail_of_thread;
  }
  return keep(detail.empty() ? text : text + ": " + detail);
}

}  // extern "C"
