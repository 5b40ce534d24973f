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
// threads, the same bits every time. Warps wait for each other twice a chunk. Of a lane's bits the
// first two and the last are its channel, the others its states.
//
// More than 16 states: group after group through the same chunk, the sums over states in shared
// memory.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/launch.h"
#include "ops/selective_scan/cuda/backward_piece.cuh"
#include "ops/selective_scan/cuda/backward_stage.cuh"

namespace fk::cuda {

constexpr int kPieces = kChunk / kPieceSteps;
constexpr int kStateFloats = kChunk * kStepStates;   // B and C, of a block
constexpr int kStartFloats = 32 * kStates;           // of a warp, before one piece
constexpr int kWarpStarts = kPieces * kStartFloats;  // of a warp

template <class T>
__global__ void __launch_bounds__(kMostWarps * 32, 2)
    reverse_chunks(const __grid_constant__ BackwardArgs a) {
  constexpr bool kExact = std::is_same_v<T, float>;
  extern __shared__ __align__(16) float shared[];
  __shared__ BackwardPlace place;
  begin_block(a, place);
  const Segment& segment = place.segment;
  if (place.slot >= a.segments.slots) return;
  enum { kDelta, kU, kDy, kZ, kDu, kDdelta, kDz, kTensors };
  __shared__ BlockTensor tensors[kTensors];
  // Each tensor is set by another warp, where there are so many.
  const auto set_tensor = [&](int which, const StepView& view) {
    if (threadIdx.x == which * 32 % blockDim.x) tensors[which].template set<T>(a, place, view);
  };
  set_tensor(kDelta, a.delta);
  set_tensor(kU, a.u);
  set_tensor(kDy, a.dy);
  set_tensor(kZ, a.z);
  set_tensor(kDu, a.du);
  set_tensor(kDdelta, a.ddelta);
  set_tensor(kDz, a.dz);
  const auto steps_of = [&](int i) {
    const int64_t left = segment.last - segment.first - int64_t{i} * kChunk;
    return static_cast<int>(left < kChunk ? left : kChunk);
  };
  // Asks for chunk i of all inputs to come nearer.
  const auto ask_for = [&](int i) {
    constexpr int kRows = kMostWarps * kWarpChannels;
    for (int row = threadIdx.x; row < kDu * kRows; row += blockDim.x) {
      prefetch_chunk<T>(a, tensors[row / kRows], place, i, steps_of(i), row % kRows);
    }
  };
  __syncthreads();
  if (place.chunks > 0) ask_for(place.chunks - 1);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, quad = lane / 4 % 4;
  const int channel = warp * kWarpChannels + lane % 4 + lane / 16 * 4;  // of the block
  const int order = order_of(lane);
  float* const states = shared;
  // A warp has the states before pieces and the sums over channels, its channels of the chunk, and
  // its sums over groups of states.
  const int warp_floats = kWarpStarts + kWarpChunk + (a.state_groups > 1 ? kWarpStateSums : 0);
  const auto parts_of = [&](int w) { return shared + kStateFloats + w * warp_floats; };
  const auto chunk_of = [&](int w) { return parts_of(w) + kWarpStarts; };

  const auto state_of = [&](int s) { return 4 * quad + (s ^ order); };
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
  // Finds what enters the segment from the right, through all segments after it.
  const auto enter = [&](int first_state) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      ag[s] = !(here >> s & 1) || a.dlast_state.data == nullptr
                  ? 0.f
                  : static_cast<const float*>(
                        a.dlast_state.data)[state_at(a.dlast_state, s, first_state)];
    }
    if (a.carry_adjoints == nullptr || channel >= place.channels) return;
    const int64_t own = a.carry_segments.first_slot(segment.sequence);
    const int64_t slots = own + a.carry_segments.count_of(segment.sequence);
    const int64_t after = own + (segment.last - segment.begin) / a.carry_segments.steps;
    const int64_t last = (slots - 1) * a.channels + place.channel + channel;
    const float* sum = a.carry_sums + last;
    const float* adjoints = a.carry_adjoints + last * a.states + first_state + 4 * quad;
    // All loads of kAtOnce of them come first.
    constexpr int kAtOnce = 8;
#pragma unroll 1
    for (int64_t left = segment.closes ? 0 : slots - after; left > 0; left -= kAtOnce) {
      float sums[kAtOnce], from[kAtOnce][kStates];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        sums[k] = load_if(k < left, sum);
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          from[k][s] = load_if(k < left && (here >> s & 1), adjoints + (s ^ order));
        }
        sum -= a.channels;
        adjoints -= a.channels * a.states;
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (k >= left) break;
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          ag[s] = pass_through<T>(sums[k], A[s], ag[s], from[k][s]);
        }
      }
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
  // Adjoints between chunks lie here; with one group of states they stay in registers.
  const bool several = a.state_groups > 1;
  const auto carried = [&](int group) {
    return reinterpret_cast<float4*>(a.carried) +
           ((blockIdx.x + int64_t{blockIdx.y} * gridDim.x) * a.state_groups + group) * blockDim.x +
           thread;
  };
  // Sums over time: one thread adds to each place, one chunk after the other.
  const auto of_A = [&](int first_state) {
    return a.parts_of_A + place.of_A + (channel * a.states + first_state + 4 * quad);
  };
  const auto of_channel = [&] { return a.parts_of_channels + place.of_D + channel; };
