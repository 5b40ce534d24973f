// The scan itself, sequential in time with the states in registers.
//
// Floor: per (step, channel) N exponentials on units that make 16 a clock and multiprocessor, 4
// more for softplus and silu; memory traffic of u, delta, z and y is less than half of that for N
// = 16.
//
// Half of a block's threads stage: they bring tiles of kT steps to shared memory as (dt, dt u) in
// float, whatever dtype and layout the tensors have, and take y from there back, through D and the
// gate. The other half scan: a thread holds kS states of kC channels, so that a value of B or C
// from shared memory serves kC exponentials (a value from shared memory costs as much as half an
// exponential). kLanes threads share the states of a channel. One barrier a tile: while tile i is
// scanned, tile i + 1 comes and y of tile i - 1 goes.
//
// Where there are too few channels for the device, sequences are cut into segments: kStates scans
// each from zero and leaves its last state and the sum of dt, whose exponential is the product of
// the decays; after join_segments, kOutputs scans again from the right states. kAdjoints is kStates
// for the backward: in reverse, with dy silu(z) and C in place of dt u and B.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/launch.h"
#include "ops/selective_scan/cuda_stage.cuh"

namespace fk::cuda {

template <int kChannelsOfThread, int kStatesOfThread, int kLanesOfChannel, int kStateGroups,
          int kScanThreads, int kSteps, int kBatchSteps, int kBlocksPerMultiprocessor = 1>
struct ScanTile {
  static constexpr int kC = kChannelsOfThread, kS = kStatesOfThread, kLanes = kLanesOfChannel;
  static constexpr int kGroups = kStateGroups;
  static constexpr int kT = kSteps, kBatch = kBatchSteps, kBlocks = kBlocksPerMultiprocessor;
  static constexpr int kScan = kScanThreads, kStage = 128, kThreads = kScan + kStage;
  static constexpr int kChannels = kC * kScan / kLanes / kGroups;
  static constexpr int kStates = kS * kLanes * kGroups;
  static constexpr int kPitch = kChannels + 1;  // spreads steps over the banks
  static constexpr int kStatePitch = 2 * kStates + 4;
  static constexpr int kSharedBytes =
      2 * kT * (8 * kPitch + 4 * kStatePitch + 4 * kGroups * kPitch);
  static_assert(kLanes >= kC && kT * kPitch % 2 == 0 && kT % kBatch == 0 && kT >= 2 * kBatch);
};

// What the staging threads do.
template <class T, class Tile, ScanPass kPass, bool kTime>
struct Stager {
  static constexpr int kT = Tile::kT, kChannels = Tile::kChannels, kPitch = Tile::kPitch;
  using TileUnits = Units<T, kT, kChannels, Tile::kStage, kTime>;
  static constexpr int kCount = TileUnits::kCount, kWidth = TileUnits::kWidth;
  using Values = Raw<T, kCount * kWidth>;
  static constexpr bool kReverse = kPass == ScanPass::kAdjoints;
  // Loads for the outputs are in flight during a tile; in float they would take too many registers.
  static constexpr bool kOutputsAhead = sizeof(T) == 2;

  const ScanArgs& a;
  const Place& place;
  const TileUnits t;
  int thread, tiles;
  bool vectors;
  float2* inputs;
  float* states;
  float* outputs;
  float bias[TileUnits::kOwnChannels], D[TileUnits::kOwnChannels];
  Values delta, u, gate, skip;  // in flight
  StagedStates<T, kT, Tile::kS, Tile::kStates, Tile::kStatePitch, Tile::kStage> bc;

  __device__ __forceinline__ int64_t step_of(int i) const {
    return place.segment.first + int64_t{kReverse ? tiles - 1 - i : i} * kT;
  }
  __device__ __forceinline__ bool whole(int64_t step) const {
    return vectors && place.whole<kT, kChannels>(step);
  }

