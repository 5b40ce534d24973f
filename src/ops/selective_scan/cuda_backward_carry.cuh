// The recurrence alone, for what the backward needs before it can begin, by the threads of
// cuda_backward.cuh.
//
// Forward: the states before every chunk, where the forward has kept none or others. In reverse,
// for sequences that are cut: what a segment makes of an adjoint of 0, a_t g_t at its first step,
// and the sum of dt log2(e), which makes the product of its decays; a segment that opens its
// sequence is asked by nobody.
//
// Floor: an exponential per (step, channel, state), 16 a clock and multiprocessor.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/launch.h"
#include "ops/selective_scan/cuda_backward_stage.cuh"

namespace fk::cuda {

constexpr int carry_shared_floats(int warps) {
  return kChunk * 2 * kGroupStates + kChunk * (2 * warps * kWarpChannels + 4) +
         warps * kWarpChannels;
}

template <class T, bool kReverse>
__global__ void __launch_bounds__(kMostWarps * 32, 3)
    carry_states(const __grid_constant__ BackwardArgs a, int first_state) {
  extern __shared__ __align__(16) float shared[];
  __shared__ BackwardPlace place;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (threadIdx.x == 0) place.find(a);
  __syncthreads();
  const Segment& segment = place.segment;
  if (!segment.exists || (kReverse && segment.opens)) return;
  const int thread = threadIdx.x, lane = thread % 32, first = first_state + lane % 4 * 4;
  const int channel = thread / 32 * kWarpChannels + lane / 4;
  const int pitch = 2 * a.warps * kWarpChannels + 4;
  float* const inputs = shared + kChunk * 2 * kGroupStates;  // {dt log2(e), dy silu(z) or dt u}
  float* const biases = inputs + kChunk * pitch;
  for (int c = thread; c < a.warps * kWarpChannels; c += blockDim.x) {
    biases[c] = place.channel_value<T>(a.bias, c);
  }
  float A[4], h[4], sum = 0;
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    A[s] = h[s] = 0;
    if (channel >= place.channels || first + s >= a.states) continue;
    A[s] = a.A[(place.channel + channel) * a.A_channel + (first + s) * a.A_state];
    if (!kReverse && a.initial_state.data != nullptr) {
      const StateView& from = a.initial_state;
      h[s] =
          load_either<T>(from.data, from.is_float,
                         segment.sequence * from.sequence +
                             (place.channel + channel) * from.channel + (first + s) * from.state);
    }
  }
  __syncthreads();
  const int chunks = place.chunks;
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const int index = kReverse ? chunks - 1 - i : i;
    const int64_t step = segment.first + int64_t{index} * kChunk;
    const int64_t left = segment.last - step;
    const int steps = static_cast<int>(left < kChunk ? left : kChunk);
    if (!kReverse && i > 0 && channel < place.channels) {
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        if (first + s >= a.states) continue;
        a.kept.data[((place.kept_row + i) * a.states + first + s) * a.channels + place.channel +
                    channel] = h[s];
      }
    }
    ChunkStates<T> bc_values(a, place, step, first_state, make_again(thread));
    bc_values.load(steps, a.states - first_state);
    const auto stage = [&](auto whole_pairs) {
      const ChunkPairs pairs(a.warps, a.time_contiguous, make_again(thread));
      const bool gated = kReverse && a.z.data != nullptr;
      using Values = PairValues<T, decltype(whole_pairs)::value>;
#pragma unroll 1
      for (int from = 0; from < ChunkPairs::kCount; from += Values::kBatch) {
        Values delta, second, z;
        delta.load(a.delta, place, pairs, from, step, steps);
        second.load(kReverse ? a.dy : a.u, place, pairs, from, step, steps);
        if (gated) z.load(a.z, place, pairs, from, step, steps);
#pragma unroll
        for (int k = 0; k < Values::kBatch; ++k) {
          const int l = pairs.step_of(from + k), q = pairs.pair_of(from + k);
          const float2 bias = *reinterpret_cast<const float2*>(biases + 2 * q);
          const float2 x = delta[k], v = second[k], w = gated ? z[k] : make_float2(0, 0);
          TimeStep t0 = TimeStep::of<T>(x.x + bias.x, a.softplus);
          TimeStep t1 = TimeStep::of<T>(x.y + bias.y, a.softplus);
          if (l >= steps) t0.dt = t1.dt = 0;
          const float y0 = kReverse ? Gate(v.x, w.x, gated).dy : t0.dt * v.x;
          const float y1 = kReverse ? Gate(v.y, w.y, gated).dy : t1.dt * v.y;
          *reinterpret_cast<float4*>(inputs + l * pitch + 4 * q) =
              make_float4(times_log2e(t0.dt), y0, times_log2e(t1.dt), y1);
        }
      }
    };
    if (a.pairs) {
      stage(std::true_type());
    } else {
      stage(std::false_type());
    }
    bc_values.put(shared);
    bc_values.take_rest(steps, a.states - first_state, shared);
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < kChunk; ++k) {
      const int l = kReverse ? kChunk - 1 - k : k;
      const float2 v = *reinterpret_cast<const float2*>(inputs + l * pitch + 2 * channel);
      const float4 bc = *reinterpret_cast<const float4*>(
          shared + (l * 2 + (kReverse ? 1 : 0)) * kGroupStates + lane % 4 * 4);
      const float x[4] = {bc.x, bc.y, bc.z, bc.w};
      sum += v.x;
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const float decay = power<T>(within_power<T>(v.x), A[s]);
        h[s] = kReverse ? decay * fmaf(v.y, x[s], h[s]) : fmaf(decay, h[s], v.y * x[s]);
      }
    }
    __syncthreads();
  }
  if (!kReverse || channel >= place.channels) return;
  const int64_t row = place.slot * a.channels + place.channel + channel;
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    if (first + s < a.states) a.segment_adjoints[row * a.states + first + s] = h[s];
  }
  if (first == 0) a.segment_sums[row] = sum;
}

}  // namespace fk::cuda