#pragma unroll 1
  for (int group = 0; group < a.state_groups; ++group) {
    const int first_state = group * kGroupStates;
    take_group(first_state);
    enter(first_state);
    if (place.chunks == 0) leave(first_state);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      if (here >> s & 1) of_A(first_state)[s ^ order] = 0;
    }
    if (several) *carried(group) = make_float4(ag[0], ag[1], ag[2], ag[3]);
  }
  if (quad == 0 && channel < place.channels) {
    of_channel()[0] = 0;
    of_channel()[a.channels] = 0;
  }
  if (place.chunks == 0) return;
  // Returns a chunk's and a group's parts of dB and dC.
  const auto parts = [&](int i, int group) {
    return a.parts_of_states + ((place.part_row + i) * a.state_groups + group) * kChunkParts;
  };
  for (int c = threadIdx.x; c < a.warps * kWarpChannels; c += blockDim.x) {
    float* const to = chunk_of(c / kWarpChannels) + c % kWarpChannels;
    to[kBiasAt] = place.channel_value<T>(a.bias, c);
    to[kSkipAt] = place.channel_value<T>(a.D, c);
  }
  __syncthreads();

  // Stores the gradients of chunk i from shared memory. A thread takes what it staged, nobody
  // else's, so that it may stage the next there.
  const auto put_outputs = [&](int i) {
    const ChunkPairs pairs(a.warps, a.time_contiguous, make_again(thread));
    const float* const chunk = chunk_of(pairs.warp());
    const int exist = pairs.exist(steps_of(i), place.channels);
    float4 of_inputs[ChunkPairs::kCount];
    float2 of_z[ChunkPairs::kCount];
#pragma unroll
    for (int k = 0; k < ChunkPairs::kCount; ++k) {
      of_inputs[k] = *reinterpret_cast<const float4*>(chunk + pairs.input_at(k));
      of_z[k] = *reinterpret_cast<const float2*>(chunk + pairs.gradient_at(k));
    }
    const auto put_all = [&](auto whole_pairs) {
      constexpr bool kPairs = decltype(whole_pairs)::value;
      const auto put = [&](int which, const StepView& view, auto&& pair_of) {
        if (view.data == nullptr) return;
        const int64_t next = tensors[which].next;
        T* p = pairs.at<kPairs>(tensors[which].template at<T>(i), view);
        __builtin_assume(__isGlobal(p));
#pragma unroll
        for (int k = 0; k < ChunkPairs::kCount; ++k) {
          const float2 v = pair_of(k);
          if constexpr (kPairs) {
            const float both[2] = {v.x, v.y};
            if (exist >> k & 1) store(p, pack<T, 2>(both));
          } else {
            if (exist >> k & 1) *p = from_float<T>(v.x);
            if (exist >> (ChunkPairs::kCount + k) & 1) p[view.channel] = from_float<T>(v.y);
          }
          p += next;
        }
      };
      put(kDu, a.du, [&](int k) { return make_float2(of_inputs[k].x, of_inputs[k].z); });
      put(kDdelta, a.ddelta, [&](int k) { return make_float2(of_inputs[k].y, of_inputs[k].w); });
      put(kDz, a.dz, [&](int k) { return of_z[k]; });
    };
    if (a.pairs) {
      put_all(std::true_type());
    } else {
      put_all(std::false_type());
    }
  };
  // Adds the warps' parts of dB and dC and stores them to [piece][half of a quad][step][quad][dB,
  // dC][state of the half].
  const auto put_state_sums = [&](float* out, int pieces) {
    for (int k = threadIdx.x; k < pieces * 32; k += blockDim.x) {
      const float* from = parts_of(0) + k * kStates;
      float4 sum = *reinterpret_cast<const float4*>(from);
      const auto add = [&](int w) {
        const float4 v = *reinterpret_cast<const float4*>(from + w * warp_floats);
        sum.x += v.x;
        sum.y += v.y;
        sum.z += v.z;
        sum.w += v.w;
      };
      if (a.warps == kMostWarps) {
#pragma unroll
        for (int w = 1; w < kMostWarps; ++w) add(w);
      } else {
#pragma unroll 1
        for (int w = 1; w < a.warps; ++w) add(w);
      }
      // These belong to one state, in two steps.
      const int of_lane = order_of(k);
      float* const to = out + k / 32 * kStartFloats + (of_lane >> 1) * 64 + k % 2 * 32 +
                        k / 4 % 4 * 4 + (of_lane & 1);
      to[0] = sum.x;
      to[2] = sum.y;
      to[16] = sum.z;
      to[18] = sum.w;
    }
  };

