// The gradients of short sequences of few channels, where what counts is how long one takes.
//
// A thread has one state of one channel, a warp 16 states of two channels, a block eight channels
// of a whole sequence, which lie in shared memory. Forward every thread leaves the state before
// each step and the step's decay in shared memory; back it takes them from there, so nothing is
// computed twice and no state comes from the forward. Sixteen steps at a time, the sums over states
// are shuffled such that each lane ends with one step. The block's sums over channels leave as
// parts, in the order of cuda/backward.cuh and for the same last sums.
//
// Floor: a step is one operation deep forward and two back, 12 clocks, 0.4 us for 60 steps; a warp
// is alone on its scheduler and has 33 instructions a step, about 1.2 us. Loads, the parts and the
// outputs once a block are as long again.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/launch.h"
#include "ops/selective_scan/cuda/backward_stage.cuh"

namespace fk::cuda {

// A thread stages these of kShortPiece steps.
template <class T>
struct ShortInputs {
  T delta, u, dy, z;
  T B[2], C[2];
};

// A value of dtype float or T is on its way: nothing waits for it before it is used.
template <class T>
struct EitherValue {
  bool is_float;
  float wide = 0;
  T narrow = T();

  __device__ __forceinline__ void load(const void* data, int64_t at, bool exists) {
    wide = load_if(exists && is_float, static_cast<const float*>(data) + at);
    narrow = load_if(exists && !is_float, static_cast<const T*>(data) + at);
  }
  __device__ __forceinline__ operator float() const { return is_float ? wide : to_float(narrow); }
};

// Returns a sigmoid as exact as T shows. A few steps, of which some cancel, show more of it than
// many.
template <class T>
__device__ __forceinline__ float exact_sigmoid(float x) {
  if constexpr (!std::is_same_v<T, float>) return sigmoid(x);
  return quotient<T>(1.f, 1.f + exponential(fminf(fmaxf(-x, -80.f), 80.f)));
}

template <class T>
__global__ void __launch_bounds__(kShortThreads)
    reverse_short(const __grid_constant__ BackwardArgs a) {
  extern __shared__ __align__(16) float shared[];
  constexpr int kPiece = kShortPiece, kStates = kGroupStates, kChannels = kWarpChannels;
  constexpr int kAhead = 4;  // pieces whose inputs are on their way at once
  const int thread = threadIdx.x, lane = thread % 32;
  const int n = lane % kStates, channel = thread / kStates;
  const int sequence = blockIdx.z;
  SequenceSteps place = {sequence, 0, a.segments.sequences.length};
  if (a.segments.sequences.packed) {
    wait_for_earlier_kernels();  // offsets lie in memory
    place = a.segments.sequences[sequence];
  }
  const int steps = static_cast<int>(place.end - place.begin);
  const int pieces = (steps + kPiece - 1) / kPiece;
  const int per_group = static_cast<int>(a.channels) / a.groups;
  const int within = blockIdx.x * kChannels;
  const int first_channel = blockIdx.y * per_group + within;
  const int channels = min(per_group - within, kChannels);
  const bool exists = channel < channels && n < a.states;
  // Shared memory holds, by [step][thread], {state before, decay}, then {dB, dC} of the channel; by
  // [step][state], {B, C}; by [channel][step], {dt log2(e), dt u, dy silu(z), u}, then {du, ddelta,
  // dz}; by [channel][step], {factor of dz, d dt / d delta}.
  const int pitch = pieces * kPiece + 1;
  float2* const kept = reinterpret_cast<float2*>(shared);
  float2* const bc = kept + pieces * kPiece * kShortThreads;
  float4* const inputs = reinterpret_cast<float4*>(bc + pieces * kPiece * kStates);
  float2* const factors = reinterpret_cast<float2*>(inputs + kChannels * pitch);

  // Neighbouring threads take neighbouring channels, or steps where those lie side by side.
  const int stage_l = a.time_contiguous ? thread % kPiece : thread / kChannels;
  const int stage_c = a.time_contiguous ? thread / kPiece : thread % kChannels;
  const bool state_steps = a.B.step == 1 && a.B.state != 1;
  const int bc_l = state_steps ? thread % kPiece : thread / kStates;
  const int bc_n = state_steps ? thread / kPiece : thread % kStates;
  const int next_l = state_steps ? 0 : kPiece / 2, next_n = state_steps ? kStates / 2 : 0;
  const auto at = [&](const StepView& view) {
    return static_cast<T*>(view.data) + place.batch * view.batch +
           (place.begin + stage_l) * view.step + (first_channel + stage_c) * view.channel;
  };
  const auto state_row = [&](const scan::GroupView& view) {
    return static_cast<const T*>(view.data) + place.batch * view.batch +
           (place.begin + bc_l) * view.step + blockIdx.y * view.group + bc_n * view.state;
  };
  const auto state_at = [&](const StateView& view) {
    return sequence * view.sequence + (first_channel + channel) * view.channel + n * view.state;
  };
  EitherValue<T> bias{a.bias.is_float}, D{a.D.is_float}, before{a.initial_state.is_float};
  float A = 0, ag = 0;
  const T *delta = at(a.delta), *u = at(a.u), *dy = at(a.dy), *z = at(a.z);
  const T *B = state_row(a.B), *C = state_row(a.C);
  const bool gated = a.z.data != nullptr;
  wait_for_earlier_kernels();
  let_next_kernel_start();
#pragma unroll 1
  for (int from = 0; from < pieces || from == 0; from += kAhead) {
    ShortInputs<T> in[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int l = (from + i) * kPiece;
      const bool here = stage_c < channels && l + stage_l < steps;
      in[i].delta = load_if(here, delta + l * a.delta.step);
      in[i].u = load_if(here, u + l * a.u.step);
      in[i].dy = load_if(here, dy + l * a.dy.step);
      in[i].z = load_if(here && gated, z + l * a.z.step);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const bool has = l + bc_l + j * next_l < steps && bc_n + j * next_n < a.states;
        in[i].B[j] = load_if(has, B + (l + j * next_l) * a.B.step + j * next_n * a.B.state);
        in[i].C[j] = load_if(has, C + (l + j * next_l) * a.C.step + j * next_n * a.C.state);
      }
    }
    if (from == 0) {
      bias.load(a.bias.data, (first_channel + stage_c) * a.bias.stride,
                a.bias.data != nullptr && stage_c < channels);
      A = load_if(exists, a.A + (first_channel + channel) * a.A_channel + n * a.A_state);
      D.load(a.D.data, (first_channel + channel) * a.D.stride,
             a.D.data != nullptr && channel < channels);
      before.load(a.initial_state.data, state_at(a.initial_state),
                  a.initial_state.data != nullptr && exists);
      ag = load_if(a.dlast_state.data != nullptr && exists,
                   static_cast<const float*>(a.dlast_state.data) + state_at(a.dlast_state));
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      // Values are chosen, not branched to, because several are computed at once.
      const int l = (from + i) * kPiece + stage_l;
      const float x = to_float(in[i].delta) + bias, v = to_float(in[i].u);
      const TimeStep soft = TimeStep::of<T>(x, true);
      const float z_here = to_float(in[i].z);
      const Gate gate(to_float(in[i].dy), z_here, exact_sigmoid<T>(z_here), true);
      float dt = a.softplus ? soft.dt : x;
      if (l >= steps) dt = 0;  // where there is nothing, states stay as they are
      const float slope = a.softplus ? soft.slope : 1.f;
      const float dy_here = gated ? gate.dy : to_float(in[i].dy), of_dz = gated ? gate.dz : 0.f;
      if (from + i < pieces) {
        inputs[stage_c * pitch + l] = make_float4(times_log2e(dt), dt * v, dy_here, v);
        factors[stage_c * pitch + l] = make_float2(of_dz, slope);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          bc[((from + i) * kPiece + bc_l + j * next_l) * kStates + bc_n + j * next_n] =
              make_float2(to_float(in[i].B[j]), to_float(in[i].C[j]));
        }
      }
    }
  }
  __syncthreads();

  const float skip = D;
  float h = before;
  // Sums of four steps may cancel.
  std::conditional_t<std::is_same_v<T, float>, double, float> dA = 0;
  float4* const own_inputs = inputs + channel * pitch;
  const float2* const own_factors = factors + channel * pitch;
  float2* const own_kept = kept + thread;
  const float2* const own_bc = bc + n;
  // Of each piece all loads come first: a warp alone has nothing else to do while it waits.
