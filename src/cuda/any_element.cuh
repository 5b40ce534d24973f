// Elements whose type (float, __half or __nv_bfloat16) is known only at run time. Kernels for rare
// cases use `Any` as their element type, so that one instance serves all types.
#pragma once

#include "cuda/convert.cuh"
#include "cuda/row_layout.h"

namespace fk::cuda {

// An element in a register: its bits (of a 16-bit type the low half) and its type. A float converts
// to an Any of type kFloat32; an Any of any type converts to float.
struct Any {
  uint32_t bits;
  DType type;

  Any() = default;
  __device__ __forceinline__ explicit Any(float x) : type(DType::kFloat32) {
    memcpy(&bits, &x, sizeof(bits));
  }
  __device__ __forceinline__ operator float() const {
    if (type == DType::kFloat32) return __uint_as_float(bits);
    if (type == DType::kBFloat16) return __uint_as_float(bits << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
};

// A reference to an element in global memory: reading it gives an Any, and assigning an Any
// converts it to the element's type and stores it with a streaming hint.
struct AnyReference {
  char* data;
  DType type;

  // Loads the bits only; the conversion to float comes later, once all loads of a batch are on
  // their way, so that no load waits for another.
  __device__ __forceinline__ Any load() const {
    Any x;
    x.type = type;
    if (type == DType::kFloat32) {
      asm volatile("ld.global.b32 %0, [%1];" : "=r"(x.bits) : "l"(data));
    } else {
      uint16_t half;
      asm volatile("ld.global.b16 %0, [%1];" : "=h"(half) : "l"(data));
      x.bits = half;
    }
    return x;
  }
  __device__ __forceinline__ operator float() const { return load(); }
  __device__ __forceinline__ void operator=(const AnyReference& x) const { *this = x.load(); }
  __device__ __forceinline__ void operator=(Any x) const {
    if (type == DType::kFloat32) {
      __stcs(reinterpret_cast<float*>(data), static_cast<float>(x));
    } else {
      auto bits = static_cast<unsigned short>(x.bits);
      if (x.type != type) {
        bits = type == DType::kBFloat16 ? __bfloat16_as_ushort(from_float<__nv_bfloat16>(x))
                                        : __half_as_ushort(from_float<__half>(x));
      }
      __stcs(reinterpret_cast<unsigned short*>(data), bits);
    }
  }
};

// A pointer to elements of a type known at run time; offsets count elements.
struct AnyPointer {
  char* data = nullptr;
  DType type = DType::kFloat32;

  __device__ __forceinline__ AnyPointer operator+(int64_t elements) const {
    return {data + elements * (type == DType::kFloat32 ? 4 : 2), type};
  }
  __device__ __forceinline__ void operator+=(int64_t elements) { *this = *this + elements; }
  __device__ __forceinline__ AnyReference operator*() const { return {data, type}; }
  __device__ __forceinline__ AnyReference operator[](int64_t i) const { return *(*this + i); }
};

// Kernels with Any as their element type point to elements by AnyPointer (cuda/row_layout.h).
template <>
struct Pointer<Any> {
  using type = AnyPointer;
  FK_HOST_DEVICE static type to(void* data, DType type) { return {static_cast<char*>(data), type}; }
};
template <>
struct Pointer<const Any> : Pointer<Any> {};

// What kernels call to load and store vectors; a vector of Any has one element.
template <int N>
__device__ __forceinline__ Vec<Any, N> load_overwritable_in_place(const AnyPointer& p) {
  static_assert(N == 1);
  return {{(*p).load()}};
}
__device__ __forceinline__ void store_streaming(const AnyPointer& p, const Vec<Any, 1>& v) {
  *p = v.data[0];
}

}  // namespace fk::cuda
