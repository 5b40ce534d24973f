// The running softmax of 8-bit attention on Hopper (cuda_sm90_fp8.cuh), and the rounding of its
// probabilities.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/attention/cuda_sm90_softmax.cuh"

namespace fk::cuda_sm90 {

// Four neighbours of the left operand, the first in the lowest byte.
__device__ __forceinline__ uint32_t pack_four(float a, float b, float c, float d) {
  uint32_t word;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

// A thread's part of the left operand of 32 keys.
__device__ __forceinline__ void round_sixteen(const float* s, uint32_t (&p)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* x = s + 8 * (i / 2) + 2 * (i % 2);
    p[i] = pack_four(x[0], x[1], x[4], x[5]);
  }
}

// The running softmax (cuda_sm90_softmax.cuh) with probabilities of up to 448.
struct Float8Softmax {
  static constexpr float kShift = 8.f;  // of probabilities, as a power of 2
  // How far the maximum may stay behind, likewise: 2^(8 + 0.8) is below 448.
  static constexpr float kLag = 0.8f;
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};

  // Replaces scores by probabilities and, unless kLate, rounds these to `p`.
  template <bool kLate, int N>
  __device__ __forceinline__ void step(float (&s)[N], float scale_log2, float (&correction)[2],
                                       uint32_t (&p)[N / 16][4]) {
    float block_max[2] = {max[0], max[1]};
#pragma unroll
    for (int i = 0; i < N; ++i) block_max[row_of(i)] = fmaxf(block_max[row_of(i)], s[i]);
    float offset[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      block_max[j] = fmaxf(block_max[j], __shfl_xor_sync(0xffffffff, block_max[j], 1));
      block_max[j] = fmaxf(block_max[j], __shfl_xor_sync(0xffffffff, block_max[j], 2));
      const bool grown = (block_max[j] - max[j]) * scale_log2 > kLag;
      correction[j] = grown ? exp2_fast((max[j] - block_max[j]) * scale_log2) : 1.f;
      max[j] = grown ? block_max[j] : max[j];
      offset[j] = max[j] == -INFINITY ? 0.f : max[j] * scale_log2 - kShift;
      sum[j] *= correction[j];
    }
    float partial[2] = {0.f, 0.f};
#pragma unroll
    for (int c = 0; c < N / 16; ++c) {
#pragma unroll
      for (int i = 16 * c; i < 16 * c + 16; ++i) {
        s[i] = exp2_fast(s[i] * scale_log2 - offset[row_of(i)]);
        partial[row_of(i)] += s[i];
      }
      if constexpr (!kLate) round_sixteen(s + 16 * c, p[c]);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) sum[j] += partial[j];
  }
};

}  // namespace fk::cuda_sm90
