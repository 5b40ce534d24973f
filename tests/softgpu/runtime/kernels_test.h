// This file declares kernels that the tests of the stand-in launch, right ones and wrong ones.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace fk::softgpu {

struct Shape {
  dim3 blocks = 1, threads = 1;
  size_t shared_bytes = 0;
};

// Computes x[i] += 1 for each thread of the grid, within n elements.
cudaError_t launch_add_one(const Shape& shape, float* x, int n, cudaStream_t stream = nullptr);
const void* add_one_kernel();
// Does the same without the test of i < n.
cudaError_t launch_add_one_unchecked(const Shape& shape, float* x);
// Computes out = a + b + c + d + e + f.x + f.y: parameters of many sizes.
cudaError_t launch_sum(double* out, char a, double b, short c, long long d, float e, int2 f);
// Launches a kernel that is compiled for at most 64 threads a block.
cudaError_t launch_bounded(const Shape& shape);
// Writes the last of the dynamic shared bytes.
cudaError_t launch_with_shared(const Shape& shape);
const void* with_shared();
// Sets out[block] to the block's place in its cluster, by cudaLaunchKernelExC.
cudaError_t launch_clustered(dim3 blocks, dim3 cluster, int* out);

}  // namespace fk::softgpu