  __device__ __forceinline__ void load_inputs(int64_t step) {
    if (whole(step)) {
      t.load(a.delta, place.at<const T>(a.delta, step), delta);
      const scan::View& second = kReverse ? a.dy : a.u;
      t.load(second, place.at<const T>(second, step), u);
      if (kReverse && a.z.data != nullptr) t.load(a.z, place.at<const T>(a.z, step), gate);
    }
    bc.load(a, place, step, place.steps<kT>(step), thread);
  }

  // (dt, dt u), or (dt, dy silu(z))
  __device__ __forceinline__ float2 input(float delta_value, float bias_value, float second,
                                          float z) const {
    float dt = delta_value + bias_value;
    if (a.softplus) dt = softplus<T>(dt);
    if (!kReverse) return make_float2(dt, dt * second);
    return make_float2(dt, a.z.data == nullptr ? second : second * z * sigmoid(z));
  }

  // All values before the first store: loads from shared memory do not move up past a store to it.
  __device__ __forceinline__ void put_inputs(int64_t step, int buffer) {
    float2* out = inputs + buffer * kT * kPitch;
    if (whole(step)) {
      float2 values[kCount][kWidth];
#pragma unroll
      for (int e = 0; e < kCount * kWidth; ++e) {
        const int i = e / kWidth, k = e % kWidth;
        values[i][k] = input(delta[e], bias[t.own(i, k)], u[e], kReverse ? gate[e] : 0.f);
      }
#pragma unroll
      for (int e = 0; e < kCount * kWidth; ++e) {
        const int i = e / kWidth, k = e % kWidth;
        out[t.step(i, k) * kPitch + t.channel(i, k)] = values[i][k];
      }
    } else {
      put_any_inputs(step, out);
    }
    bc.put(a, thread, states + buffer * kT * Tile::kStatePitch);
  }
  __device__ __forceinline__ void put_any_inputs(int64_t step, float2* out) const {
    const int steps = place.steps<kT>(step);
    const scan::View& second = kReverse ? a.dy : a.u;
    const T* from_delta = place.at<const T>(a.delta, step);
    const T* from_second = place.at<const T>(second, step);
    const T* from_z = place.at<const T>(a.z, step);
#pragma unroll 1
    for (int i = thread; i < kT * kChannels; i += Tile::kStage) {
      const int l = i / kChannels, c = i % kChannels;
      float2 v = make_float2(0, 0);  // where there is nothing, the state stays as it is
      if (l < steps && c < place.channels) {
        v = input(value_at(a.delta, from_delta, l, c), channel_value<T>(a.bias, place, c),
                  value_at(second, from_second, l, c),
                  kReverse && a.z.data != nullptr ? value_at(a.z, from_z, l, c) : 0.f);
      }
      out[l * kPitch + c] = v;
    }
  }

  __device__ __forceinline__ void load_for_outputs(int64_t step) {
    if (!whole(step)) return;
    t.load(a.u, place.at<const T>(a.u, step), skip);
    if (a.z.data != nullptr) t.load(a.z, place.at<const T>(a.z, step), gate);
  }
  __device__ __forceinline__ float sum_at(const float* sums, int l, int c) const {
    float sum = sums[l * kPitch + c];
#pragma unroll
    for (int g = 1; g < Tile::kGroups; ++g) sum += sums[(g * kT + l) * kPitch + c];
    return sum;
  }
  __device__ __forceinline__ float output(float sum, float D_value, float u_value, float z) const {
    const float y = fmaf(D_value, u_value, sum);
    return a.z.data == nullptr ? y : y * z * sigmoid(z);
  }

