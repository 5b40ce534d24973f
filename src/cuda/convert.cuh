// Elements and short vectors in one thread: conversions between the storage types (float, __half,
// __nv_bfloat16) and float, and loads and stores of up to 16 bytes with cache hints. Three kinds of
// loads differ in whether anyone may write the data and whether the compiler may move them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace fk::cuda {

// Converts an element to float, which is exact.
template <class T>
__device__ __forceinline__ float to_float(T x) {
  return static_cast<float>(x);
}
template <>
__device__ __forceinline__ float to_float<__half>(__half x) {
  return __half2float(x);
}
template <>
__device__ __forceinline__ float to_float<__nv_bfloat16>(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

// Converts a float to an element, rounding to nearest, ties to even.
template <class T>
__device__ __forceinline__ T from_float(float x) {
  return static_cast<T>(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// N elements in registers, aligned so that they load and store as one. N is a power of two, and the
// vector has at most 16 bytes.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  static_assert(sizeof(T) * N <= 16 && (N & (N - 1)) == 0);
  T data[N];
};

// How many elements the widest vector of T has: those of one 16-byte access.
template <class T>
constexpr int kVecWidth = 16 / static_cast<int>(sizeof(T));

// Converts a vector's elements to float.
template <class T, int N>
__device__ __forceinline__ void unpack(const Vec<T, N>& v, float (&out)[N]) {
  if constexpr (sizeof(T) == 2 && N >= 2) {
    uint32_t words[N / 2];
    memcpy(words, v.data, sizeof(words));
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        // A bfloat16 is the upper half of a float: two integer operations for two elements.
        out[2 * i] = __uint_as_float(words[i] << 16);
        out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      } else {
        __half2 pair;
        memcpy(&pair, &words[i], sizeof(pair));
        const float2 f = __half22float2(pair);
        out[2 * i] = f.x;
        out[2 * i + 1] = f.y;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(v.data[i]);
  }
}

// Rounds floats to a vector of T.
template <class T, int N>
__device__ __forceinline__ Vec<T, N> pack(const float (&in)[N]) {
  Vec<T, N> v;
  if constexpr (sizeof(T) == 2 && N >= 2) {
    // One conversion instruction rounds two elements.
    uint32_t words[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
        memcpy(&words[i], &pair, sizeof(pair));
      } else {
        const __half2 pair = __floats2half2_rn(in[2 * i], in[2 * i + 1]);
        memcpy(&words[i], &pair, sizeof(pair));
      }
    }
    memcpy(v.data, words, sizeof(words));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) v.data[i] = from_float<T>(in[i]);
  }
  return v;
}

// Two elements as one register: `low` comes first in memory.
template <class T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  const float pair[2] = {low, high};
  const Vec<T, 2> v = pack<T>(pair);
  uint32_t word;
  memcpy(&word, v.data, sizeof(word));
  return word;
}

// Loads and stores a vector without hints, through L1 and L2. `p` is aligned to the vector.
template <int N, class T>
__device__ __forceinline__ Vec<T, N> load(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}
template <class T, int N>
__device__ __forceinline__ void store(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

// Loads a vector that nobody writes while the kernel runs and that many threads read (weights),
// through the read-only cache. The compiler may move the load, also across barriers.
template <int N, class T>
__device__ __forceinline__ Vec<T, N> load_read_only(const T* p) {
  constexpr int kBytes = sizeof(T) * N;
  Vec<T, N> v;
  if constexpr (kBytes == 16) {
    const uint4 w = __ldg(reinterpret_cast<const uint4*>(p));
    memcpy(v.data, &w, kBytes);
  } else if constexpr (kBytes == 8) {
    const uint2 w = __ldg(reinterpret_cast<const uint2*>(p));
    memcpy(v.data, &w, kBytes);
  } else if constexpr (kBytes == 4) {
    const uint32_t w = __ldg(reinterpret_cast<const uint32_t*>(p));
    memcpy(v.data, &w, kBytes);
  } else {
    v.data[0] = __ldg(p);
  }
  return v;
}

// Loads 16 bytes that nobody writes while the kernel runs, through the read-only cache. The
// statement is volatile, so that the load stays where it stands in the code: ahead of the barriers
// after it, and behind wait_for_earlier_kernels.
template <int N, class T>
__device__ __forceinline__ Vec<T, N> load_read_only_in_place(const T* p) {
  static_assert(sizeof(T) * N == 16);
  Vec<T, N> v;
  uint4 w;
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "l"(p));
  memcpy(v.data, &w, sizeof(w));
  return v;
}

// Loads a vector that this kernel may overwrite later (an output that takes an input's place), so
// not through the read-only cache. The statement is volatile, so that the load stays where it
// stands in the code, ahead of the work on other data. kOnce says that the data are read only once
// and need no place in L1.
template <int N, bool kOnce = true, class T>
__device__ __forceinline__ Vec<T, N> load_overwritable_in_place(const T* p) {
  constexpr int kBytes = sizeof(T) * N;
  Vec<T, N> v;
  if constexpr (kBytes == 16) {
    uint4 w;
    if constexpr (kOnce) {
      asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                   : "l"(p));
    } else {
      asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                   : "l"(p));
    }
    memcpy(v.data, &w, kBytes);
  } else if constexpr (kBytes == 4) {
    uint32_t w;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(w) : "l"(p));
    memcpy(v.data, &w, kBytes);
  } else {
    static_assert(kBytes == 2);
    uint16_t w;
    asm volatile("ld.global.b16 %0, [%1];" : "=h"(w) : "l"(p));
    memcpy(v.data, &w, kBytes);
  }
  return v;
}

// Stores a vector that this kernel does not read again, with the hint that it may leave the caches
// first (st.global.cs).
template <class T, int N>
__device__ __forceinline__ void store_streaming(T* p, const Vec<T, N>& v) {
  constexpr int kBytes = sizeof(T) * N;
  if constexpr (kBytes == 16) {
    uint4 w;
    memcpy(&w, v.data, kBytes);
    __stcs(reinterpret_cast<uint4*>(p), w);
  } else if constexpr (kBytes == 8) {
    uint2 w;
    memcpy(&w, v.data, kBytes);
    __stcs(reinterpret_cast<uint2*>(p), w);
  } else if constexpr (kBytes == 4) {
    uint32_t w;
    memcpy(&w, v.data, kBytes);
    __stcs(reinterpret_cast<uint32_t*>(p), w);
  } else {
    static_assert(kBytes == 2);
    uint16_t w;
    memcpy(&w, v.data, kBytes);
    __stcs(reinterpret_cast<unsigned short*>(p), w);
  }
}

}  // namespace fk::cuda
