// The norm of a product's rows, by those who store the last part of them: normed = norm(y), as
// rms_norm and layer_norm have it, of y as it was rounded.
#pragma once

#include "cuda/gemm/portable_call.cuh"
#include "cuda/last_block.cuh"
#include "cuda/norm/rows.cuh"
#include "cuda/reduce.cuh"

namespace fk::cuda {

struct RowNorm {
  ProductResult normed;
  ProductResult stats;           // two floats for each row; its data may be null
  norm::Parameter weight, bias;  // in vectors of 16 bytes
  float eps = 0;
  bool layer = false;
  LastBlock last;  // its counter is a place in the workspace
};

// Threads hold a row in registers, so many vectors each.
constexpr int kWarpHolds = 8, kBlockHolds = 4;

// Writes the norm of row m, of which a thread holds the vectors rank, rank + threads, and so on.
// `sum` adds up a float over the threads that have a part of the row.
template <class T, int kHeld, class SumUp>
__device__ __forceinline__ void write_norm(const RowNorm& n, int64_t m, int64_t columns, int rank,
                                           int threads, const Vec<T, kVecWidth<T>> (&y)[kHeld],
                                           const SumUp& sum) {
  constexpr int kWidth = kVecWidth<T>;
  const auto each = [&](const auto& body) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int64_t c = (rank + i * threads) * int64_t{kWidth};
      if (c >= columns) continue;
      float x[kWidth];
      unpack(y[i], x);
      body(c, x);
    }
  };
  float mean = 0, squares = 0;
  if (n.layer) {
    each([&](int64_t, const float(&x)[kWidth]) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) mean += x[i];
    });
    mean = sum(mean) / static_cast<float>(columns);
  }
  each([&](int64_t, const float(&x)[kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) squares += (x[i] - mean) * (x[i] - mean);
  });
  const float rstd = rsqrtf(sum(squares) / static_cast<float>(columns) + n.eps);
  if (rank == 0 && n.stats.data != nullptr) {
    float* const to = static_cast<float*>(n.stats.data) + n.stats.rows.offset(m);
    to[0] = mean;
    to[n.stats.column] = rstd;
  }
  T* const to = static_cast<T*>(n.normed.data) + n.normed.rows.offset(m);
  each([&](int64_t c, float(&x)[kWidth]) {
    float weight[kWidth], bias[kWidth];
    norm::load_parameter<T>(n.weight, c, weight);
    norm::load_parameter<T>(n.bias, c, bias);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = (x[i] - mean) * rstd * weight[i] + bias[i];
    store(to + c, pack<T>(x));
  });
}

// Normalises all rows of a.out, a warp each. Its elements come from the L2 cache: other blocks
// stored them.
template <class T>
__device__ __forceinline__ void normalise_rows(const PortableArguments& a, const RowNorm& n) {
  constexpr int kWidth = kVecWidth<T>;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int64_t m = threadIdx.x / 32; m < a.rows; m += blockDim.x / 32) {
    const T* const from = static_cast<const T*>(a.out.data) + a.out.rows.offset(m);
    Vec<T, kWidth> y[kWarpHolds];
#pragma unroll
    for (int i = 0; i < kWarpHolds; ++i) {
      const int64_t c = (lane + i * 32) * int64_t{kWidth};
      if (c >= a.columns) continue;
      const uint4 words = __ldcg(reinterpret_cast<const uint4*>(from + c));
      memcpy(&y[i], &words, sizeof(words));
    }
    write_norm<T>(n, m, a.columns, lane, 32, y, [](float x) { return warp_sum(x); });
  }
}

}  // namespace fk::cuda