  __device__ __forceinline__ void put_outputs(int64_t step, int buffer) {
    if (a.y.data == nullptr && a.sums_after == nullptr) return;
    const float* sums = outputs + buffer * Tile::kGroups * kT * kPitch;
    if (!whole(step) || a.sums_before != nullptr || a.sums_after != nullptr) {
      put_any_outputs(step, sums);
      return;
    }
    if (!kOutputsAhead) load_for_outputs(step);
    T* y = place.at<T>(a.y, step);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float values[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const int e = i * kWidth + k;
        values[k] =
            output(sum_at(sums, t.step(i, k), t.channel(i, k)), D[t.own(i, k)], skip[e], gate[e]);
      }
      t.save(a.y, y, i, values);
    }
  }
  __device__ __forceinline__ void put_any_outputs(int64_t step, const float* sums) const {
    const int steps = place.steps<kT>(step);
    const T* from_u = place.at<const T>(a.u, step);
    const T* from_z = place.at<const T>(a.z, step);
    T* y = place.at<T>(a.y, step);
#pragma unroll 1
    for (int i = thread; i < kT * kChannels; i += Tile::kStage) {
      const int l = i / kChannels, c = i % kChannels;
      if (l >= steps || c >= place.channels) continue;
      float sum = sum_at(sums, l, c);
      const int64_t at = a.sum_at(place.segment.batch, step + l, place.channel + c);
      if (a.sums_before != nullptr) sum += a.sums_before[at];
      if (a.sums_after != nullptr) {
        a.sums_after[at] = sum;
      } else {
        y[l * a.y.step + c * a.y.channel] =
            from_float<T>(output(sum, channel_value<T>(a.D, place, c), value_at(a.u, from_u, l, c),
                                 a.z.data == nullptr ? 0.f : value_at(a.z, from_z, l, c)));
      }
    }
  }

  __device__ __forceinline__ void run() {
    constexpr bool kOutputs = kPass == ScanPass::kOutputs;
    if (tiles > 0) load_inputs(step_of(0));
#pragma unroll
    for (int i = 0; i < TileUnits::kOwnChannels; ++i) {
      bias[i] = channel_value<T>(a.bias, place, t.own_channel(i));
      D[i] = channel_value<T>(a.D, place, t.own_channel(i));
    }
    if (tiles > 0) put_inputs(step_of(0), 0);
    if (tiles > 1) load_inputs(step_of(1));
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      if (i + 1 < tiles) put_inputs(step_of(i + 1), (i + 1) & 1);
      if (i + 2 < tiles) load_inputs(step_of(i + 2));
      if (kOutputs) {
        if (i > 0) put_outputs(step_of(i - 1), (i - 1) & 1);
        if (kOutputsAhead) load_for_outputs(step_of(i));
      }
      __syncthreads();
    }
    if (kOutputs && tiles > 0) put_outputs(step_of(tiles - 1), (tiles - 1) & 1);
  }
};

// What a scanning thread holds. Slot j of thread r of a channel's threads is channel j ^ r of
// theirs: sums over threads then move whole slots, without selecting.
template <class Tile>
struct ScanPlace {
  int group;               // of states
  int lane;                // among the threads of a channel and group
  int first;               // state
  int channels[Tile::kC];  // of the block

  __device__ __forceinline__ explicit ScanPlace(int thread) {
    constexpr int kGroupThreads = Tile::kScan / Tile::kGroups;
    group = thread / kGroupThreads;
    lane = thread % Tile::kLanes;
    first = (group * Tile::kLanes + lane) * Tile::kS;
#pragma unroll
    for (int j = 0; j < Tile::kC; ++j) {
      channels[j] = thread % kGroupThreads / Tile::kLanes * Tile::kC + (j ^ (lane % Tile::kC));
    }
  }
  // Leaves the sum of channels[0] over its threads in values[0].
  __device__ __forceinline__ static void sum(float (&values)[Tile::kC]) {
#pragma unroll
    for (int half = Tile::kC / 2; half > 0; half /= 2) {
#pragma unroll
      for (int j = 0; j < half; ++j) {
        values[j] += __shfl_xor_sync(0xffffffffu, values[j + half], half);
      }
    }
#pragma unroll
    for (int mask = Tile::kC; mask < Tile::kLanes; mask *= 2) {
      values[0] += __shfl_xor_sync(0xffffffffu, values[0], mask);
    }
  }
  // One of the threads that have it.
  __device__ __forceinline__ bool owns_sum() const { return lane < Tile::kC; }
};

// What a thread reads from shared memory for kBatch steps.
template <class Tile, ScanPass kPass>
struct StepBatch {
  float B[Tile::kBatch][Tile::kS], C[Tile::kBatch][Tile::kS];
  float2 x[Tile::kBatch][Tile::kC];

