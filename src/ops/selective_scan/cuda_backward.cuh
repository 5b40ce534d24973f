// The gradients of the scan, chunk by chunk in reverse.
//
// With g_t = dL/dh_t and a_t = exp(dt_t A): g_t = dy_t silu(z_t) C_t + a_{t+1} g_{t+1}, and every
// gradient is a sum of products of g_t, h_t, h_{t-1} and inputs over states (du, ddelta, dz), over
// channels (dB, dC) or over time (dA, dD, ddelta_bias).
//
// Floor: two exponentials and 13 multiplications per (step, channel, state), at 16 and 128 a clock
// and multiprocessor.
//
// A thread has four states of a channel, a warp 16 states of eight channels. A block takes a chunk
// of 32 steps of its channels at a time: its inputs go to shared memory; each warp goes forward
// from the state that the forward kept and leaves the state before every piece of four steps in
// shared memory; then, piece by piece in reverse, it goes forward again with decays and states in
// registers, and back. Sums over the four lanes of a channel end at one lane for each step, sums
// over the channels of a warp in the place of the state before the piece; those are added up over
// the warps once a chunk and leave the block as parts, summed by another kernel: no atomics between
// threads, the same bits every time. Warps wait for each other twice a chunk.
//
// More than 16 states: group after group through the same chunk, the sums over states in shared
// memory.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/launch.h"
#include "ops/selective_scan/cuda_backward_stage.cuh"

namespace fk::cuda {

constexpr int kPieces = kChunk / kPieceSteps;
constexpr int kStates = 4;                               // of a thread
constexpr int kStartFloats = 32 * kStates;               // of a warp, before one piece
constexpr int kWarpStarts = kPieces * kStartFloats;      // of a warp
constexpr int kStateFloats = kChunk * 2 * kGroupStates;  // B and C, of a block

// B or C of a step in the thread's order: halves are the other way round in lanes 16 to 31, so that
// sums over channels begin with whole halves.
__device__ __forceinline__ void load_states(const float* row, int swap, float (&out)[kStates]) {
  const float2 low = *reinterpret_cast<const float2*>(row + swap);
  const float2 high = *reinterpret_cast<const float2*>(row + (swap ^ 2));
  out[0] = low.x;
  out[1] = low.y;
  out[2] = high.x;
  out[3] = high.y;
}

// Decays of kPieceSteps steps, dt log2(e) and dt u.
template <class T>
struct Piece {
  float dt2[kPieceSteps], dtu[kPieceSteps], decay[kPieceSteps][kStates];

  __device__ __forceinline__ Piece(const float* x, int pitch, const float (&A)[kStates]) {
#pragma unroll
    for (int k = 0; k < kPieceSteps; ++k) {
      const float2 v = *reinterpret_cast<const float2*>(x + k * pitch);
      dt2[k] = v.x;
      dtu[k] = v.x * v.y;
    }
#pragma unroll
    for (int k = 0; k < kPieceSteps; ++k) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) decay[k][s] = power<T>(within_power<T>(dt2[k]), A[s]);
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kMostWarps * 32, 2)
    reverse_chunks(const __grid_constant__ BackwardArgs a) {
  extern __shared__ __align__(16) float shared[];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  __shared__ BackwardPlace place;
  if (threadIdx.x == 0) place.find(a);
  __syncthreads();
  const Segment& segment = place.segment;
  if (place.slot >= a.segments.slots) return;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, quad_lane = lane % 4;
  const int channel = warp * kWarpChannels + lane / 4;  // of the block
  const int swap = lane & 16 ? 2 : 0;
  float* const states = shared;
  float* const starts = shared + kStateFloats;
  const ChunkShared chunk(starts + a.warps * kWarpStarts, a.warps);
  float* const sums = chunk.D + a.warps * kWarpChannels + channel;  // [step][3][channel]
  const int sum_pitch = a.warps * kWarpChannels;

  const auto state_of = [&](int s) { return 4 * quad_lane + (s ^ swap); };
  const auto state_at = [&](const StateView& view, int s, int first_state) {
    return segment.sequence * view.sequence + (place.channel + channel) * view.channel +
           (first_state + state_of(s)) * view.state;
  };
  int here = 0;                   // bit s: state s of the thread exists
  float A[kStates], ag[kStates];  // ag: from the step after, a_{t+1} g_{t+1}
  const auto take_group = [&](int first_state) {
    here = 0;
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      A[s] = 0;
      if (channel >= place.channels || first_state + state_of(s) >= a.states) continue;
      here |= 1 << s;
      A[s] = a.A[(place.channel + channel) * a.A_channel + (first_state + state_of(s)) * a.A_state];
    }
  };
  // What enters the segment from the right: through all segments after it.
  const auto enter = [&](int first_state) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      ag[s] = !(here >> s & 1) || a.dlast_state.data == nullptr
                  ? 0.f
                  : static_cast<const float*>(
                        a.dlast_state.data)[state_at(a.dlast_state, s, first_state)];
    }
    if (a.segment_adjoints == nullptr || channel >= place.channels) return;
    const int64_t slots =
        a.segments.first_slot(segment.sequence) + a.segments.count_of(segment.sequence);
    const int64_t last = (slots - 1) * a.channels + place.channel + channel;
    const float* sum = a.segment_sums + last;
    const float* adjoints = a.segment_adjoints + last * a.states + first_state + 4 * quad_lane;
