// Fast exponentials and logarithms, and the online logsumexp, for one thread's values.
#pragma once

#include <cfloat>
#include <type_traits>

namespace fk::cuda {

constexpr float kLog2E = 1.4426950408889634f;

// 2^x, log2(x) and 1 / x by the special function unit, one instruction each, to a few units in the
// last place of a float. Subnormal numbers count as 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float log2_fast(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float reciprocal_fast(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// exp(x), as accurate as a result of type T can show: two instructions for the half precision
// types, the CUDA library's function for float and for Any, which may be float.
template <class T>
__device__ __forceinline__ float exp_for(float x) {
  if constexpr (sizeof(T) >= sizeof(float)) {
    return expf(x);
  } else {
    return exp2_fast(x * kLog2E);
  }
}

// Returns the larger of two numbers, for reductions. A NaN is ignored, as by fmaxf.
struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// The sum of exp(x) over the elements seen so far, kept as sum * exp(max). `max` stays finite: it
// is -FLT_MAX while nothing but -inf has been seen, and FLT_MAX once +inf has been, so that no
// difference below is inf - inf. The sum is therefore 0 if all elements are -inf, inf if one is
// +inf, and NaN if one is NaN. A row of nothing but -FLT_MAX (a mask) comes out right too, which it
// would not with x * log2(e) - max * log2(e).
template <class T>
struct LogSumExp {
  float max;
  float sum;

  __device__ __forceinline__ static LogSumExp empty() { return {-FLT_MAX, 0.f}; }

  // Takes kRows vectors of kWidth elements into account.
  template <int kRows, int kWidth>
  __device__ __forceinline__ void add(const float (&x)[kRows][kWidth]) {
    float new_max = max;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) new_max = fmaxf(new_max, x[j][e]);
    }
    new_max = fminf(new_max, FLT_MAX);
    sum *= exp_for<T>(max - new_max);
    max = new_max;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      float row_sum = 0;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) row_sum += exp_for<T>(x[j][e] - new_max);
      sum += row_sum;
    }
  }

  __device__ __forceinline__ static LogSumExp merge(const LogSumExp& a, const LogSumExp& b) {
    const float max = fmaxf(a.max, b.max);
    return {max, a.sum * exp_for<T>(a.max - max) + b.sum * exp_for<T>(b.max - max)};
  }
};

}  // namespace fk::cuda