#pragma unroll 1
  for (int piece = 0; piece < pieces; ++piece) {
    float decay[kPiece], input[kPiece];
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      const int l = piece * kPiece + k;
      const float2 v = *reinterpret_cast<const float2*>(own_inputs + l);
      decay[k] = power<T>(within_power<T>(v.x), A);
      input[k] = v.y * own_bc[l * kStates].x;
    }
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      own_kept[(piece * kPiece + k) * kShortThreads] = make_float2(h, decay[k]);
      h = fmaf(decay[k], h, input[k]);
    }
  }
  float of_D = 0, of_bias = 0;
#pragma unroll 1
  for (int piece = pieces - 1; piece >= 0; --piece) {
    float gB[kPiece], aghA[kPiece], Ch[kPiece];
    float of_A = 0;
    float2 BC[kPiece], at_step[kPiece];  // at_step: state and decay, then dB and dC
    float3 inputs_at[kPiece];
#pragma unroll
    for (int k = kPiece - 1; k >= 0; --k) {
      const int l = piece * kPiece + k;
      const float4 in = own_inputs[l];
      inputs_at[k] = make_float3(in.x, in.y, in.z);
      BC[k] = own_bc[l * kStates];
      at_step[k] = own_kept[l * kShortThreads];
    }
#pragma unroll
    for (int k = kPiece - 1; k >= 0; --k) {
      const float3 in = inputs_at[k];
      const float g = fmaf(in.z, BC[k].y, ag);
      Ch[k] = h * BC[k].y;
      gB[k] = g * BC[k].x;
      const float dC = in.z * h;
      h = at_step[k].x;
      ag = at_step[k].y * g;
      const float agh = ag * h;
      aghA[k] = agh * A;
      of_A = fmaf(agh, in.x, of_A);
      if (k % kPieceSteps == 0) {
        dA += of_A;
        of_A = 0;
      }
      at_step[k] = make_float2(g * in.y, dC);
    }
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      own_kept[(piece * kPiece + k) * kShortThreads] = at_step[k];
    }
    // This ends with the sums over states of step n of the piece.
    halve_to_one<8, 8>(lane, gB, aghA, Ch);
    const int l = piece * kPiece + n;
    const float4 v = own_inputs[l];
    const float2 factor = own_factors[l];
    const float ddelta = fmaf(v.w, gB[0], aghA[0]) * factor.y;
    of_D = fmaf(v.z, v.w, of_D);
    if (l < steps) of_bias += ddelta;
    __syncwarp();  // the channel's lanes have read the piece
    own_inputs[l] = make_float4(fmaf(kLn2 * v.x, gB[0], skip * v.z), ddelta,
                                factor.x * fmaf(skip, v.w, Ch[0]), 0.f);
  }
  if (exists) {
    a.parts_of_A[(int64_t{sequence} * a.channels + first_channel + channel) * a.states + n] =
        static_cast<float>(kLn2 * dA);
    if (a.dinitial_state.data != nullptr) {
      store_either<T>(a.dinitial_state.data, a.dinitial_state.is_float, state_at(a.dinitial_state),
                      ag);
    }
  }
