// Parameters and states, whose dtype is float or the activations': known when the kernel runs.
#pragma once

#include "cuda/convert.cuh"

namespace fk::cuda {

template <class T>
__device__ __forceinline__ float load_either(const void* data, bool is_float, int64_t at) {
  return is_float ? static_cast<const float*>(data)[at] : to_float(static_cast<const T*>(data)[at]);
}

template <class T>
__device__ __forceinline__ void store_either(void* data, bool is_float, int64_t at, float value) {
  if (is_float) {
    static_cast<float*>(data)[at] = value;
  } else {
    static_cast<T*>(data)[at] = from_float<T>(value);
  }
}

}  // namespace fk::cuda
