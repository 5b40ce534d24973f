// Vectors of elements that stay in registers, as loaded, between their load and their use.
#pragma once

#include "cuda/convert.cuh"

namespace fk::cuda {

// kVec elements of T as 32-bit words, the way a load delivers them. If they were kept as elements
// of two bytes, the compiler would split each word right after the load, and the thread would wait
// for the load there rather than where it uses the elements.
template <class T, int kVec>
struct RawVec {
  static constexpr int kBytes = kVec * static_cast<int>(sizeof(T));
  uint32_t words[(kBytes + 3) / 4];

  // Loads kVec elements; p is aligned to them.
  __device__ __forceinline__ void load(const T* p) {
    if constexpr (kBytes == 16) {
      const uint4 v = *reinterpret_cast<const uint4*>(p);
      words[0] = v.x;
      words[1] = v.y;
      words[2] = v.z;
      words[3] = v.w;
    } else if constexpr (kBytes == 8) {
      const uint2 v = *reinterpret_cast<const uint2*>(p);
      words[0] = v.x;
      words[1] = v.y;
    } else if constexpr (kBytes == 4) {
      words[0] = *reinterpret_cast<const uint32_t*>(p);
    } else {
      words[0] = *reinterpret_cast<const uint16_t*>(p);
    }
  }

  // Rounds values to T and keeps them.
  __device__ __forceinline__ void set(const float (&values)[kVec]) {
    const Vec<T, kVec> v = pack<T, kVec>(values);
    memcpy(words, &v, sizeof(v));
  }

  // Converts the elements to float: here the thread waits for the load.
  __device__ __forceinline__ void unpack_to(float (&out)[kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if constexpr (sizeof(T) == 4) {
        out[i] = __uint_as_float(words[i]);
      } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        out[i] = __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
      } else {
        const uint16_t half = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
        out[i] = __half2float(__ushort_as_half(half));
      }
    }
  }
};

// Returns the only element of a vector of one, as float.
template <class T>
__device__ __forceinline__ float value_of(const RawVec<T, 1>& held) {
  float value[1];
  held.unpack_to(value);
  return value[0];
}

}  // namespace fk::cuda
