// This file keeps errors as the CUDA runtime keeps them: one that a call returned stays with its
// thread until cudaGetLastError takes it; one of a kernel that went wrong stays with the process,
// and every later call returns it. Unlike CUDA's, the text of an error says what was wrong.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "softgpu/softgpu.h"

namespace fk::softgpu {

// Returns `error` for a call, and keeps it as the thread's last. `detail` is added to its text.
cudaError_t fail(cudaError_t error, const std::string& detail);

// Returns the error of a report, which stays until forget_problems.
cudaError_t corrupt(const Report& report);

// Returns cudaSuccess, or the error that every call returns since a kernel went wrong.
cudaError_t corrupted();

// Returns what was reported since the last call of this function, one line each; the process is as
// new.
std::string forget_problems();

// Returns the error that a report becomes.
cudaError_t error_of(Problem problem);

}  // namespace fk::softgpu
