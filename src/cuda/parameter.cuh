// Parameters and states, whose dtype is float or the activations': known when the kernel runs.
#pragma once

#include "core/tensor.h"
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

// For kernels of little work per element: one instance for all dtypes.
__device__ __forceinline__ float load_as(DType dtype, const void* data, int64_t at) {
  if (dtype == DType::kFloat16) return load_either<__half>(data, false, at);
  return load_either<__nv_bfloat16>(data, dtype == DType::kFloat32, at);
}

__device__ __forceinline__ void store_as(DType dtype, void* data, int64_t at, float value) {
  if (dtype == DType::kFloat16) {
    store_either<__half>(data, false, at, value);
  } else {
    store_either<__nv_bfloat16>(data, dtype == DType::kFloat32, at, value);
  }
}

}  // namespace fk::cuda
