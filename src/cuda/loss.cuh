// What the cross-entropy ops share: their targets, and the sum of the rows' losses.
#pragma once

#include "core/tensor.h"
#include "cuda/dependent_launch.cuh"

namespace fk::cuda {

struct Targets {
  const void* data;
  int64_t stride;
  bool wide;  // int64, not int32

  explicit Targets(const Tensor& t)
      : data(t.data), stride(t.stride(0)), wide(t.dtype == DType::kInt64) {}

  __device__ __forceinline__ int64_t operator[](int64_t row) const {
    return wide ? static_cast<const int64_t*>(data)[row * stride]
                : static_cast<const int32_t*>(data)[row * stride];
  }
};

constexpr int kTotalThreads = 1024;

// One block adds up all rows' losses, in double and in an order that depends on the sizes only.
static __global__ void __launch_bounds__(kTotalThreads)
    total_loss(const float* row_losses, Targets targets, int64_t rows, int64_t ignore_index,
               bool mean, float* loss, float* count) {
  __shared__ double losses[kTotalThreads];
  __shared__ long long counts[kTotalThreads];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  double my_loss = 0;
  long long my_count = 0;
#pragma unroll 4
  for (int64_t row = threadIdx.x; row < rows; row += kTotalThreads) {
    if (row_losses != nullptr) my_loss += row_losses[row];
    my_count += targets[row] != ignore_index ? 1 : 0;
  }
  losses[threadIdx.x] = my_loss;
  counts[threadIdx.x] = my_count;
  __syncthreads();
  for (int half = kTotalThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      losses[threadIdx.x] += losses[threadIdx.x + half];
      counts[threadIdx.x] += counts[threadIdx.x + half];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    if (count != nullptr) *count = static_cast<float>(counts[0]);
    const double total = losses[0];
    if (loss != nullptr) {
      *loss = static_cast<float>(mean ? total / static_cast<double>(counts[0]) : total);
    }
  }
}

}  // namespace fk::cuda
