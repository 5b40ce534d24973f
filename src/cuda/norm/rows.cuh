// What the norm kernels share: how a kernel sees its tensors, and which threads work on a row
// together.
#pragma once

#include "core/rows.h"
#include "cuda/convert.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/reduce.cuh"

namespace fk::cuda::norm {

// A tensor of type [..., N], or of one entry per row. Without data it was not given.
struct UntypedRows {
  void* data = nullptr;
  Rows rows;
  int64_t column_stride = 1;

  explicit __device__ operator bool() const { return data != nullptr; }

  template <class T>
  __device__ __forceinline__ T* row(int64_t row) const {
    return static_cast<T*>(data) + rows.offset(row);
  }
  // Returns a row's address. The tiled kernels take fewer than 2^31 rows, so that rows split over
  // several dims cost 32-bit divisions. kUnsplit says that they are known not to be split.
  template <class T, bool kUnsplit = false>
  __device__ __forceinline__ T* row(uint32_t row) const {
    if (kUnsplit || rows.ndim <= 1) return static_cast<T*>(data) + row * rows.last_stride;
    int64_t offset = 0;
#pragma unroll 1  // much code, and rarely run
    for (int i = rows.ndim - 1; i > 0; --i) {
      const uint32_t size = static_cast<uint32_t>(rows.sizes[i]);
      const uint32_t quotient = row / size;
      offset += (row - quotient * size) * rows.strides[i];
      row = quotient;
    }
    return static_cast<T*>(data) + offset + row * rows.strides[0];
  }
};

// A tensor of type P[N].
struct Parameter {
  const void* data = nullptr;
  int64_t stride = 1;
  bool is_float = false;  // else of the activations' dtype
  float otherwise = 0;    // its value where it is not given
  float offset = 0;       // added where it is given; else 0
};

inline Parameter parameter_of(const Tensor& t, float otherwise, float offset) {
  Parameter parameter;
  parameter.otherwise = otherwise;
  if (!t) return parameter;
  parameter.offset = offset;
  parameter.data = t.data;
  parameter.stride = t.stride(-1);
  parameter.is_float = t.dtype == DType::kFloat32;
  return parameter;
}

// Loads the entries [column, column + N) of a parameter that is given, in float32. N > 1 needs
// stride 1 and 16-byte alignment.
template <int N>
__device__ __forceinline__ void load_floats(const Parameter& p, int64_t column, float (&out)[N]) {
  constexpr int kPart = N < 4 ? N : 4;
  const float* data = after_wait(static_cast<const float*>(p.data) + column * p.stride);
#pragma unroll
  for (int i = 0; i < N; i += kPart) {
    const Vec<float, kPart> v = load_read_only<kPart>(data + i);
#pragma unroll
    for (int j = 0; j < kPart; ++j) out[i + j] = v.data[j] + p.offset;
  }
}

// Does so for any parameter. kGiven says that it is known to be given, in T.
template <class T, bool kGiven = false, int N>
__device__ __forceinline__ void load_parameter(const Parameter& p, int64_t column,
                                               float (&out)[N]) {
  if (!kGiven && p.data == nullptr) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = p.otherwise;
  } else if (std::is_same_v<T, float> || (!kGiven && p.is_float)) {
    load_floats(p, column, out);
  } else {
    if constexpr (!std::is_same_v<T, float>) {
      unpack(load_read_only<N>(after_wait(static_cast<const T*>(p.data) + column * p.stride)), out);
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] += p.offset;
    }
  }
}

// The threads that work on one row: a warp, of which a block holds several, or a whole block.
template <int kTeam, int kBlock>
struct Team {
  static constexpr int kSize = kTeam;
  static constexpr int kThreads = kBlock;
  static constexpr int kCount = kBlock / kTeam;
  static constexpr int kWarps = kTeam / kWarpSize;
  static_assert(kTeam == kBlock || (kTeam == kWarpSize && kBlock % kTeam == 0));

