// The scan itself, sequential in time with the states in registers.
//
// Floor: per (step, channel) N exponentials on units that make 16 a clock and multiprocessor, 4
// more for softplus and silu; memory traffic of u, delta, z and y is less than half of that for N
// = 16.
//
// Of a block's warps some bring inputs, some take outputs (cuda/forward_stage.cuh), and the others
// scan. A scanning thread holds kS states of kC channels; kLanes threads share the states of a
// channel. One barrier a tile of kT steps: while tile i is scanned, tile i + 1 comes and y of tile
// i - 1 goes.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/launch.h"
#include "ops/selective_scan/cuda/forward_stage.cuh"

namespace fk::cuda {

// A tile of a block is what follows from how it is cut, with the map of shared memory. `Cut` says:
//   kC            channels of a thread, which has four states of each
//   kLanes        lanes that share the states of a channel
//   kScanWarps    warps that scan, kInputWarps that bring inputs, kOutputWarps that take outputs
//   kT            steps of a tile
//   kBlocks       blocks that share a multiprocessor
//   kNarrow       whether blocks may have fewer scanning warps, for few channels
template <class Cut>
struct ForwardTile : Cut {
  static constexpr int kS = 4, kBetween = Cut::kT;
  static constexpr int kWarpChannels = Cut::kC * 32 / Cut::kLanes;
  static constexpr int kChannels = kWarpChannels * Cut::kScanWarps;  // at most
  static constexpr int kStates = kS * Cut::kLanes;
  static constexpr int kInputs = 32 * Cut::kInputWarps,
                       kOutputs = 32 * Cut::kOutputWarps;  // threads
  static constexpr int kThreads = 32 * Cut::kScanWarps + kInputs + kOutputs;
  static constexpr int kStage = kInputs + kOutputs;     // threads that do not scan
  static constexpr int kParts = Cut::kLanes / Cut::kC;  // sums that y of a (step, channel) comes in
  // Shared memory holds two tiles each of inputs, of B and C and of sums, in floats, spread over
  // the banks.
  static constexpr int kPitch = 2 * kChannels + 4;
  static constexpr int kStatePitch = 2 * kStates + 4;
  static constexpr int kQuadPitch = 4 * kParts + (kParts > 1 ? 4 : 0);  // y of four channels
  static constexpr int kSumPitch = kChannels / 4 * kQuadPitch + (kParts > 1 ? 0 : 4);
  static constexpr int kSharedBytes = 8 * Cut::kT * (kPitch + kStatePitch + kSumPitch);
  static_assert(Cut::kLanes >= Cut::kC && kWarpChannels % 4 == 0 && Cut::kT % 4 == 0);
};

// This is for many channels of up to 16 states: four blocks share a multiprocessor, which do not
// wait for each other.
struct ManyCut {
  static constexpr int kC = 2, kLanes = 4;
  static constexpr int kScanWarps = 2, kInputWarps = 2, kOutputWarps = 2;
  static constexpr int kT = 16, kBlocks = 4;
  static constexpr bool kNarrow = false;
};
using ManyTile = ForwardTile<ManyCut>;

// This takes 64 states at a time: a value of B or C serves four channels.
struct WideCut {
  static constexpr int kC = 4, kLanes = 16;
  static constexpr int kScanWarps = 4, kInputWarps = 2, kOutputWarps = 2;
  static constexpr int kT = 8, kBlocks = 2;
  static constexpr bool kNarrow = true;
};
using WideTile = ForwardTile<WideCut>;

// A scanning thread reads these from shared memory for a step.
template <class Tile>
struct StepValues {
  float B[Tile::kS], C[Tile::kS];
  float2 x[Tile::kC];

