#include "kernels_test.h"

namespace fk::softgpu {
namespace {

__global__ void add_one(float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] += 1;
}

__global__ void add_one_unchecked(float* x) { x[blockIdx.x * blockDim.x + threadIdx.x] += 1; }

__global__ void sum(double* out, char a, double b, short c, long long d, float e, int2 f) {
  const long long integers = a + c + d + f.x + f.y;
  *out = b + e + static_cast<double>(integers);
}

__global__ void __launch_bounds__(64) bounded() {}

__global__ void shared(int last) {
  extern __shared__ char bytes[];
  if (last >= 0) bytes[last] = 1;
}

__global__ void clustered(int* out) {
#if __CUDA_ARCH__ >= 900
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  out[blockIdx.x] = static_cast<int>(rank);
#else
  out[blockIdx.x] = -1;
#endif
}

}  // namespace

cudaError_t launch_add_one(const Shape& shape, float* x, int n, cudaStream_t stream) {
  add_one<<<shape.blocks, shape.threads, shape.shared_bytes, stream>>>(x, n);
  return cudaGetLastError();
}

const void* add_one_kernel() { return reinterpret_cast<const void*>(add_one); }

cudaError_t launch_add_one_unchecked(const Shape& shape, float* x) {
  add_one_unchecked<<<shape.blocks, shape.threads>>>(x);
  return cudaGetLastError();
}

cudaError_t launch_sum(double* out, char a, double b, short c, long long d, float e, int2 f) {
  sum<<<1, 1>>>(out, a, b, c, d, e, f);
  return cudaGetLastError();
}

cudaError_t launch_bounded(const Shape& shape) {
  bounded<<<shape.blocks, shape.threads>>>();
  return cudaGetLastError();
}

cudaError_t launch_with_shared(const Shape& shape) {
  shared<<<shape.blocks, shape.threads, shape.shared_bytes>>>(static_cast<int>(shape.shared_bytes) -
                                                              1);
  return cudaGetLastError();
}
const void* with_shared() { return reinterpret_cast<const void*>(shared); }

cudaError_t launch_clustered(dim3 blocks, dim3 cluster, int* out) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster.x;
  attribute.val.clusterDim.y = cluster.y;
  attribute.val.clusterDim.z = cluster.z;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(32);
  config.attrs = &attribute;
  config.numAttrs = 1;
  void* arguments[] = {&out};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(clustered), arguments);
}

}  // namespace fk::softgpu
