// The states of 16 channels of a head in the registers of a warp, and how they move on by a chunk:
// h = decay h + (weight x)^T B. They lie there as sums of a product do (cuda/mma.cuh), channels as
// rows, so that they are the left operand of h C^T as they stand.
#pragma once

#include "ops/ssd/cuda/decays.cuh"
#include "ops/ssd/cuda/tiles.cuh"

namespace fk::cuda::ssd {

// Multiplies the columns of a left operand by factors[0] to [15].
template <class T>
__device__ __forceinline__ Fragment<T> scale_columns(const Fragment<T>& f, const float* factors) {
  const int pair = threadIdx.x % 4 * 2;
  Fragment<T> result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 by = *reinterpret_cast<const float2*>(factors + pair + i / 2 * 8);
    uint32_t words[kParts<T>];
#pragma unroll
    for (int part = 0; part < kParts<T>; ++part) words[part] = f.words[part][i];
    const float2 x = join_pair<T>(words);
    split_pair<T>(x.x * by.x, x.y * by.y, words);
#pragma unroll
    for (int part = 0; part < kParts<T>; ++part) result.words[part][i] = words[part];
  }
  return result;
}

// Which of a head's states a warp has: 16 channels from `channel` on.
struct WarpChannels {
  int head, channel;
};

// Where registers are short, a __syncwarp holds back loads of later columns, whose registers are
// not free yet.
template <class T, int kStates>
constexpr bool kHoldsLoads = kParts<T> == 3 || kStates == 256;

template <class T, int kStates>
struct WarpState {
  float h[kStates / 8][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kStates / 2; ++i) h[i / 4][i % 4] = 0.f;
  }

  // Load from and store to a tensor (sequence, head, channel, state). What it does not have is 0.
  __device__ __forceinline__ void load(const Inputs& in, const View& from, int64_t sequence,
                                       const WarpChannels& own) {
    const bool is_float = from.dtype == DType::kFloat32;
    for_each_in(in, from, sequence, own,
                [&](float& x, int64_t at) { x = load_either<T>(from.data, is_float, at); });
  }
  __device__ __forceinline__ void store(const Inputs& in, const View& to, int64_t sequence,
                                        const WarpChannels& own) {
    const bool is_float = to.dtype == DType::kFloat32;
    for_each_in(in, to, sequence, own,
                [&](float& x, int64_t at) { store_either<T>(to.data, is_float, at, x); });
  }

  // The same in workspace, where states lie as the lanes have them: `at` is a warp's place.
  static constexpr int kFloats = kStates * 16;
  __device__ __forceinline__ void keep(float* at) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kStates / 8; ++i) {
      Vec<float, 4> four;
#pragma unroll
      for (int e = 0; e < 4; ++e) four.data[e] = h[i][e];
      fk::cuda::store(at + (i * 32 + lane) * 4, four);
    }
  }
  // h = decay h + what was kept.
  __device__ __forceinline__ void join(const float* at, float decay) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kStates / 8; ++i) {
      const Vec<float, 4> four = fk::cuda::load<4>(at + (i * 32 + lane) * 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) h[i][e] = fmaf(decay, h[i][e], four.data[e]);
    }
  }

  // Moves on to the end of a chunk: `scale` by the chunk's decay, then `add` for every 16 of its
  // steps. `turned` is x^T of the steps from s on, the warp's channels as rows.
  __device__ __forceinline__ void scale(float decay) {
#pragma unroll
    for (int i = 0; i < kStates / 2; ++i) h[i / 4][i % 4] *= decay;
  }
  template <class BTile, int kSteps>
  __device__ __forceinline__ void add(int s, const Fragment<T>& turned, const BTile& B,
                                      const StepDecays<kSteps>& decays) {
    const Fragment<T> weighted = scale_columns(turned, decays.weight + s);
#pragma unroll
    for (int n = 0; n < kStates; n += 16) {
      if (kHoldsLoads<T, kStates> && n % 32 == 0) __syncwarp();
      multiply(h[n / 8], h[n / 8 + 1], weighted, B.right_turned(s, n));
    }
  }

 private:
  // Calls body(number, its place) for each of this lane's numbers that a tensor of states has.
  template <class Body>
  __device__ __forceinline__ void for_each_in(const Inputs& in, const View& tensor,
                                              int64_t sequence, const WarpChannels& own,
                                              const Body& body) {
    const int lane = threadIdx.x % 32;
    int n = lane % 4 * 2, channel = own.channel + lane / 4;
    int64_t at = tensor.offset(sequence, own.head, channel, n);
#pragma unroll
    for (int i = 0; i < kStates / 8; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (channel + e / 2 * 8 >= in.channels || n + e % 2 >= in.states) continue;
        body(h[i][e], at + e / 2 * 8 * tensor.strides[2] + e % 2 * tensor.strides[3]);
      }
      n += 8;
      at += 8 * tensor.strides[3];
      __syncwarp();  // keeps places from being computed ahead, for which there are no registers
    }
  }
};

}  // namespace fk::cuda::ssd
