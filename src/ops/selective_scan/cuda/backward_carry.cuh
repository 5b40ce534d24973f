// The recurrence alone, for what the backward needs before it can begin, by the threads of
// cuda/backward.cuh.
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
#include "ops/selective_scan/cuda/backward_stage.cuh"

namespace fk::cuda {

constexpr int carry_shared_floats(int warps) {
  return 2 * kChunk * (kGroupStates + 2 * warps * kWarpChannels + 4) + warps * kWarpChannels;
}

// Loads two neighbouring channels, with 0 where there are not so many. kPairs says that they are
// loaded at once.
template <bool kPairs, class T>
__device__ __forceinline__ Vec<T, 2> load_pair(const T* p, int64_t next, int channels) {
  if constexpr (kPairs) {
    return load_if(channels > 0, reinterpret_cast<const Vec<T, 2>*>(p));
  } else {
    Vec<T, 2> v;
    v.data[0] = load_if(channels > 0, p);
    v.data[1] = load_if(channels > 1, p + next);
    return v;
  }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kCarryBlocks = 3;  // a multiprocessor: registers would spill for four
#else
constexpr int kCarryBlocks = 4;
#endif

template <class T, bool kReverse>
__global__ void __launch_bounds__(kMostWarps * 32, kCarryBlocks)
    carry_states(const __grid_constant__ BackwardArgs a, int first_state) {
  extern __shared__ __align__(16) float shared[];
  __shared__ BackwardPlace place;
  begin_block(a, place);
  const Segment& segment = place.segment;
  if (!segment.exists || (kReverse && segment.opens)) return;
  const int thread = threadIdx.x, lane = thread % 32, first = first_state + lane % 4 * 4;
  const int channel = thread / 32 * kWarpChannels + lane / 4;
  const int pitch = 2 * a.warps * kWarpChannels + 4;
  // There are two chunks of B or C, and of {dt log2(e), dy silu(z) or dt u}. One is staged while
  // warps that are ahead or behind scan the other.
  const int buffer = kChunk * (kGroupStates + pitch);
  float* const biases = shared + 2 * buffer;
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
  const StepView& second_view = kReverse ? a.dy : a.u;
  const scan::GroupView& states_view = kReverse ? a.C : a.B;
  const bool gated = kReverse && a.z.data != nullptr;
  const bool state_steps = states_view.step == 1 && states_view.state != 1;
  __syncthreads();
  const auto stage_chunk = [&](int i) {
    const int64_t step = segment.first + int64_t{kReverse ? place.chunks - 1 - i : i} * kChunk;
    const int64_t left = segment.last - step;
    const int steps = static_cast<int>(left < kChunk ? left : kChunk);
    float* const of_states = shared + i % 2 * buffer;
    float* const inputs = of_states + kChunk * kGroupStates;
    const auto stage = [&](auto whole_pairs) {
      constexpr bool kPairs = decltype(whole_pairs)::value;
      const ChunkPairs pairs(a.warps, a.time_contiguous, make_again(thread));
      constexpr int kBatch = kPairs && sizeof(T) == 2 ? ChunkPairs::kCount : 2;
#pragma unroll 1
      for (int from = 0; from < ChunkPairs::kCount; from += kBatch) {
        Vec<T, 2> delta[kBatch], second[kBatch], z[kBatch];
        const auto load = [&](const StepView& view, Vec<T, 2>(&to)[kBatch]) {
          const int64_t next = pairs.next(view);
          const T* p = pairs.at<const T>(view, place, step) + from * next;
#pragma unroll
          for (int k = 0; k < kBatch; ++k) {
            to[k] = load_pair<kPairs>(p, view.channel, pairs.channels(from + k, steps, place));
            p += next;
          }
        };
        load(a.delta, delta);
        load(second_view, second);
        if (gated) load(a.z, z);
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int l = pairs.step_of(from + k), q = pairs.pair_of(from + k);
          const float2 bias = *reinterpret_cast<const float2*>(biases + 2 * q);
          float x[2], v[2], w[2] = {};
          unpack(delta[k], x);
          unpack(second[k], v);
          if (gated) unpack(z[k], w);
          TimeStep t0 = TimeStep::of<T>(x[0] + bias.x, a.softplus);
          TimeStep t1 = TimeStep::of<T>(x[1] + bias.y, a.softplus);
          if (l >= steps) t0.dt = t1.dt = 0;
          const float y0 = kReverse ? Gate(v[0], w[0], sigmoid(w[0]), gated).dy : t0.dt * v[0];
          const float y1 = kReverse ? Gate(v[1], w[1], sigmoid(w[1]), gated).dy : t1.dt * v[1];
          *reinterpret_cast<float4*>(inputs + l * pitch + 4 * q) =
              make_float4(times_log2e(t0.dt), y0, times_log2e(t1.dt), y1);
        }
      }
    };
    const auto l_of = [&](int k) { return state_steps ? k % kChunk : k / kGroupStates; };
    const auto n_of = [&](int k) { return state_steps ? k / kChunk : k % kGroupStates; };
    const T* const states = static_cast<const T*>(states_view.data) +
                            segment.batch * states_view.batch + step * states_view.step +
                            place.group * states_view.group + first_state * states_view.state;
    const auto load_state = [&](int k) {
      return load_if(l_of(k) < steps && first_state + n_of(k) < a.states,
                     states + l_of(k) * states_view.step + n_of(k) * states_view.state);
    };
    const auto put_state = [&](int k, T v) {
      of_states[l_of(k) * kGroupStates + n_of(k)] = to_float(v);
    };
    if (a.pairs) {
      stage(std::true_type());
    } else {
      stage(std::false_type());
    }
#pragma unroll 1
    for (int k = make_again(thread); k < kChunk * kGroupStates; k += 2 * blockDim.x) {
      const T first_value = load_state(k), second_value = load_state(k + blockDim.x);
      put_state(k, first_value);
      put_state(k + blockDim.x, second_value);
    }
  };
#pragma unroll 1
  for (int i = -1; i < place.chunks; ++i) {
    if (i + 1 < place.chunks) stage_chunk(i + 1);
    if (i < 0) {
      __syncthreads();
      continue;
    }
    if (!kReverse && i > 0 && channel < place.channels) {
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        if (first + s >= a.states) continue;
        a.kept.data[((place.kept_row + i) * a.states + first + s) * a.channels + place.channel +
                    channel] = h[s];
      }
    }
    const float* const of_states = shared + i % 2 * buffer;
    const float* const inputs = of_states + kChunk * kGroupStates;
    const auto inputs_of = [&](int l) {
      return *reinterpret_cast<const float2*>(inputs + l * pitch + 2 * channel);
    };
    const auto states_of = [&](int l, float(&x)[4]) {
      const float4 v =
          *reinterpret_cast<const float4*>(of_states + l * kGroupStates + lane % 4 * 4);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    };
    float x[4];
    if constexpr (kReverse) {
      // This goes not step by step, but from each step to the chunk's first one at once, by the sum
      // of dt between them. Errors of powers then do not add up, and one instruction is good enough
      // for them.
      float of_chunk = 0, from_here[4] = {};
#pragma unroll 4
      for (int l = 0; l < kChunk; ++l) {
        const float2 v = inputs_of(l);
        states_of(l, x);
        of_chunk += v.x;
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          from_here[s] = fmaf(fast_power<T>(of_chunk, A[s]), v.y * x[s], from_here[s]);
        }
      }
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        h[s] = pass_through<T>(of_chunk, A[s], h[s], from_here[s]);
      }
      sum += of_chunk;
    } else {
#pragma unroll 8
      for (int l = 0; l < kChunk; ++l) {
        const float2 v = inputs_of(l);
        states_of(l, x);
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          h[s] = fmaf(power<T>(within_power<T>(v.x), A[s]), h[s], v.y * x[s]);
        }
      }
    }
    __syncthreads();
  }
  if (!kReverse || channel >= place.channels) return;
  const int64_t row = place.slot * a.channels + place.channel + channel;
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    if (first + s < a.states) a.carry_adjoints[row * a.states + first + s] = h[s];
  }
  if (first == 0) a.carry_sums[row] = sum;
}

}  // namespace fk::cuda