  static __device__ __forceinline__ int rank() { return threadIdx.x % kTeam; }
  static __device__ __forceinline__ int index() { return threadIdx.x / kTeam; }

  // `scratch` is the team's own, of kWarps values; it may be used again after another barrier.
  template <class Value, class Merge>
  static __device__ __forceinline__ Value reduce(Value value, Merge merge, Value* scratch) {
    value = warp_reduce(value, merge);
    if constexpr (kWarps > 1) {
      const int lane = threadIdx.x % kWarpSize;
      if (lane == 0) scratch[rank() / kWarpSize] = value;
      __syncthreads();
      if constexpr (kWarps > 4) {
        value = warp_reduce<kWarps>(scratch[lane % kWarps], merge);
      } else {
        // The values are few enough for every thread to read them all, which is sooner done than
        // shuffles.
        value = scratch[0];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) value = merge(value, scratch[w]);
      }
    }
    return value;
  }
};

// What __launch_bounds__ may ask for: `blocks` per multiprocessor, or as many as its threads allow.
// Turing, with 1024 threads and more instructions for bfloat16, is left twice the registers.
constexpr int min_blocks(int threads, int blocks) {
#if __CUDA_ARCH__ == 750
  constexpr int kMaxThreads = 512;
#elif __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
  constexpr int kMaxThreads = 1536;
#else
  constexpr int kMaxThreads = 2048;
#endif
  return blocks * threads <= kMaxThreads ? blocks : kMaxThreads / threads;
}

// sm_90 has kernels of their own for calls that give everything, which gain up to 3% (NOTES.md),
// and tiles cut for short rows. Elsewhere both are compiled to nothing, and the general kernels
// launched with the next wider tile: less than half the kernels to compile.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHasSpecial = false;
#else
constexpr bool kHasSpecial = true;
#endif
constexpr int kSpecialCode = 90;  // DeviceProperties::code from which on there are such kernels

// A thread's share of a row has kVecs vectors, vector i at position rank + i * team size.
template <class T, int kVecs>
using RowVectors = Vec<T, kVecWidth<T>>[kVecs];

// A thread's share of a parameter is held in registers as it is stored. One in float32 beside
// 16-bit activations would take twice the room, so it is read again whenever it is asked for.
// kGiven says that it is known to be given, in T.
template <class T, class Team, int kVecs, bool kGiven>
class HeldParameter {
 public:
  __device__ __forceinline__ HeldParameter(const Parameter& p, int vectors) : p_(p) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int v = Team::rank() + i * Team::kSize;
      if (v >= vectors) continue;
      if (!kGiven && p.data == nullptr) {
        float otherwise[kWidth];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) otherwise[j] = p.otherwise;
        held_[i] = pack<T>(otherwise);
      } else if (kGiven || std::is_same_v<T, float> || !p.is_float) {
        held_[i] = load_read_only_in_place<kWidth>(static_cast<const T*>(p.data) + v * kWidth);
      }
    }
  }
  // The thread's vector i. kOffset: whether there can be an offset.
  template <bool kOffset>
  __device__ __forceinline__ void get(int i, float (&out)[kVecWidth<T>]) const {
    if (!kGiven && !std::is_same_v<T, float> && p_.is_float) {
      load_floats(p_, (Team::rank() + i * Team::kSize) * kWidth, out);
      return;
    }
    Vec<T, kWidth> v = held_[i];
    if constexpr (!std::is_same_v<T, float>) {
      // Without this a compiler converts once, ahead of the loop over the rows, and runs out of
      // registers.
      uint4 words;
      memcpy(&words, &v, sizeof(v));
      asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
      memcpy(&v, &words, sizeof(v));
    }
    unpack(v, out);
    if constexpr (kOffset) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) out[j] += p_.offset;
    }
  }

 private:
  static constexpr int kWidth = kVecWidth<T>;
  const Parameter& p_;
  RowVectors<T, kVecs> held_;
};

}  // namespace fk::cuda::norm
