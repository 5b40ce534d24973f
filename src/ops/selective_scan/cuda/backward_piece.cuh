// A piece of four steps of the backward in the registers of one thread, and sums over its warp.
#pragma once

#include "ops/selective_scan/cuda/backward_stage.cuh"

namespace fk::cuda {

constexpr int kStates = 4;  // of a thread

// Loads B or C of a step in the thread's order.
__device__ __forceinline__ void load_states(const float* row, float (&out)[kStates]) {
  const float4 all = *reinterpret_cast<const float4*>(row);
  out[0] = all.x;
  out[1] = all.y;
  out[2] = all.z;
  out[3] = all.w;
}

// Returns the sum of x[0] y over all channels of the warp but those of the lane beside. x is in the
// thread's order: what another lane wants is always in the same place.
__device__ __forceinline__ float sum_of_first(const float (&x)[kStates], float y) {
  const float first = fmaf(x[0], y, __shfl_xor_sync(0xffffffffu, x[2] * y, 16));
  const float second = fmaf(x[1], y, __shfl_xor_sync(0xffffffffu, x[3] * y, 16));
  return first + __shfl_xor_sync(0xffffffffu, second, 2);
}

// Holds the decays of kPieceSteps steps, dt log2(e) and dt u.
struct Piece {
  float dt2[kPieceSteps], dtu[kPieceSteps], decay[kPieceSteps][kStates];

  // x is where the first step's inputs lie; those of the last two steps lie `third` beside.
  template <class T>
  __device__ __forceinline__ static Piece of(const float* x, int third, const float (&A)[kStates]) {
    Piece p;
#pragma unroll
    for (int k = 0; k < kPieceSteps; ++k) {
      const float2 v = *reinterpret_cast<const float2*>(x + (k & 2 ? third : 0) + k * kStepInputs);
      p.dt2[k] = v.x;
      p.dtu[k] = v.x * v.y;
    }
#pragma unroll
    for (int k = 0; k < kPieceSteps; ++k) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) p.decay[k][s] = fast_power<T>(p.dt2[k], A[s]);
    }
    return p;
  }
};

// In float, what single instructions leave of an error goes with the exponent. So equal steps add
// it up, in an adjoint that passes chunk after chunk. What has gone through a whole chunk is
// therefore put right, by what an exact power is more than the product of its decays. (States begin
// every chunk from what the forward kept.) Products beyond 1 stay as they are: both are 1 then, and
// no infinity is taken from another.
struct ThroughChunk {
  float entered[kStates], product[kStates], sum;  // sum: of dt log2(e)

  __device__ __forceinline__ explicit ThroughChunk(const float (&ag)[kStates]) : sum(0) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      entered[s] = ag[s];
      product[s] = 1;
    }
  }
  __device__ __forceinline__ void pass(const Piece& p) {
    static_assert(kPieceSteps == 4);
    sum += (p.dt2[0] + p.dt2[1]) + (p.dt2[2] + p.dt2[3]);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      product[s] *= (p.decay[0][s] * p.decay[1][s]) * (p.decay[2][s] * p.decay[3][s]);
    }
  }
  // h is the state before the chunk. It went through all decays, so it is in every step of dA.
  __device__ __forceinline__ void put_right(const float (&A)[kStates], const float (&h)[kStates],
                                            float (&ag)[kStates], float (&dA)[kStates]) const {
    const float within = within_power<float>(sum);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const float more = __saturatef(power<float>(within, A[s])) - __saturatef(product[s]);
      if (more == 0) continue;  // states may be infinite
      const float rest = more * entered[s];
      ag[s] += rest;
      dA[s] = fmaf(rest * h[s], sum, dA[s]);
    }
  }
};

}  // namespace fk::cuda