  StepBatch() = default;
  __device__ __forceinline__ StepBatch(const float2* inputs, const float* states,
                                       const ScanPlace<Tile>& place, int first) {
#pragma unroll
    for (int m = 0; m < Tile::kBatch; ++m) {
      const int l = kPass == ScanPass::kAdjoints ? Tile::kT - 1 - first - m : first + m;
#pragma unroll
      for (int s = 0; s < Tile::kS; ++s) {
        B[m][s] = states[l * Tile::kStatePitch + s];
        C[m][s] = states[l * Tile::kStatePitch + Tile::kS + s];
      }
#pragma unroll
      for (int j = 0; j < Tile::kC; ++j) x[m][j] = inputs[l * Tile::kPitch + place.channels[j]];
    }
  }
};

template <class T, class Tile, ScanPass kPass>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    scan_tiles(const __grid_constant__ ScanArgs a) {
  constexpr int kC = Tile::kC, kS = Tile::kS, kT = Tile::kT;
  extern __shared__ __align__(16) char shared[];
  float* states = reinterpret_cast<float*>(shared);
  float2* inputs = reinterpret_cast<float2*>(states + 2 * kT * Tile::kStatePitch);
  float* outputs = reinterpret_cast<float*>(inputs + 2 * kT * Tile::kPitch);

  wait_for_earlier_kernels();
  let_next_kernel_start();
  const Place place = Place::of_block<Tile::kChannels>(a);
  const Segment& segment = place.segment;
  if (!segment.exists) return;
  const int tiles = static_cast<int>((segment.last - segment.first + kT - 1) / kT);
  if (threadIdx.x >= Tile::kScan) {
    const int thread = threadIdx.x - Tile::kScan;
    if (a.time_contiguous) {
      const bool vectors = a.vectors && segment.first % (8 / sizeof(T)) == 0;
      using Staging = Stager<T, Tile, kPass, true>;
      Staging{a,      place,  typename Staging::TileUnits(thread),
              thread, tiles,  vectors,
              inputs, states, outputs,
              {},     {},     {},
              {},     {},     {},
              {}}
          .run();
    } else {
      using Staging = Stager<T, Tile, kPass, false>;
      Staging{a,      place,  typename Staging::TileUnits(thread),
              thread, tiles,  a.vectors,
              inputs, states, outputs,
              {},     {},     {},
              {},     {},     {},
              {}}
          .run();
    }
    return;
  }

  const ScanPlace<Tile> mine(threadIdx.x);
  const int first_state = a.first_state + mine.first;
  const auto exists = [&](int j, int s) {
    return mine.channels[j] < place.channels && first_state + s < a.states;
  };
  // (slot, channel, state)
  const auto segment_state = [&](int j, int s) {
    return (place.slot * a.channels + place.channel + mine.channels[j]) * a.states + first_state +
           s;
  };
  const auto state_at = [&](const StateView& view, int j, int s) {
    return segment.sequence * view.sequence + (place.channel + mine.channels[j]) * view.channel +
           (first_state + s) * view.state;
  };
  float A[kC][kS], h[kC][kS], sums[kC];
#pragma unroll
  for (int j = 0; j < kC; ++j) {
    sums[j] = 0;
#pragma unroll
    for (int s = 0; s < kS; ++s) {
      A[j][s] = 0;
      h[j][s] = 0;
      if (!exists(j, s)) continue;
      A[j][s] =
          kLog2E *
          a.A[(place.channel + mine.channels[j]) * a.A_channel + (first_state + s) * a.A_state];
      if (kPass != ScanPass::kOutputs) continue;
      if (a.segment_states != nullptr) {
        h[j][s] = a.segment_states[segment_state(j, s)];
      } else if (a.initial_state.data != nullptr) {
        h[j][s] = load_either<T>(a.initial_state.data, a.initial_state.is_float,
                                 state_at(a.initial_state, j, s));
      }
    }
  }
  const auto keep = [&](int64_t step) {
    const int64_t row = a.kept.base(a.segments, segment) + (step - segment.begin) / a.kept.spacing;
#pragma unroll
    for (int j = 0; j < kC; ++j) {
#pragma unroll
      for (int s = 0; s < kS; ++s) {
        if (exists(j, s)) {
          a.kept.data[(row * a.states + first_state + s) * a.channels + place.channel +
                      mine.channels[j]] = h[j][s];
        }
      }
    }
  };
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    if (kPass == ScanPass::kOutputs && a.kept.data != nullptr) {
      const int64_t step = segment.first + int64_t{i} * kT;
      if (step > segment.begin && (step - segment.begin) % a.kept.spacing == 0) keep(step);
    }
    const float2* x = inputs + (i & 1) * kT * Tile::kPitch;
    const float* bc = states + (i & 1) * kT * Tile::kStatePitch + mine.first * 2;
    float* y =
        outputs + ((i & 1) * Tile::kGroups + mine.group) * kT * Tile::kPitch + mine.channels[0];
    StepBatch<Tile, kPass> batch(x, bc, mine, 0);
#pragma unroll
    for (int k = 0; k < kT; k += Tile::kBatch) {
      // The next steps' values are asked for ahead of this batch's stores.
      StepBatch<Tile, kPass> next;
      if (k + Tile::kBatch < kT) next = StepBatch<Tile, kPass>(x, bc, mine, k + Tile::kBatch);
      float sum[Tile::kBatch][kC];
#pragma unroll
      for (int m = 0; m < Tile::kBatch; ++m) {
#pragma unroll
        for (int j = 0; j < kC; ++j) {
          const float2 v = batch.x[m][j];
          if (kPass != ScanPass::kOutputs) sums[j] += v.x;
#pragma unroll
          for (int s = 0; s < kS; ++s) {
            const float decay = exp2_fast(v.x * A[j][s]);
            if (kPass == ScanPass::kAdjoints) {
              h[j][s] = decay * fmaf(v.y, batch.C[m][s], h[j][s]);
            } else {
              h[j][s] = fmaf(decay, h[j][s], v.y * batch.B[m][s]);
            }
            sum[m][j] = s == 0 ? h[j][s] * batch.C[m][s] : fmaf(h[j][s], batch.C[m][s], sum[m][j]);
          }
        }
      }
      if (kPass == ScanPass::kOutputs) {
#pragma unroll
        for (int m = 0; m < Tile::kBatch; ++m) mine.sum(sum[m]);
        if (mine.owns_sum()) {
#pragma unroll
          for (int m = 0; m < Tile::kBatch; ++m) y[(k + m) * Tile::kPitch] = sum[m][0];
        }
      }
      batch = next;
    }
    __syncthreads();
  }
  if (kPass == ScanPass::kOutputs && a.kept.data != nullptr && a.kept.rows_per_batch >= 0 &&
      segment.closes && segment.end > segment.begin &&
      (segment.end - segment.begin) % a.kept.spacing == 0) {
    keep(segment.end);
  }
#pragma unroll
  for (int j = 0; j < kC; ++j) {
#pragma unroll
    for (int s = 0; s < kS; ++s) {
      if (!exists(j, s)) continue;
      if (kPass != ScanPass::kOutputs) {
        a.segment_states[segment_state(j, s)] = h[j][s];
      } else if (a.last_state.data != nullptr && segment.closes) {
        static_cast<float*>(a.last_state.data)[state_at(a.last_state, j, s)] = h[j][s];
      }
    }
    if (kPass != ScanPass::kOutputs && mine.lane == 0 && mine.channels[j] < place.channels) {
      a.segment_sums[place.slot * a.channels + place.channel + mine.channels[j]] = sums[j];
    }
  }
}

// Two scanning warps a scheduler.
using ManyTile = ScanTile<2, 4, 4, 1, 128, 16, 2, 2>;
using FewTile = ScanTile<1, 2, 8, 1, 128, 32, 4, 1>;
// A value of B or C serves four channels; four groups of warps share the states.
using WideTile = ScanTile<4, 4, 4, 4, 256, 16, 2, 1>;

}  // namespace fk::cuda
