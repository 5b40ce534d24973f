// This is how a warp's outputs leave: 16 channels of a chunk's steps, which it holds as sums of a
// product, channels as rows. In memory channels lie side by side, so the sums are turned on the
// way, eight steps at a time (movmatrix), and z, which they are gated with, is turned the other
// way.
#pragma once

#include <type_traits>

#include "cuda/activations.cuh"
#include "ops/ssd/cuda/forward_arguments.h"
#include "ops/ssd/cuda/tiles.cuh"

namespace fk::cuda::ssd {

// Turns 8 x 8 elements of 16 bits, of which a lane has two neighbours of row lane / 4.
__device__ __forceinline__ uint32_t turn_matrix(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// This is what a lane loads or stores of eight steps: of step lane / 4, pieces of 8 bytes of
// neighbouring channels. The four lanes of a step have all 16 channels.
template <class T>
struct TurnedOutputs;

template <class T>
struct TurnedOutputs {
  static constexpr int kPieces = 1;
  uint2 pieces[1];

  // Returns the first channel of a piece.
  __device__ __forceinline__ static int channel(int) {
    const int place = threadIdx.x % 4;
    return place % 2 == 0 ? 2 * place : 8 + 2 * (place - 1);
  }
  // After turning, a lane has two channels of the first eight and two of the last. Neighbouring
  // lanes swap, so that one has four of the first and the other four of the last.
  __device__ __forceinline__ void set(const float (&four)[4]) {
    const uint32_t first = turn_matrix(pack_pair<T>(four[0], four[1]));
    const uint32_t last = turn_matrix(pack_pair<T>(four[2], four[3]));
    const bool even = threadIdx.x % 2 == 0;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, even ? last : first, 1);
    pieces[0] = even ? make_uint2(first, other) : make_uint2(other, last);
  }
  __device__ __forceinline__ void get(float (&four)[4]) const {
    const bool even = threadIdx.x % 2 == 0;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, even ? pieces[0].y : pieces[0].x, 1);
    const uint32_t first = turn_matrix(even ? pieces[0].x : other);
    const uint32_t last = turn_matrix(even ? other : pieces[0].y);
    const float2 low = join_pair<T>({first}), high = join_pair<T>({last});
    four[0] = low.x;
    four[1] = low.y;
    four[2] = high.x;
    four[3] = high.y;
  }
};

// Floats are turned as two halves of 16 bits.
template <>
struct TurnedOutputs<float> {
  static constexpr int kPieces = 2;
  uint2 pieces[2];

  __device__ __forceinline__ static int channel(int piece) {
    return piece * 8 + threadIdx.x % 4 * 2;
  }
  __device__ __forceinline__ static uint2 turn(const uint2& pair) {
    const uint32_t low = turn_matrix(__byte_perm(pair.x, pair.y, 0x5410));
    const uint32_t high = turn_matrix(__byte_perm(pair.x, pair.y, 0x7632));
    return make_uint2(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
  }
  __device__ __forceinline__ void set(const float (&four)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pieces[i] = turn(make_uint2(__float_as_uint(four[2 * i]), __float_as_uint(four[2 * i + 1])));
    }
  }
  __device__ __forceinline__ void get(float (&four)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 pair = turn(pieces[i]);
      four[2 * i] = __uint_as_float(pair.x);
      four[2 * i + 1] = __uint_as_float(pair.y);
    }
  }
};

template <class T>
__device__ __forceinline__ float gated_output(float y, float z) {
  return y * activate<Activation::kSilu, std::is_same_v<T, float>>(z);
}

// Gates and stores y of `count` steps from `step` on, of 16 channels from `channel` on.
template <class T, int kSteps>
__device__ __forceinline__ void store_outputs(const ForwardArguments& a, float (&y)[kSteps / 8][4],
                                              int64_t batch, int64_t step, int count, int head,
                                              int channel) {
  const bool gates = a.in.z.data != nullptr;
  const int lane = threadIdx.x % 32, channels = a.in.channels - channel;
  T* const to = static_cast<T*>(a.y.data) + a.y.offset(batch, step, head, channel);
  const T* const z = static_cast<const T*>(a.in.z.data) + a.in.z.offset(batch, step, head, channel);
  if (a.y.vectors && (!gates || a.in.z.vectors)) {
    using Turned = TurnedOutputs<T>;
    const auto each = [&](const auto& body) {
#pragma unroll
      for (int i = 0; i < kSteps / 8; ++i) {
        const int t = i * 8 + lane / 4;
#pragma unroll
        for (int piece = 0; piece < Turned::kPieces; ++piece) {
          const int c = Turned::channel(piece);
          if (t < count && c < channels) body(i, piece, t, c);
        }
      }
    };
    Turned gate[kSteps / 8] = {};
    if (gates) {
      each([&](int i, int piece, int t, int c) {
        gate[i].pieces[piece] = *reinterpret_cast<const uint2*>(z + t * a.in.z.strides[1] + c);
      });
#pragma unroll
      for (int i = 0; i < kSteps / 8; ++i) {
        float by[4];
        gate[i].get(by);
#pragma unroll
        for (int e = 0; e < 4; ++e) y[i][e] = gated_output<T>(y[i][e], by[e]);
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps / 8; ++i) gate[i].set(y[i]);
    each([&](int i, int piece, int t, int c) {
      *reinterpret_cast<uint2*>(to + t * a.y.strides[1] + c) = gate[i].pieces[piece];
    });
    return;
  }
#pragma unroll
  for (int i = 0; i < kSteps / 8; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int t = i * 8 + lane % 4 * 2 + e % 2, c = lane / 4 + e / 2 * 8;
      if (t >= count || c >= channels) continue;
      float value = y[i][e];
      if (gates) {
        value = gated_output<T>(value, to_float(z[t * a.in.z.strides[1] + c * a.in.z.strides[3]]));
      }
      to[t * a.y.strides[1] + c * a.y.strides[3]] = from_float<T>(value);
    }
  }
}

}  // namespace fk::cuda::ssd