#pragma unroll 1
  for (int i = place.chunks - 1; i >= 0; --i) {
    const int64_t step = segment.first + int64_t{i} * kChunk;
    const int steps = steps_of(i);
    const int pieces = (steps + kPieceSteps - 1) / kPieceSteps;
    const int own_steps = channel < place.channels ? steps : 0;
    float of_D = 0, of_bias = 0;

#pragma unroll 1
    for (int group = 0; group < a.state_groups; ++group) {
      const int first_state = group * kGroupStates;
      if (several) {
        take_group(first_state);
        const float4 v = *carried(group);
        ag[0] = v.x;
        ag[1] = v.y;
        ag[2] = v.z;
        ag[3] = v.w;
      }
      // All loads come first.
      float h[kStates];
#pragma unroll
      for (int s = 0; s < kStates; ++s) h[s] = 0;
      if (step > segment.begin) {
        const float* from =
            a.kept.data + ((place.kept_row + i) * a.states + first_state + 4 * quad) * a.channels +
            place.channel + channel;
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          h[s] = load_if(here >> s & 1, from + (s ^ order) * a.channels);
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
        const ChunkPairs pairs(a.warps, a.time_contiguous, make_again(thread));
        PairValues<T> delta, u, dy, z;
        const int exist = pairs.exist(steps, place.channels);
        const auto load_all = [&](auto whole_pairs) {
          constexpr bool kPairs = decltype(whole_pairs)::value;
          const auto load = [&](PairValues<T>& values, const BlockTensor& t, const StepView& view) {
            values.template load<kPairs>(pairs.at<kPairs>(t.template at<const T>(i), view), t.next,
                                         view.channel, exist);
          };
          load(delta, tensors[kDelta], a.delta);
          load(u, tensors[kU], a.u);
          load(dy, tensors[kDy], a.dy);
          if (a.z.data != nullptr) {
            load(z, tensors[kZ], a.z);
          } else {
            z = dy;
          }
        };
        if (a.pairs) {
          load_all(std::true_type());
        } else {
          load_all(std::false_type());
        }
        if (i + 1 < place.chunks) put_outputs(i + 1);
        float* const chunk = chunk_of(pairs.warp());
        const bool gated = a.z.data != nullptr;
#pragma unroll
        for (int k = 0; k < ChunkPairs::kCount; ++k) {
          const float2 bias =
              *reinterpret_cast<const float2*>(chunk + kBiasAt + pairs.pair_of_warp(k) * 2);
          const float2 x = delta[k], v = u[k], y = dy[k], w = z[k];
          TimeStep t0 = TimeStep::of<T>(x.x + bias.x, a.softplus);
          TimeStep t1 = TimeStep::of<T>(x.y + bias.y, a.softplus);
          if (pairs.step_of(k) >= steps) t0.dt = t1.dt = 0;  // states stay as they are
          const Gate g0(y.x, w.x, sigmoid(w.x), gated), g1(y.y, w.y, sigmoid(w.y), gated);
          const int at = pairs.input_at(k);
          *reinterpret_cast<float4*>(chunk + at) =
              make_float4(times_log2e(t0.dt), kLn2 * v.x, times_log2e(t1.dt), kLn2 * v.y);
          *reinterpret_cast<float4*>(chunk + kFactorsAt + at) =
              make_float4(g0.dz, t0.slope, g1.dz, t1.slope);
          *reinterpret_cast<float2*>(chunk + pairs.gradient_at(k)) = make_float2(g0.dy, g1.dy);
        }
      }
      bc_values.put(states);
      bc_values.take_rest(steps, a.states - first_state, states);
      __syncthreads();
      if (group == 0 && i > 0) ask_for(i - 1);

      const int again = make_again(thread), lane = again % 32, quad = lane / 4 % 4;
      const int c = lane % 4 + lane / 16 * 4;
      float* const warp_parts = parts_of(again / 32);
      float* const chunk = warp_parts + kWarpStarts;
      float* const gradients = chunk + kGradientsAt + c;
      // x is where the lane's inputs lie in a piece's first step. In the third they lie `third`
      // beside, in step `quad` `own` further, in the next piece `odd` beside.
      const int third = c < kWarpChannels / 2 ? 8 : -8;
      const int own = quad * kStepInputs + (quad & 2 ? third : 0);
      int odd = c & 2 ? -4 : 4;
      float* x = chunk + place_of_pair(0, c / 2) + c % 2 * 2;
      const float* const bc = states + place_of_order(order_of(lane)) + quad * 4;
      float4* const start = reinterpret_cast<float4*>(warp_parts + lane * 4);
      constexpr int kNextStart = kStartFloats / 4;
#pragma unroll 1
      for (int piece = 0; piece + 1 < pieces; ++piece) {
        const int l = piece * kPieceSteps;
        const Piece p = Piece::of<T>(x, third, A);
        start[piece * kNextStart] = make_float4(h[0], h[1], h[2], h[3]);
#pragma unroll
        for (int k = 0; k < kPieceSteps; ++k) {
          float B[kStates];
          load_states(bc + (l + k) * kStepStates, B);
#pragma unroll
          for (int s = 0; s < kStates; ++s) h[s] = fmaf(p.decay[k][s], h[s], p.dtu[k] * B[s]);
        }
        x += kPieceSteps * kStepInputs + odd;
        odd = -odd;
      }
      float dA[kStates] = {};
      start[(pieces - 1) * kNextStart] = make_float4(h[0], h[1], h[2], h[3]);
      ThroughChunk through(ag);
#pragma unroll 1
      for (int piece = pieces - 1; piece >= 0; --piece) {
        const int first = piece * kPieceSteps;
        const float* const bc_piece = bc + first * kStepStates;
        const float4 before = start[piece * kNextStart];
        float h[kPieceSteps + 1][kStates] = {{before.x, before.y, before.z, before.w}};
        const Piece p = Piece::of<T>(x, third, A);
#pragma unroll
        for (int k = 0; k < kPieceSteps; ++k) {
          float B[kStates];
          load_states(bc_piece + k * kStepStates, B);
#pragma unroll
          for (int s = 0; s < kStates; ++s) {
            h[k + 1][s] = fmaf(p.decay[k][s], h[k][s], p.dtu[k] * B[s]);
          }
        }
        float of_states[kPieceSteps * 2];  // [step][dB, dC]
        float gB[kPieceSteps], aghA[kPieceSteps], Ch[kPieceSteps];
        float of_A[kStates];  // float: a piece's part by itself, which is more exact
#pragma unroll
        for (int k = kPieceSteps - 1; k >= 0; --k) {
          float B[kStates], C[kStates], g[kStates];
          load_states(bc_piece + k * kStepStates, B);
          load_states(bc_piece + k * kStepStates + 2 * kGroupStates, C);
          const float dy = gradients[(first + k) * kWarpChannels];
#pragma unroll
          for (int s = 0; s < kStates; ++s) {
            g[s] = fmaf(dy, C[s], ag[s]);
            Ch[k] = s == 0 ? h[k + 1][s] * C[s] : fmaf(h[k + 1][s], C[s], Ch[k]);
            gB[k] = s == 0 ? g[s] * B[s] : fmaf(g[s], B[s], gB[k]);
            ag[s] = p.decay[k][s] * g[s];
            const float agh = ag[s] * h[k][s];
            aghA[k] = s == 0 ? agh * A[s] : fmaf(agh, A[s], aghA[k]);
            const bool begins = k == kPieceSteps - 1;
            of_A[s] = fmaf(agh, p.dt2[k], !begins ? of_A[s] : kExact ? 0.f : dA[s]);
          }
          of_states[2 * k] = sum_of_first(g, p.dtu[k]);
          of_states[2 * k + 1] = sum_of_first(h[k + 1], dy);
        }
#pragma unroll
        for (int s = 0; s < kStates; ++s) dA[s] = kExact ? dA[s] + of_A[s] : of_A[s];
        if constexpr (kExact) {
          through.pass(p);
          if (piece == 0) through.put_right(A, h[0], ag, dA);
        }
        halve<4>(of_states, 1, lane & 1);  // ends with dB and dC of two steps
        start[piece * kNextStart] =
            make_float4(of_states[0], of_states[1], of_states[2], of_states[3]);
        // This ends with the sums over states of one step, `quad` of the piece.
        halve_to_one<2, 8>(lane, gB, aghA, Ch);
        const int l = first + quad;
        float2* const in = reinterpret_cast<float2*>(x + own);
        odd = -odd;
        x -= kPieceSteps * kStepInputs + odd;
        if (a.state_groups > 1) {
          float* const sum = chunk + kWarpChunk + l * 3 * kWarpChannels + c;
          if (group > 0) {
            gB[0] += sum[0];
            aghA[0] += sum[kWarpChannels];
            Ch[0] += sum[2 * kWarpChannels];
          }
          if (group + 1 < a.state_groups) {
            sum[0] = gB[0];
            sum[kWarpChannels] = aghA[0];
            sum[2 * kWarpChannels] = Ch[0];
            continue;
          }
        }
        __syncwarp();  // the four lanes have read their inputs
        if (l < own_steps) {
          float* const gradient = gradients + l * kWarpChannels;
          const float2 v = *in, factor = in[kFactorsAt / 2];
          const float dy = *gradient, u = kLog2E * v.y, D = chunk[kSkipAt + c];
          const float ddelta = fmaf(u, gB[0], aghA[0]) * factor.y;
          of_D = fmaf(dy, u, of_D);
          of_bias += ddelta;
          *in = make_float2(fmaf(kLn2 * v.x, gB[0], D * dy), ddelta);
          *gradient = factor.x * fmaf(D, u, Ch[0]);
        }
      }
      float* const sum_of_A = of_A(first_state);
      if (here == 15) {
#pragma unroll
        for (int s = 0; s < kStates; ++s) atomicAdd(sum_of_A + (s ^ order), kLn2 * dA[s]);
      } else {
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          if (here >> s & 1) atomicAdd(sum_of_A + (s ^ order), kLn2 * dA[s]);
        }
      }
      if (several) *carried(group) = make_float4(ag[0], ag[1], ag[2], ag[3]);
      if (i == 0) leave(first_state);
      __syncthreads();
      put_state_sums(parts(i, group), pieces);
    }
#pragma unroll
    for (int mask = 4; mask < 16; mask *= 2) {
      of_D += __shfl_xor_sync(0xffffffffu, of_D, mask);
      of_bias += __shfl_xor_sync(0xffffffffu, of_bias, mask);
    }
    if (quad == 0 && channel < place.channels) {
      atomicAdd(of_channel(), of_D);
      atomicAdd(of_channel() + a.channels, of_bias);
    }
  }
  put_outputs(0);
}

}  // namespace fk::cuda
