// ssd's forward on FMA units, step by step: for what Turing's tensor cores cannot multiply, float
// and bfloat16, and for more float states than the registers of the other kernel hold.
//
// Floor: 3 P N multiplications and additions a token and head. A thread has kEach states of one
// channel in registers, eight threads a channel. Blocks of 16 channels load kSteps steps at a time
// to shared memory, as floats: there, eight threads read 128 neighbouring bytes of B or C.
#pragma once

#include "cuda/reduce.cuh"
#include "cuda/row_partition.cuh"
#include "ops/ssd/cuda/decays.cuh"
#include "ops/ssd/cuda/forward_arguments.h"
#include "ops/ssd/cuda/forward_outputs.cuh"

namespace fk::cuda::ssd {

template <class T_, int kStates_>
struct StepsTile {
  using T = T_;
  static constexpr int kStates = kStates_, kEach = kStates / 8;
  static constexpr int kChannels = 16, kThreads = kChannels * 8;
  static constexpr int kSteps = 16;

  struct Shared {
    float B[kSteps][kStates], C[kSteps][kStates];
    float x[kSteps][kChannels], y[kSteps][kChannels];
    float dt[kSteps], decay[kSteps];
  };
};

// For sm_90 the assembler keeps two numbers of the bfloat16 kernel in memory before its loop. That
// one is for Turing, and for GPUs whose shared memory is too small for the tensor cores' tile: a
// Hopper never launches it.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    walk_step_by_step(const __grid_constant__ ForwardArguments a) {
  using T = typename Tile::T;
  constexpr int kSteps = Tile::kSteps, kThreads = Tile::kThreads, kEach = Tile::kEach;
  __shared__ __align__(16) typename Tile::Shared s;
  const int64_t row = divide_likely_small(block_index(), a.slices.count);
  const int first = static_cast<int>(block_index() - row * a.slices.count) * Tile::kChannels;
  const int64_t sequence = divide_likely_small(row, a.in.heads);
  const int head = static_cast<int>(row - sequence * a.in.heads), group = a.in.group(head);
  if (sequence >= a.walks.sequences.count) return;
  const SequenceSteps steps = a.walks.sequences[sequence];
  const int c = threadIdx.x / 8, channel = first + c;
  const bool exists = channel < a.in.channels;
  const float A = a.in.A[head * a.in.A_head];
  const float bias = number_of_head<T>(a.in.dt_bias, head);

  // The states 4 (threadIdx.x % 8 + 8 k) + e of the channel.
  float h[kEach];
  const auto for_each_state = [&](const auto& body) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int n = (static_cast<int>(threadIdx.x) % 8 + i / 4 * 8) * 4 + i % 4;
      if (exists && n < a.in.states) body(h[i], n);
    }
  };
#pragma unroll
  for (int i = 0; i < kEach; ++i) h[i] = 0.f;
  const View& given = a.in.initial_state;
  if (given.data != nullptr) {
    const int64_t at = given.offset(sequence, head, channel);
    for_each_state([&](float& x, int n) {
      x = load_either<T>(given.data, given.dtype == DType::kFloat32, at + n * given.strides[3]);
    });
  }

  const auto fetch = [&](const View& from, int64_t step, int count, int i, int begin, int size,
                         float* to, int width) {
    const T* const p = static_cast<const T*>(from.data) + from.offset(steps.batch, step, i, begin);
    for (int at = threadIdx.x; at < kSteps * width; at += kThreads) {
      const int t = at / width, k = at % width;
      const bool there = t < count && k < size;
      to[at] = there ? to_float(p[t * from.strides[1] + k * from.strides[3]]) : 0.f;
    }
  };
#pragma unroll 1
  for (int64_t step = steps.begin; step < steps.end; step += kSteps) {
    const int count = static_cast<int>(steps.end - step < kSteps ? steps.end - step : kSteps);
    __syncthreads();
    fetch(a.in.B, step, count, group, 0, a.in.states, s.B[0], Tile::kStates);
    fetch(a.in.C, step, count, group, 0, a.in.states, s.C[0], Tile::kStates);
    fetch(a.in.x, step, count, head, first, a.in.channels - first, s.x[0], Tile::kChannels);
    if (threadIdx.x < kSteps && static_cast<int>(threadIdx.x) < count) {
      const int t = threadIdx.x;
      const int64_t at = a.in.dt.offset(steps.batch, step + t, head);
      const float raw = to_float(static_cast<const T*>(a.in.dt.data)[at]);
      s.dt[t] = TimeStep(a.in, raw, bias).dt;
      s.decay[t] = power<float>(within_power<float>(times_log2e(s.dt[t])), A);
    }
    __syncthreads();
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      const float decay = s.decay[t], added = s.dt[t] * s.x[t][c];
      float y = 0.f;
#pragma unroll
      for (int i = 0; i < kEach; i += 4) {
        const int n = (static_cast<int>(threadIdx.x) % 8 + i / 4 * 8) * 4;
        const Vec<float, 4> B = load<4>(&s.B[t][n]), C = load<4>(&s.C[t][n]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          h[i + e] = fmaf(added, B.data[e], decay * h[i + e]);
          y = fmaf(h[i + e], C.data[e], y);
        }
      }
      y = warp_sum<8>(y);
      if (threadIdx.x % 8 == 0) s.y[t][c] = y;
    }
    __syncthreads();
    for (int at = threadIdx.x; at < kSteps * Tile::kChannels; at += kThreads) {
      const int t = at / Tile::kChannels, own = at % Tile::kChannels;
      if (t >= count || first + own >= a.in.channels) continue;
      const float D = number_of_head<T>(a.in.D, head, first + own);
      float y = fmaf(D, s.x[t][own], s.y[t][own]);
      if (a.in.z.data != nullptr) {
        const int64_t of_z = a.in.z.offset(steps.batch, step + t, head, first + own);
        y = gated_output<float>(y, to_float(static_cast<const T*>(a.in.z.data)[of_z]));
      }
      static_cast<T*>(a.y.data)[a.y.offset(steps.batch, step + t, head, first + own)] =
          from_float<T>(y);
    }
  }
  if (a.final_state.data == nullptr) return;
  const View& to = a.final_state;
  const int64_t at = to.offset(sequence, head, channel);
  for_each_state([&](float& x, int n) {
    store_either<T>(to.data, to.dtype == DType::kFloat32, at + n * to.strides[3], x);
  });
}

}  // namespace fk::cuda::ssd