#pragma unroll
  for (int mask = 1; mask < kStates; mask *= 2) {
    of_D += __shfl_xor_sync(0xffffffffu, of_D, mask);
    of_bias += __shfl_xor_sync(0xffffffffu, of_bias, mask);
  }
  if (n == 0 && channel < channels) {
    float* const to =
        a.parts_of_channels + int64_t{sequence} * 2 * a.channels + first_channel + channel;
    to[0] = of_D;
    to[a.channels] = of_bias;
  }
  __syncthreads();

  // dB and dC of eight steps at a time go to where cuda/backward_sums.cuh finds them.
  const int64_t first_chunk =
      a.segments.sequences.packed
          ? place.begin / kChunk + sequence
          : sequence * ((a.segments.sequences.length + kChunk - 1) / kChunk);
  const int part_l = thread / kStates;
  float* const parts =
      a.parts_of_states +
      ((int64_t{blockIdx.x} * a.groups + blockIdx.y) * a.chunks.slots + first_chunk) * kChunkParts +
      part_l / kPieceSteps * (kPieceSteps * 2 * kStates) + n / 4 * 4 + (n & 2) * 32 + (n & 1) +
      (part_l & 2) * 16 + (part_l & 1) * 16;
#pragma unroll 4
  for (int l = 0; l < pieces * kPiece; l += kChannels) {
    const float2* from = kept + (l + part_l) * kShortThreads + n;
    float2 sum = from[0];
#pragma unroll
    for (int c = 1; c < kChannels; ++c) {
      sum.x += from[c * kStates].x;
      sum.y += from[c * kStates].y;
    }
    parts[l * 2 * kStates] = sum.x;
    parts[l * 2 * kStates + 2] = sum.y;
  }

  T *du = at(a.du), *ddelta = at(a.ddelta), *dz = at(a.dz);
#pragma unroll 4
  for (int piece = 0; piece < pieces; ++piece) {
    const int l = piece * kPiece + stage_l;
    const float4 v = inputs[stage_c * pitch + l];
    const bool here = stage_c < channels && l < steps;
    if (here && a.du.data != nullptr) *du = from_float<T>(v.x);
    if (here && a.ddelta.data != nullptr) *ddelta = from_float<T>(v.y);
    if (here && a.dz.data != nullptr) *dz = from_float<T>(v.z);
    du += kPiece * a.du.step;
    ddelta += kPiece * a.ddelta.step;
    dz += kPiece * a.dz.step;
  }
}

}  // namespace fk::cuda
