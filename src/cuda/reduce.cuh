// Reductions over the threads of a warp (by shuffles) and of a block (by shuffles, then through
// shared memory). Every thread receives the result, and the order of operations is fixed, so that
// results repeat bit for bit. To reduce pairs or larger states, pass a struct and the function that
// merges two of them.
#pragma once

#include <cstdint>
#include <cstring>

namespace fk::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xffffffffu;

// Returns the value of the lane whose number differs by the bits of lane_mask. Value is trivially
// copyable and a multiple of 4 bytes. All lanes of the warp call it.
template <class Value>
__device__ __forceinline__ Value shuffle_xor(const Value& value, int lane_mask) {
  static_assert(sizeof(Value) % 4 == 0);
  constexpr int kWords = sizeof(Value) / 4;
  uint32_t words[kWords];
  memcpy(words, &value, sizeof(Value));
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = __shfl_xor_sync(kFullMask, words[i], lane_mask);
  Value result;
  memcpy(&result, words, sizeof(Value));
  return result;
}

struct Sum {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

struct Pair {
  float first, second;
};
struct SumPair {
  __device__ __forceinline__ Pair operator()(const Pair& a, const Pair& b) const {
    return {a.first + b.first, a.second + b.second};
  }
};

// Merges the values of each group of kWidth consecutive lanes, a power of two. All lanes of the
// warp call it, and each gets its group's result.
template <int kWidth = kWarpSize, class Value, class Merge>
__device__ __forceinline__ Value warp_reduce(Value value, Merge merge) {
  static_assert(kWidth <= kWarpSize && (kWidth & (kWidth - 1)) == 0);
#pragma unroll
  for (int mask = kWidth / 2; mask > 0; mask /= 2) value = merge(value, shuffle_xor(value, mask));
  return value;
}

template <int kWidth = kWarpSize>
__device__ __forceinline__ float warp_sum(float value) {
  return warp_reduce<kWidth>(value, Sum());
}

// Merges the values of a block of kThreads threads, which is a multiple of 32 and a power of two.
// All of them call it. `scratch` is shared memory for kThreads / 32 values. There is one barrier
// inside, and a later call may use the same scratch only after another: a loop therefore alternates
// between two scratches.
template <int kThreads, class Value, class Merge>
__device__ __forceinline__ Value block_reduce(Value value, Merge merge, Value* scratch) {
  constexpr int kWarps = kThreads / kWarpSize;
  static_assert(kThreads % kWarpSize == 0 && (kWarps & (kWarps - 1)) == 0 && kWarps <= kWarpSize);
  value = warp_reduce(value, merge);
  if constexpr (kWarps > 1) {
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    value = warp_reduce<kWarps>(scratch[lane % kWarps], merge);
  }
  return value;
}

template <int kThreads>
__device__ __forceinline__ float block_sum(float value, float* scratch) {
  return block_reduce<kThreads>(value, Sum(), scratch);
}

}  // namespace fk::cuda