#pragma unroll 2
    for (int64_t i = slots - 1; i > place.slot; --i) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        if (!(here >> s & 1)) continue;
        ag[s] = fmaf(power<T>(within_power<T>(*sum), A[s]), ag[s], adjoints[s ^ swap]);
      }
      sum -= a.channels;
      adjoints -= a.channels * a.states;
    }
  };
  const auto leave = [&](int first_state) {
    if (a.dinitial_state.data == nullptr || !segment.exists || !segment.opens) return;
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      if (!(here >> s & 1)) continue;
      store_either<T>(a.dinitial_state.data, a.dinitial_state.is_float,
                      state_at(a.dinitial_state, s, first_state), ag[s]);
    }
  };
  const auto carried = [&](int group) {
    return a.carried +
           ((blockIdx.x + int64_t{blockIdx.y} * gridDim.x) * a.state_groups + group) * kStates *
               blockDim.x +
           thread;
  };
  // Sums over time: one thread adds to each place, one chunk after the other.
  const auto of_A = [&](int first_state) {
    return a.parts_of_A + (place.slot * a.channels + place.channel + channel) * a.states +
           first_state + 4 * quad_lane;
  };
  const auto of_channel = [&] {
    return a.parts_of_channels + place.slot * 2 * a.channels + place.channel + channel;
  };