  StepValues() = default;
  // Slot j of the thread has channel j ^ turn: sums over threads then move whole slots.
  __device__ __forceinline__ StepValues(const float* inputs, const float* states, int turn,
                                        int step) {
    const float* at = states + step * Tile::kStatePitch;
    load_four(at, B);
    load_four(at + Tile::kStates, C);
#pragma unroll
    for (int j = 0; j < Tile::kC; ++j) {
      x[j] = *reinterpret_cast<const float2*>(inputs + step * Tile::kPitch + 2 * (j ^ turn));
    }
  }
};

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    scan_forward(const __grid_constant__ ScanArgs a) {
  constexpr int kC = Tile::kC, kS = Tile::kS, kT = Tile::kT;
  extern __shared__ __align__(16) float shared_floats[];

  wait_for_earlier_kernels();
  let_next_kernel_start();
  const BlockChannels place =
      BlockChannels::of_block(a, Tile::kNarrow ? a.block_channels : Tile::kChannels);
  const Segment& segment = place.segment;
  if (!segment.exists) return;
  const int tiles = static_cast<int>(ceil_div(segment.last - segment.first, kT));
  if (threadIdx.x < Tile::kStage) {
    with_layout(a, place, [&](auto layout) {
      constexpr ScanLayout kLayout = decltype(layout)::value;
      if (threadIdx.x < Tile::kInputs) {
        InputStager<T, Tile, kLayout>(a, place, tiles, shared_floats).run();
      } else {
        OutputStager<T, Tile, kLayout>(a, place, tiles, shared_floats).run();
      }
    });
    return;
  }

  const int lane = threadIdx.x % Tile::kLanes;  // among the threads of a channel
  const int turn = lane % kC;
  const int base = (static_cast<int>(threadIdx.x) - Tile::kStage) / Tile::kLanes * kC;
  const int first_state = a.first_state + lane * kS;
  const auto channel = [&](int j) { return base + (j ^ turn); };
  const auto exists = [&](int j, int s) {
    return channel(j) < place.channels && first_state + s < a.states;
  };
  const auto state_at = [&](const StateView& view, int j, int s) {
    return segment.sequence * view.sequence + (place.channel + channel(j)) * view.channel +
           (first_state + s) * view.state;
  };
  float A[kC][kS], h[kC][kS];
#pragma unroll
  for (int j = 0; j < kC; ++j) {
#pragma unroll
    for (int s = 0; s < kS; ++s) {
      A[j][s] = 0;
      h[j][s] = 0;
      if (!exists(j, s)) continue;
      A[j][s] = a.A[(place.channel + channel(j)) * a.A_channel + (first_state + s) * a.A_state];
      if (a.initial_state.data != nullptr) {
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
          a.kept
              .data[(row * a.states + first_state + s) * a.channels + place.channel + channel(j)] =
              h[j][s];
        }
      }
    }
  };
  const float* states = shared_floats;
  const float* inputs = states + 2 * kT * Tile::kStatePitch;
  float* outputs = shared_floats + 2 * kT * (Tile::kStatePitch + Tile::kPitch);
  states += lane * 4;
  inputs += base * 2;
  outputs += channel(0) / 4 * Tile::kQuadPitch + channel(0) % 4 * Tile::kParts + lane / kC;
  __syncthreads();
  // After this step the state is kept next.
  int64_t next_kept = a.kept.data != nullptr ? segment.begin + a.kept.spacing : -1;
#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    if (segment.first + int64_t{i} * kT == next_kept) {
      keep(next_kept);
      next_kept += a.kept.spacing;
    }
    const float* x = inputs + (i & 1) * kT * Tile::kPitch;
    const float* bc = states + (i & 1) * kT * Tile::kStatePitch;
    float* y = outputs + (i & 1) * kT * Tile::kSumPitch;
    StepValues<Tile> now(x, bc, turn, 0);
#pragma unroll
    for (int k = 0; k < kT; ++k) {
      StepValues<Tile> next;  // asked for ahead of this step's stores
      if (k + 1 < kT) next = StepValues<Tile>(x, bc, turn, k + 1);
      float sum[kC];
#pragma unroll
      for (int j = 0; j < kC; ++j) {
#pragma unroll
        for (int s = 0; s < kS; ++s) {
          const float decay = power<T>(now.x[j].x, A[j][s]);
          h[j][s] = fmaf(decay, h[j][s], now.x[j].y * now.B[s]);
          sum[j] = s == 0 ? h[j][s] * now.C[s] : fmaf(h[j][s], now.C[s], sum[j]);
        }
      }
#pragma unroll
      for (int half = kC / 2; half > 0; half /= 2) {
#pragma unroll
        for (int j = 0; j < half; ++j) {
          sum[j] += __shfl_xor_sync(0xffffffffu, sum[j + half], half);
        }
      }
      y[k * Tile::kSumPitch] = sum[0];
      now = next;
    }
    __syncthreads();
  }
  if (a.kept.data != nullptr && a.kept.rows_per_batch >= 0 && segment.end > segment.begin &&
      (segment.end - segment.begin) % a.kept.spacing == 0) {
    keep(segment.end);
  }
  if (a.last_state.data == nullptr) return;
#pragma unroll
  for (int j = 0; j < kC; ++j) {
#pragma unroll
    for (int s = 0; s < kS; ++s) {
      if (exists(j, s)) {
        static_cast<float*>(a.last_state.data)[state_at(a.last_state, j, s)] = h[j][s];
      }
    }
  }
}

}  // namespace fk::cuda
