// The scan itself, sequential in time with the states in registers.
//
// Floor: per (step, channel) N exponentials on units that make 16 a clock and multiprocessor, 4
// more for softplus and silu; memory traffic of u, delta, z and y is less than half of that for N
// = 16.
//
// Of a block's warps some bring inputs, some take outputs (cuda_forward_stage.cuh), and the others
// scan. A scanning thread holds kS states of kC channels; kLanes threads share the states of a
// channel. One barrier a tile of kT steps: while tile i is scanned, tile i + 1 comes and y of tile
// i - 1 goes.
//
// Where there are too few channels for the device, sequences are cut into segments: kStates scans
// each from zero and leaves its last state and the sum of log2(e) dt, from which join_segments has
// the product of the decays; after join_segments, kOutputs scans again from the right states.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/launch.h"
#include "ops/selective_scan/cuda_forward_stage.cuh"

namespace fk::cuda {

// What a scanning thread reads from shared memory for kBatch steps.
template <class Tile>
struct StepValues {
  float B[Tile::kBatch][Tile::kS], C[Tile::kBatch][Tile::kS];
  float2 x[Tile::kBatch][Tile::kC];

  StepValues() = default;
  // Of the thread's slots j, channel j ^ turn: sums over threads then move whole slots.
  __device__ __forceinline__ StepValues(const float* inputs, const float* states, int turn,
                                        int first) {
#pragma unroll
    for (int m = 0; m < Tile::kBatch; ++m) {
      const int l = first + m;
      const float* at = states + l * Tile::kStatePitch;
      const float4 v = *reinterpret_cast<const float4*>(at);
      if constexpr (Tile::kS == 4) {
        const float4 w = *reinterpret_cast<const float4*>(at + Tile::kStates);
        B[m][0] = v.x, B[m][1] = v.y, B[m][2] = v.z, B[m][3] = v.w;
        C[m][0] = w.x, C[m][1] = w.y, C[m][2] = w.z, C[m][3] = w.w;
      } else {
        B[m][0] = v.x, B[m][1] = v.y;
        C[m][0] = v.z, C[m][1] = v.w;
      }
#pragma unroll
      for (int j = 0; j < Tile::kC; ++j) {
        x[m][j] = *reinterpret_cast<const float2*>(inputs + l * Tile::kPitch + 2 * (j ^ turn));
      }
    }
  }
};

template <class T, class Tile, ScanPass kPass>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    scan_forward(const __grid_constant__ ScanArgs a) {
  constexpr int kC = Tile::kC, kS = Tile::kS, kT = Tile::kT;
  constexpr int kStage = Tile::template kStage<kPass>;
  extern __shared__ __align__(16) float shared_floats[];

  wait_for_earlier_kernels();
  let_next_kernel_start();
  const Place place = Place::of_block(a, Tile::kNarrow ? a.block_channels : Tile::kChannels);
  const Segment& segment = place.segment;
  if (!segment.exists) return;
  const int tiles = static_cast<int>((segment.last - segment.first + kT - 1) / kT);
  if (threadIdx.x < kStage) {
    with_layout(a, place, [&](auto layout) {
      constexpr ScanLayout kLayout = decltype(layout)::value;
      if (threadIdx.x < Tile::kInputs) {
        InputStager<T, Tile, kLayout>(a, place, tiles, shared_floats).run();
      } else if constexpr (kPass == ScanPass::kOutputs) {
        OutputStager<T, Tile, kLayout>(a, place, tiles, shared_floats).run();
      }
    });
    return;
  }

  const int lane = threadIdx.x % Tile::kLanes;  // among the threads of a channel
  const int turn = lane % kC;
  const int base = (static_cast<int>(threadIdx.x) - kStage) / Tile::kLanes * kC;
  const int first_state = a.first_state + lane * kS;
  const auto channel = [&](int j) { return base + (j ^ turn); };
  const auto exists = [&](int j, int s) {
    return channel(j) < place.channels && first_state + s < a.states;
  };
  // (slot, channel, state)
  const auto segment_state = [&](int j, int s) {
    return (place.slot * a.channels + place.channel + channel(j)) * a.states + first_state + s;
  };
  const auto state_at = [&](const StateView& view, int j, int s) {
    return segment.sequence * view.sequence + (place.channel + channel(j)) * view.channel +
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
      A[j][s] = a.A[(place.channel + channel(j)) * a.A_channel + (first_state + s) * a.A_state];
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
  int64_t next_kept = -1;  // the step whose state is kept next
  if (kPass == ScanPass::kOutputs && a.kept.data != nullptr) {
    const int64_t before = (segment.first - segment.begin + a.kept.spacing - 1) / a.kept.spacing;
    next_kept = segment.begin + (before > 0 ? before : 1) * a.kept.spacing;
  }
#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    if (kPass == ScanPass::kOutputs && segment.first + int64_t{i} * kT == next_kept) {
      keep(next_kept);
      next_kept += a.kept.spacing;
    }
    const float* x = inputs + (i & 1) * kT * Tile::kPitch;
    const float* bc = states + (i & 1) * kT * Tile::kStatePitch;
    float* y = outputs + (i & 1) * kT * Tile::kSumPitch;
    StepValues<Tile> batch(x, bc, turn, 0);
#pragma unroll 1
    for (int first = 0; first < kT; first += Tile::kUnrolled) {
#pragma unroll
      for (int k = 0; k < Tile::kUnrolled; k += Tile::kBatch) {
        // The next steps' values are asked for ahead of this batch's stores; past the last, again.
        StepValues<Tile> next;
        if (k + Tile::kBatch < Tile::kUnrolled) {
          next = StepValues<Tile>(x, bc, turn, k + Tile::kBatch);
        } else if (Tile::kUnrolled < kT) {
          const int more = first + Tile::kUnrolled < kT ? Tile::kUnrolled : 0;
          x += more * Tile::kPitch;
          bc += more * Tile::kStatePitch;
          next = StepValues<Tile>(x, bc, turn, 0);
        }
        float sum[Tile::kBatch][kC];
#pragma unroll
        for (int m = 0; m < Tile::kBatch; ++m) {
#pragma unroll
          for (int j = 0; j < kC; ++j) {
            const float2 v = batch.x[m][j];
            if (kPass != ScanPass::kOutputs) sums[j] += v.x;
#pragma unroll
            for (int s = 0; s < kS; ++s) {
              const float decay = power<T>(v.x, A[j][s]);
              h[j][s] = fmaf(decay, h[j][s], v.y * batch.B[m][s]);
              sum[m][j] =
                  s == 0 ? h[j][s] * batch.C[m][s] : fmaf(h[j][s], batch.C[m][s], sum[m][j]);
            }
          }
        }
        if (kPass == ScanPass::kOutputs) {
#pragma unroll
          for (int m = 0; m < Tile::kBatch; ++m) {
#pragma unroll
            for (int half = kC / 2; half > 0; half /= 2) {
#pragma unroll
              for (int j = 0; j < half; ++j) {
                sum[m][j] += __shfl_xor_sync(0xffffffffu, sum[m][j + half], half);
              }
            }
            y[(k + m) * Tile::kSumPitch] = sum[m][0];
          }
        }
        batch = next;
      }
      y += Tile::kUnrolled * Tile::kSumPitch;
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
    if (kPass != ScanPass::kOutputs && lane == 0 && channel(j) < place.channels) {
      a.segment_sums[place.slot * a.channels + place.channel + channel(j)] = sums[j];
    }
  }
}

// Four blocks a multiprocessor, which do not wait for each other.
using ManyTile = ForwardTile<2, 4, 4, 2, 2, 2, 16, 1, 16, 1, 4, false>;
// Short sequences: the code is run once or twice, so that little of it is faster.
using FewTile = ForwardTile<1, 2, 8, 4, 4, 4, 32, 4, 8, 1, 1, true>;
template <class T>
using LongTile = ForwardTile<1, 2, 8, 4, 4, 4, 64, 4, sizeof(T) == 2 ? 64 : 8, 1, 1, true>;
// A value of B or C serves four channels.
using WideTile = ForwardTile<4, 4, 16, 4, 2, 2, 8, 1, 8, 1, 2, true>;

}  // namespace fk::cuda