#pragma unroll 1
  for (int group = 0; group < a.state_groups; ++group) {
    const int first_state = group * kGroupStates;
    take_group(first_state);
    enter(first_state);
    if (place.chunks == 0) leave(first_state);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      if (here >> s & 1) of_A(first_state)[s ^ swap] = 0;
      carried(group)[s * blockDim.x] = ag[s];
    }
  }
  if (quad_lane == 0 && channel < place.channels) {
    of_channel()[0] = 0;
    of_channel()[a.channels] = 0;
  }
  if (place.chunks == 0) return;
  // A chunk's and a group's parts of dB and dC.
  const auto parts = [&](int i, int group) {
    return a.parts_of_states + ((place.part_row + i) * a.state_groups + group) * kChunkParts;
  };
  for (int c = threadIdx.x; c < a.warps * kWarpChannels; c += blockDim.x) {
    chunk.bias[c] = place.channel_value<T>(a.bias, c);
    chunk.D[c] = place.channel_value<T>(a.D, c);
  }
  __syncthreads();

  const auto steps_of = [&](int i) {
    const int64_t left = segment.last - segment.first - int64_t{i} * kChunk;
    return static_cast<int>(left < kChunk ? left : kChunk);
  };
  // The gradients of chunk i from shared memory. A thread takes what it staged, nobody else's, so
  // that it may stage the next there.
  const auto put_outputs = [&](int i) {
    const int64_t step = segment.first + int64_t{i} * kChunk;
    const int steps = steps_of(i);
    const ChunkPairs pairs(a.warps, a.time_contiguous, make_again(thread));
    const auto put_all = [&](const scan::View& view, const float* from, int pitch, int stride,
                             int next) {
      if (view.data == nullptr) return;
      T* p = pairs.at<T>(view, place, step);
#pragma unroll
      for (int k = 0; k < ChunkPairs::kCount; ++k) {
        const float* v = from + pairs.step_of(k) * pitch + pairs.pair_of(k) * stride;
        const float both[2] = {v[0], v[next]};
        const int channels = pairs.channels(k, steps, place);
        if (a.pairs) {
          if (channels > 0) store(p, pack<T, 2>(both));
        } else {
          if (channels > 0) *p = from_float<T>(both[0]);
          if (channels > 1) p[view.channel] = from_float<T>(both[1]);
        }
        p += pairs.next(view);
      }
    };
    put_all(a.du, chunk.inputs, chunk.pitch, 4, 2);
    put_all(a.ddelta, chunk.inputs + 1, chunk.pitch, 4, 2);
    put_all(a.dz, chunk.gradients, chunk.gradient_pitch, 2, 1);
  };
  // The warps' parts of dB and dC.
  const auto put_state_sums = [&](float* out, int pieces) {
    for (int k = threadIdx.x; k < pieces * 32; k += blockDim.x) {
      const float* from = starts + k * kStates;
      float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll 4
      for (int w = 1; w < a.warps; ++w) {
        const float4 v = *reinterpret_cast<const float4*>(from + w * kWarpStarts);
        sum.x += v.x;
        sum.y += v.y;
        sum.z += v.z;
        sum.w += v.w;
      }
      *reinterpret_cast<float4*>(out + k * 4) = sum;
    }
  };

#pragma unroll 1
  for (int i = place.chunks - 1; i >= 0; --i) {
    const int64_t step = segment.first + int64_t{i} * kChunk;
    if (i + 1 < place.chunks) put_outputs(i + 1);
    const int steps = steps_of(i);
    const int pieces = (steps + kPieceSteps - 1) / kPieceSteps;
    const int own_steps = channel < place.channels ? steps : 0;
    float of_D = 0, of_bias = 0;

#pragma unroll 1
    for (int group = 0; group < a.state_groups; ++group) {
      const int first_state = group * kGroupStates;
      take_group(first_state);
#pragma unroll
      for (int s = 0; s < kStates; ++s) ag[s] = carried(group)[s * blockDim.x];
      // All loads first.
      float h[kStates];
#pragma unroll
      for (int s = 0; s < kStates; ++s) h[s] = 0;
      if (step > segment.begin) {
        const float* from =
            a.kept.data +
            ((place.kept_row + i) * a.states + first_state + 4 * quad_lane) * a.channels +
            place.channel + channel;
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          h[s] = load_if(here >> s & 1, from + (s ^ swap) * a.channels);
        }
      } else if (a.initial_state.data != nullptr) {
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          if (here >> s & 1) {
            h[s] = load_either<T>(a.initial_state.data, a.initial_state.is_float,
                                  state_at(a.initial_state, s, first_state));
          }
        }
      }
      ChunkStates<T> bc_values(a, place, step, first_state, make_again(thread));
      bc_values.load(steps, a.states - first_state);
      if (group == 0) {
        const auto stage = [&](auto whole_pairs) {
          constexpr bool kPairs = decltype(whole_pairs)::value;
          const ChunkPairs pairs(a.warps, a.time_contiguous, make_again(thread));
          using Values = PairValues<T, kPairs>;
#pragma unroll 1
          for (int from = 0; from < ChunkPairs::kCount; from += Values::kBatch) {
            Values delta, u, dy, z;
            delta.load(a.delta, place, pairs, from, step, steps);
            u.load(a.u, place, pairs, from, step, steps);
            dy.load(a.dy, place, pairs, from, step, steps);
            if (a.z.data != nullptr) z.load(a.z, place, pairs, from, step, steps);
#pragma unroll
            for (int k = 0; k < Values::kBatch; ++k) {
              const int l = pairs.step_of(from + k), q = pairs.pair_of(from + k);
              const float2 bias = *reinterpret_cast<const float2*>(chunk.bias + 2 * q);
              const float2 x = delta[k], v = u[k], g = dy[k];
              const float2 w = a.z.data == nullptr ? make_float2(0, 0) : z[k];
              TimeStep t0 = TimeStep::of<T>(x.x + bias.x, a.softplus);
              TimeStep t1 = TimeStep::of<T>(x.y + bias.y, a.softplus);
              if (l >= steps) t0.dt = t1.dt = 0;  // where there is nothing, states stay as they are
              const Gate g0(g.x, w.x, a.z.data != nullptr), g1(g.y, w.y, a.z.data != nullptr);
              *reinterpret_cast<float4*>(chunk.inputs + l * chunk.pitch + 4 * q) =
                  make_float4(times_log2e(t0.dt), kLn2 * v.x, times_log2e(t1.dt), kLn2 * v.y);
              *reinterpret_cast<float4*>(chunk.factors + l * chunk.pitch + 4 * q) =
                  make_float4(g0.dz, t0.slope, g1.dz, t1.slope);
              *reinterpret_cast<float2*>(chunk.gradients + l * chunk.gradient_pitch + 2 * q) =
                  make_float2(g0.dy, g1.dy);
            }
          }
        };
        if (a.pairs) {
          stage(std::true_type());
        } else {
          stage(std::false_type());
        }
      }
      bc_values.put(states);
      bc_values.take_rest(steps, a.states - first_state, states);
      __syncthreads();
      if (group == 0 && i > 0) {
        for (int row = thread; row < 4 * 2 * kChunk; row += blockDim.x) {
          const int tensor = row / (2 * kChunk), r = row % (2 * kChunk);
          prefetch_chunk<T>(a,
                            tensor == 0   ? a.delta
                            : tensor == 1 ? a.u
                            : tensor == 2 ? a.dy
                                          : a.z,
                            place, step - kChunk, r);
        }
      }

      float* const x = chunk.inputs + 2 * channel;
      float* const gradients = chunk.gradients + channel;
      const float* const factors = chunk.factors + 2 * channel;
      const float* const bc = states + quad_lane * 4;
      float4* const start = reinterpret_cast<float4*>(starts + warp * kWarpStarts + lane * 4);
