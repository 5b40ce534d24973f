// This is the running softmax of 8-bit attention on Hopper (sm90/float8.cuh), and the rounding of
// its probabilities.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/attention/sm90/softmax.cuh"

namespace fk::cuda_sm90 {

// Packs four neighbours of the left operand, the first in the lowest byte.
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

// Rounds a thread's part of the left operand of 32 keys.
__device__ __forceinline__ void round_sixteen(const float* s, uint32_t (&p)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* x = s + 8 * (i / 2) + 2 * (i % 2);
    p[i] = pack_four(x[0], x[1], x[4], x[5]);
  }
}

// This is the running softmax (sm90/softmax.cuh) with probabilities of up to 448.
struct Float8Softmax {
  static constexpr float kShift = 8.f;  // of probabilities, as a power of 2
  // The maximum may stay behind so far: 2^(8 + 0.8) is below 448.
  static constexpr float kLag = 0.8f;
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};
  float correction[2];  // after a step, what was summed before is to be multiplied by

  // Replaces scores by probabilities and, unless kLate, rounds these to `p`.
  template <bool kLate, int N>
  __device__ __forceinline__ void step(float (&s)[N], float scale_log2, uint32_t (&p)[N / 16][4]) {
    float largest[2] = {max[0], max[1]};
#pragma unroll
    for (int i = 0; i < N; ++i) largest[row_of(i)] = fmaxf(largest[row_of(i)], s[i]);
    follow(largest, scale_log2);
    exponentiate<kLate>(s, scale_log2, p);
  }

  // Does the first part of a step: returns whether the maximum may have grown. Whether a score
  // exceeds it by `slack`, which is kLag, is looked up with integers, three at a time. That is
  // right unless the maximum plus `slack` is negative, when it always seems so. Otherwise there is
  // no correction.
  template <int N>
  __device__ __forceinline__ bool grow(const float (&s)[N], float scale_log2, float slack) {
    const int bits[2] = {largest_bits<0>(s), largest_bits<1>(s)};
    const bool grown = __any_sync(0xffffffff, (bits[0] > __float_as_int(max[0] + slack)) |
                                                  (bits[1] > __float_as_int(max[1] + slack)));
    if (!grown) return false;
    float largest[2] = {__int_as_float(bits[0]), __int_as_float(bits[1])};
    if (__any_sync(0xffffffff, bits[0] == 0 || bits[1] == 0)) {
      // If no score of a row is positive, the largest has the smallest bits.
      unsigned smallest[2] = {~0u, ~0u};
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        unsigned& row = smallest[row_of(i)];
        row = __vimin3_u32(row, __float_as_uint(s[i]), __float_as_uint(s[i + 1]));
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (bits[j] == 0) largest[j] = __uint_as_float(smallest[j]);
      }
    }
    follow(largest, scale_log2);
    return true;
  }

  // Does the second part of a step.
  template <bool kLate, int N>
  __device__ __forceinline__ void exponentiate(float (&s)[N], float scale_log2,
                                               uint32_t (&p)[N / 16][4]) {
    float offset[2], partial[2] = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      offset[j] = max[j] == -INFINITY ? 0.f : max[j] * scale_log2 - kShift;
    }
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

 private:
  __device__ __forceinline__ void follow(float (&largest)[2], float scale_log2) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      largest[j] = fmaxf(largest[j], __shfl_xor_sync(0xffffffff, largest[j], 1));
      largest[j] = fmaxf(largest[j], __shfl_xor_sync(0xffffffff, largest[j], 2));
      const bool follows = (largest[j] - max[j]) * scale_log2 > kLag;
      correction[j] = follows ? exp2_fast((max[j] - largest[j]) * scale_log2) : 1.f;
      max[j] = follows ? largest[j] : max[j];
      sum[j] *= correction[j];
    }
  }
};

}  // namespace fk::cuda_sm90
