// Sigmoid and softplus for one thread, from the special function unit's approximations: good
// to a few units in the last place of a float.
#pragma once

#include "cuda/math.cuh"

namespace fk::cuda {

constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float sigmoid(float x) {
  return reciprocal_fast(1.f + exp2_fast(-kLog2E * x));
}

// log(1 + exp(x)) = max(x, 0) + log(1 + e) with e = exp(-|x|), the logarithm as 2 atanh(e / (2 +
// e)): small results keep their relative precision. T: as exact as a result of that type shows.
template <class T>
__device__ __forceinline__ float softplus(float x) {
  const float e = exp2_fast(-kLog2E * fabsf(x));
  const float w = e * reciprocal_fast(2.f + e);
  const float v = w * w;
  float p = 2.f / 9;
  if (std::is_same_v<T, float>) {
    p = fmaf(fmaf(2.f / 13, v, 2.f / 11), v, p);
  }
  p = fmaf(p, v, 2.f / 7);
  p = fmaf(p, v, 2.f / 5);
  p = fmaf(p, v, 2.f / 3);
  p = fmaf(p, v, 2.f);
  return fmaf(p, w, fmaxf(x, 0.f));
}

}  // namespace fk::cuda
