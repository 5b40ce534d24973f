// The sigmoid of one thread's value, by the special function unit's approximations: its error is a
// few units in the last place of a float.
#pragma once

#include "cuda/math.cuh"

namespace fk::cuda {

constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float sigmoid(float x) {
  return reciprocal_fast(1.f + exp2_fast(-kLog2E * x));
}

}  // namespace fk::cuda
