// 8-bit floats (e4m3) as float, on any GPU.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/convert.cuh"

namespace fk::cuda {

// This is exact and needs none of the conversions that only later GPUs have: e4m3 moved into the
// place of a float16's exponent and mantissa is 2^-8 times its value.
template <>
__device__ __forceinline__ float to_float<__nv_fp8_e4m3>(__nv_fp8_e4m3 x) {
  const uint32_t bits = x.__x, magnitude = bits & 0x7f;
  const float value = 256.f * __half2float(__ushort_as_half(static_cast<unsigned short>(
                                  (bits & 0x80) << 8 | magnitude << 7)));
  return magnitude == 0x7f ? __uint_as_float(0x7fffffff) : value;
}

}  // namespace fk::cuda
