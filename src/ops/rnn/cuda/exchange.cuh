// This is how blocks of a grid tell each other values by nothing but the values: the memory for
// them is filled with a NaN that no conversion and no arithmetic makes, and who needs a value loads
// it until it is another. So there is no barrier, no flag and no fence between who makes a value
// and who multiplies it; every element is a message of its own.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/convert.cuh"
#include "cuda/raw_vec.cuh"

namespace fk::cuda::rnn {

// The bits of what stands where nothing was published yet.
constexpr uint32_t kNothing = 0xffffffff;

__device__ __forceinline__ uint4 load_published(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

template <class T>
__device__ __forceinline__ T published_one(const T* p) {
  T value;
  if constexpr (sizeof(T) == 2) {
    uint16_t bits;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(bits) : "l"(p));
    memcpy(&value, &bits, sizeof(value));
  } else {
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(p));
  }
  return value;
}

// The bits of a value as it is published: a NaN of all ones becomes another one.
template <class T>
__device__ __forceinline__ uint32_t published_bits(float value) {
  const T rounded = from_float<T>(value);
  if constexpr (sizeof(T) == 2) {
    uint16_t bits;
    memcpy(&bits, &rounded, sizeof(bits));
    return min(uint32_t{bits}, 0xfffeu);
  } else {
    return min(__float_as_uint(rounded), kNothing - 1);
  }
}

template <class T>
__device__ __forceinline__ void publish(T* to, float value) {
  const uint32_t bits = published_bits<T>(value);
  if constexpr (sizeof(T) == 2) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(to), "h"(static_cast<uint16_t>(bits))
                 : "memory");
  } else {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
  }
}

// Not 0 where an element of the vector is not published yet.
template <class T>
__device__ __forceinline__ uint32_t missing(const uint4& v) {
  // The highest bit of a number without bits is set where 1 is taken from it, and only there if
  // its own highest bit was not.
  constexpr uint32_t kOnes = sizeof(T) == 2 ? 0x00010001 : 1;
  const uint32_t found = ((~v.x - kOnes) & v.x) | ((~v.y - kOnes) & v.y) | ((~v.z - kOnes) & v.z) |
                         ((~v.w - kOnes) & v.w);
  return found & (kOnes << (8 * sizeof(T) - 1));
}

}  // namespace fk::cuda::rnn
