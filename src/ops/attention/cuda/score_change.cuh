// This file holds what every CUDA kernel of attention does to a score between q.k and the softmax:
// the softcap, and ALiBi's slope. Masks follow each kernel's own order of elements.
#pragma once

#include "cuda/math.cuh"

namespace fk::cuda::attention {

// Makes c tanh(x scale / c) of a product x. With kFast the special function unit does, to 1e-7 of
// 1, which is enough where results have 16 bits. `unit` is what the result is counted in: 1, or
// log2(e) for exponents of 2.
template <bool kFast>
struct Softcap {
  float inner, outer;

  __device__ __forceinline__ Softcap(float scale, float cap, float unit)
      : inner(scale / cap * (kFast ? 2.f * kLog2E : 1.f)), outer(cap * unit) {}

  // This is tanh(x scale / c). The fast form, 1 - 2 / (1 + e^2y), is right at both ends.
  __device__ __forceinline__ float squeeze(float x) const {
    if constexpr (kFast) return fmaf(-2.f, reciprocal_fast(1.f + exp2_fast(x * inner)), 1.f);
    return tanhf(x * inner);
  }
  __device__ __forceinline__ float operator()(float x) const { return outer * squeeze(x); }
};

// The derivative of the capped score by the scaled one is this, where squeeze(x) was `squeezed`.
__device__ __forceinline__ float softcap_slope(float squeezed) {
  return fmaf(-squeezed, squeezed, 1.f);
}

// ALiBi takes this from the score of a key at a distance from the query's own place.
__device__ __forceinline__ float alibi(float slope, int distance) {
  return slope * fabsf(static_cast<float>(distance));
}

}  // namespace fk::cuda::attention
