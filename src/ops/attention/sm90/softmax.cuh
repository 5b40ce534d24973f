// This is the running softmax of a warpgroup's 64 rows of scores, as one thread sees it: two rows,
// a quarter of the columns of each (wgmma.cuh says where).
#pragma once

#include <cmath>
#include <cstring>

#include "cuda/convert.cuh"
#include "cuda/math.cuh"

namespace fk::cuda_sm90 {

using cuda::exp2_fast;
using cuda::log2_fast;
using cuda::pack_pair;
using cuda::reciprocal_fast;

// Returns which row of a thread's two score i belongs to.
constexpr __device__ __forceinline__ int row_of(int i) { return (i / 2) % 2; }

// Returns the largest of a row's scores, as an integer with a float's bits, or 0 if all are
// negative.
template <int kRow, int N>
__device__ __forceinline__ int largest_bits(const float (&s)[N]) {
  int largest = 0;
#pragma unroll
  for (int i = 2 * kRow; i < N; i += 4) {
    largest = __vimax3_s32(largest, __float_as_int(s[i]), __float_as_int(s[i + 1]));
  }
  return largest;
}

struct Softmax {
  float max[2] = {-INFINITY, -INFINITY};  // of the scores before they are scaled
  float sum[2] = {0.f, 0.f};              // over this thread's columns
  bool grown = false;                     // in the last step, some row's maximum of this warp
  float correction[2];                    // if so, what was summed before is to be multiplied by

  // Replaces the first scores by probabilities: 2^(scale_log2 * (score - max)).
  template <int N>
  __device__ __forceinline__ void begin(float (&s)[N], float scale_log2) {
    follow(s, scale_log2);
    exponentiate(s, scale_log2);
  }

  // Does so for further scores. The maximum stays behind until a score exceeds it by `slack`, a
  // factor of 2^8: until then probabilities just exceed 1, and nothing summed before needs a
  // correction. Whether one does is looked up with integers, three at a time. That is right unless
  // the maximum plus `slack` is negative, when it always seems so.
  template <int N>
  __device__ __forceinline__ void step(float (&s)[N], float scale_log2, float slack) {
    const bool over = (largest_bits<0>(s) > __float_as_int(max[0] + slack)) |
                      (largest_bits<1>(s) > __float_as_int(max[1] + slack));
    grown = __any_sync(0xffffffff, over);
    if (grown) follow(s, scale_log2);
    exponentiate(s, scale_log2);
  }

 private:
  template <int N>
  __device__ __forceinline__ void follow(const float (&s)[N], float scale_log2) {
    float largest[2] = {max[0], max[1]};
#pragma unroll
    for (int i = 0; i < N; ++i) largest[row_of(i)] = fmaxf(largest[row_of(i)], s[i]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      largest[j] = fmaxf(largest[j], __shfl_xor_sync(0xffffffff, largest[j], 1));
      largest[j] = fmaxf(largest[j], __shfl_xor_sync(0xffffffff, largest[j], 2));
      const bool follows = (largest[j] - max[j]) * scale_log2 > 8.f;
      correction[j] = follows ? exp2_fast((max[j] - largest[j]) * scale_log2) : 1.f;
      max[j] = follows ? largest[j] : max[j];
      sum[j] *= correction[j];
    }
  }
  template <int N>
  __device__ __forceinline__ void exponentiate(float (&s)[N], float scale_log2) {
    float offset[2], partial[2] = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j < 2; ++j) offset[j] = max[j] == -INFINITY ? 0.f : max[j] * scale_log2;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      s[i] = exp2_fast(s[i] * scale_log2 - offset[row_of(i)]);
      partial[row_of(i)] += s[i];
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) sum[j] += partial[j];
  }
};

// Sets scores to -inf for the keys from `end` on, or before `first`, both counted from the thread's
// first column, for each of its rows.
template <int N>
__device__ __forceinline__ void mask_from(float (&s)[N], const int (&end)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (8 * (i / 4) + i % 2 >= end[row_of(i)]) s[i] = -INFINITY;
  }
}
template <int N>
__device__ __forceinline__ void mask_before(float (&s)[N], const int (&first)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (8 * (i / 4) + i % 2 < first[row_of(i)]) s[i] = -INFINITY;
  }
}

// Rounds probabilities to the A operands of the next product.
template <class T, int N>
__device__ __forceinline__ void round_pairs(const float (&s)[N], uint32_t (&p)[N / 8][4]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) p[i / 4][i % 4] = pack_pair<T>(s[2 * i], s[2 * i + 1]);
}

}  // namespace fk::cuda_sm90