#pragma unroll 1
      for (int piece = 0; piece + 1 < pieces; ++piece) {
        const int l = piece * kPieceSteps;
        const Piece<T> p(x + l * chunk.pitch, chunk.pitch, A);
        start[piece * kStartFloats / 4] = make_float4(h[0], h[1], h[2], h[3]);
#pragma unroll
        for (int k = 0; k < kPieceSteps; ++k) {
          float B[kStates];
          load_states(bc + (l + k) * 2 * kGroupStates, swap, B);
#pragma unroll
          for (int s = 0; s < kStates; ++s) h[s] = fmaf(p.decay[k][s], h[s], p.dtu[k] * B[s]);
        }
      }
      float dA[kStates] = {};
      float4 before_piece = make_float4(h[0], h[1], h[2], h[3]);
#pragma unroll 1
      for (int piece = pieces - 1; piece >= 0; --piece) {
        const int first = piece * kPieceSteps;
        const float* const bc_piece = bc + first * 2 * kGroupStates;
        float h[kPieceSteps + 1][kStates] = {
            {before_piece.x, before_piece.y, before_piece.z, before_piece.w}};
        if (piece > 0) before_piece = start[(piece - 1) * kStartFloats / 4];
        const Piece<T> p(x + first * chunk.pitch, chunk.pitch, A);
#pragma unroll
        for (int k = 0; k < kPieceSteps; ++k) {
          float B[kStates];
          load_states(bc_piece + k * 2 * kGroupStates, swap, B);
#pragma unroll
          for (int s = 0; s < kStates; ++s) {
            h[k + 1][s] = fmaf(p.decay[k][s], h[k][s], p.dtu[k] * B[s]);
          }
        }
        float of_states[kPieceSteps * 4];  // [step][dB of two states, dC of two states]
        float gB[kPieceSteps], aghA[kPieceSteps], Ch[kPieceSteps];
#pragma unroll
        for (int k = kPieceSteps - 1; k >= 0; --k) {
          float B[kStates], C[kStates], dB[kStates], dC[kStates];
          load_states(bc_piece + k * 2 * kGroupStates, swap, B);
          load_states(bc_piece + k * 2 * kGroupStates + kGroupStates, swap, C);
          const float dy = gradients[(first + k) * chunk.gradient_pitch];
#pragma unroll
          for (int s = 0; s < kStates; ++s) {
            const float g = fmaf(dy, C[s], ag[s]);
            Ch[k] = s == 0 ? h[k + 1][s] * C[s] : fmaf(h[k + 1][s], C[s], Ch[k]);
            gB[k] = s == 0 ? g * B[s] : fmaf(g, B[s], gB[k]);
            dB[s] = g * p.dtu[k];
            dC[s] = dy * h[k + 1][s];
            ag[s] = p.decay[k][s] * g;
            const float agh = ag[s] * h[k][s];
            aghA[k] = s == 0 ? agh * A[s] : fmaf(agh, A[s], aghA[k]);
            dA[s] = fmaf(agh, p.dt2[k], dA[s]);
          }
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            of_states[k * 4 + s] = dB[s] + __shfl_xor_sync(0xffffffffu, dB[s + 2], 16);
            of_states[k * 4 + 2 + s] = dC[s] + __shfl_xor_sync(0xffffffffu, dC[s + 2], 16);
          }
        }
        // Ends with dB and dC of one step and two states.
        halve<8>(of_states, 8, lane & 8);
        halve<4>(of_states, 4, lane & 4);
        start[piece * kStartFloats / 4] =
            make_float4(of_states[0], of_states[1], of_states[2], of_states[3]);
        // Ends with the sums over states of one step, quad_lane of the piece.
        halve<2>(gB, 2, lane & 2);
        halve<2>(aghA, 2, lane & 2);
        halve<2>(Ch, 2, lane & 2);
        halve<1>(gB, 1, lane & 1);
        halve<1>(aghA, 1, lane & 1);
        halve<1>(Ch, 1, lane & 1);
        const int l = first + quad_lane;
        if (a.state_groups > 1) {
          float* sum = sums + l * 3 * sum_pitch;
          if (group > 0) {
            gB[0] += sum[0];
            aghA[0] += sum[sum_pitch];
            Ch[0] += sum[2 * sum_pitch];
          }
          if (group + 1 < a.state_groups) {
            sum[0] = gB[0];
            sum[sum_pitch] = aghA[0];
            sum[2 * sum_pitch] = Ch[0];
            continue;
          }
        }
        __syncwarp();  // the four lanes have read their inputs
        if (l < own_steps) {
          float2* const in = reinterpret_cast<float2*>(x + l * chunk.pitch);
          float* const gradient = gradients + l * chunk.gradient_pitch;
          const float2 v = *in,
                       factor = *reinterpret_cast<const float2*>(factors + l * chunk.pitch);
          const float dy = *gradient, u = kLog2E * v.y, D = chunk.D[channel];
          const float ddelta = fmaf(u, gB[0], aghA[0]) * factor.y;
          of_D = fmaf(dy, u, of_D);
          of_bias += ddelta;
          *in = make_float2(fmaf(kLn2 * v.x, gB[0], D * dy), ddelta);
          *gradient = factor.x * fmaf(D, u, Ch[0]);
        }
      }
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        if (here >> s & 1) atomicAdd(of_A(first_state) + (s ^ swap), kLn2 * dA[s]);
      }
#pragma unroll
      for (int s = 0; s < kStates; ++s) carried(group)[s * blockDim.x] = ag[s];
      if (i == 0) leave(first_state);
      __syncthreads();
      put_state_sums(parts(i, group), pieces);
    }
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
      of_D += __shfl_xor_sync(0xffffffffu, of_D, mask);
      of_bias += __shfl_xor_sync(0xffffffffu, of_bias, mask);
    }
    if (quad_lane == 0 && channel < place.channels) {
      atomicAdd(of_channel(), of_D);
      atomicAdd(of_channel() + a.channels, of_bias);
    }
  }
  put_outputs(0);
}

}  // namespace fk::cuda
