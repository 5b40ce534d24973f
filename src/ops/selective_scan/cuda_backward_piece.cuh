// A piece of four steps of the backward in the registers of one thread, and sums over its warp.
#pragma once

#include <type_traits>

#include "ops/selective_scan/cuda_backward.h"
#include "ops/selective_scan/cuda_step.cuh"

namespace fk::cuda {

constexpr int kStates = 4;  // of a thread

// B or C of a step in the thread's order.
__device__ __forceinline__ void load_states(const float* row, float (&out)[kStates]) {
  const float4 all = *reinterpret_cast<const float4*>(row);
  out[0] = all.x;
  out[1] = all.y;
  out[2] = all.z;
  out[3] = all.w;
}

// x[0] y over all channels of the warp but those of the lane beside. x is in the thread's order:
// what another lane wants is always in the same place.
__device__ __forceinline__ float sum_of_first(const float (&x)[kStates], float y) {
  const float first = fmaf(x[0], y, __shfl_xor_sync(0xffffffffu, x[2] * y, 16));
  const float second = fmaf(x[1], y, __shfl_xor_sync(0xffffffffu, x[3] * y, 16));
  return first + __shfl_xor_sync(0xffffffffu, second, 2);
}

// Decays of kPieceSteps steps, dt log2(e) and dt u.
//
// Float: the special function unit's decays are off by a unit or two in the last place, nearly all
// in the same direction, and a state that fades slowly adds that up. So what has gone through a
// whole piece is put right, by what an exact power is more than the product of its decays. Products
// beyond 1 stay as they are: both are 1 then, and no infinity is taken from another.
template <class T>
struct Piece {
  static constexpr bool kExact = std::is_same_v<T, float>;
  float dt2[kPieceSteps], dtu[kPieceSteps], decay[kPieceSteps][kStates];
  float more[kExact ? kStates : 1];

  // x: the first step's inputs; the last two steps' lie `third` beside.
  __device__ __forceinline__ Piece(const float* x, int third, const float (&A)[kStates]) {
#pragma unroll
    for (int k = 0; k < kPieceSteps; ++k) {
      const float2 v = *reinterpret_cast<const float2*>(x + (k & 2 ? third : 0) + k * kStepInputs);
      dt2[k] = v.x;
      dtu[k] = v.x * v.y;
    }
#pragma unroll
    for (int k = 0; k < kPieceSteps; ++k) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) decay[k][s] = exp2_fast(dt2[k] * A[s]);
    }
  }
  __device__ __forceinline__ void find_more(const float (&A)[kStates]) {
    static_assert(kExact && kPieceSteps == 4);
    const float sum = within_power<T>((dt2[0] + dt2[1]) + (dt2[2] + dt2[3]));
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      more[s] = __saturatef(power<T>(sum, A[s])) -
                __saturatef((decay[0][s] * decay[1][s]) * (decay[2][s] * decay[3][s]));
    }
  }
};

}  // namespace fk::cuda
