// Loads and stores of parameters and states whose dtype the kernel learns only at run time: it is
// either float or the dtype of the activations. `at` counts elements.
#pragma once

#include "core/tensor.h"
#include "cuda/convert.cuh"

namespace fk::cuda {

// Loads element `at` of an array of float if `is_float`, else of T.
template <class T>
__device__ __forceinline__ float load_either(const void* data, bool is_float, int64_t at) {
  return is_float ? static_cast<const float*>(data)[at] : to_float(static_cast<const T*>(data)[at]);
}

// Stores a value in an array of float if `is_float`, else rounded to T.
template <class T>
__device__ __forceinline__ void store_either(void* data, bool is_float, int64_t at, float value) {
  if (is_float) {
    static_cast<float*>(data)[at] = value;
  } else {
    static_cast<T*>(data)[at] = from_float<T>(value);
  }
}

// Load and store an element of any float dtype, for kernels with so little work per element that
// one instance may serve all dtypes.
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
