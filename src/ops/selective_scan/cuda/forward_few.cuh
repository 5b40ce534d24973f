// The scan of few channels, sequential in time: two states of a channel a thread.
//
// Floor: per (step, channel) N exponentials on units that make 16 a clock and multiprocessor, 4
// more for softplus and silu. With a channel or two of 16 states a scheduler there is one scanning
// warp for it, which must not wait for its own results: the inputs of four steps are loaded two
// such batches ahead, decays and inputs of the state made one ahead, and what is left to do one
// step after another is a multiply-add.
//
// Other warps bring inputs and take outputs (cuda/forward_few_stage.cuh). One barrier a tile of kT
// steps: while tile i is scanned, tile i + 2 comes, so that loads ahead may cross the barrier, and
// y of tile i - 1 goes. In shared memory each number's steps are side by side, so that a thread
// reads or writes four of them at once.
//
// Where there are too few channels even so, sequences are cut into segments: kStates scans each
// from zero and leaves its last state and the sum of log2(e) dt, from which join_segments has the
// product of the decays; after join_segments, kOutputs scans again from the right states.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/launch.h"
#include "ops/selective_scan/cuda/forward_few_stage.cuh"

namespace fk::cuda {

// Holds four steps of a thread as they come from shared memory.
template <class Tile, ScanPass kPass>
struct RowValues {
  static constexpr int kS = Tile::kS;
  float dt[4], x[4], B[kS][4], C[kS][4];

  RowValues() = default;
  __device__ __forceinline__ RowValues(const float* channel, const float* state) {
    load_four(channel + Tile::kTimes, dt);
    load_four(channel + Tile::kTimes + Tile::kValues, x);
#pragma unroll
    for (int s = 0; s < kS; ++s) {
      load_four(state + 2 * s * Tile::kPitch, B[s]);
      if (kPass == ScanPass::kOutputs) {
        load_four(state + Tile::state_at(Tile::kStates) + 2 * s * Tile::kPitch, C[s]);
      }
    }
  }
};

// Holds all that these steps need and that does not depend on the state before them.
template <class T, class Tile, ScanPass kPass>
struct RowBatch {
  static constexpr int kS = Tile::kS;
  float time, input[kS][4], C[kS][4];
  Decays<T, 4> decays[kS];

  RowBatch() = default;
  __device__ __forceinline__ RowBatch(const RowValues<Tile, kPass>& v, const float (&A)[kS]) {
    if (kPass == ScanPass::kStates) time = (v.dt[0] + v.dt[1]) + (v.dt[2] + v.dt[3]);
#pragma unroll
    for (int s = 0; s < kS; ++s) {
      decays[s] = Decays<T, 4>(v.dt, A[s]);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        input[s][k] = v.x[k] * v.B[s][k];
        C[s][k] = v.C[s][k];
      }
    }
  }
  __device__ __forceinline__ void walk(float (&h)[kS], float (&y)[4]) const {
#pragma unroll
    for (int s = 0; s < kS; ++s) {
      float before;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        decays[s].walk(k, input[s][k], h[s], before);
        if (kPass == ScanPass::kOutputs) y[k] = s == 0 ? h[s] * C[s][k] : fmaf(h[s], C[s][k], y[k]);
      }
    }
  }
};

using FewTile = RowTile<64, 4>;
using SmallTile = RowTile<32, 3>;  // for devices with less shared memory

// Below sm_80 no device has room for FewTile; all of sm_90 have.
template <class Tile>
__host__ __device__ constexpr bool serves(int code) {
  return std::is_same_v<Tile, FewTile> ? code >= 80 : code != 90;
}

template <class T, class Tile, ScanPass kPass>
__global__ void __launch_bounds__(Tile::kThreads, 1) scan_few(const __grid_constant__ ScanArgs a) {
#if defined(__CUDA_ARCH__)
  if constexpr (!serves<Tile>(__CUDA_ARCH__ / 10)) return;
#endif
  constexpr int kS = Tile::kS, kT = Tile::kT, kStage = Tile::template kStage<kPass>;
  extern __shared__ __align__(16) float shared_floats[];

  wait_for_earlier_kernels();
  let_next_kernel_start();
  const BlockChannels place = BlockChannels::of_block(a, a.block_channels);
  const Segment& segment = place.segment;
  if (!segment.exists) return;
  const RowSteps counted = RowSteps::of<Tile>(segment);
  if (threadIdx.x < kStage) {
    // Where three warps scan, the fourth scheduler has most of the others: what each warp does, of
    // four for B and C, four for inputs and four for outputs, the last of which may be idle.
    constexpr uint64_t kRoles = 0x8ba965734210;
    int thread = threadIdx.x;
    if (Tile::kThreads == 512) {
      thread = static_cast<int>(kRoles >> thread / 32 * 4 & 15) * 32 + thread % 32;
    }
    if (thread < Tile::kStateThreads) {
      StateStager<T, Tile>(a, place, counted, shared_floats, thread).run();
      return;
    }
    with_layout(a, place, [&](auto layout) {
      using Stager = UnitStager<T, Tile, decltype(layout)::value>;
      const bool inputs = thread < Tile::kStateThreads + Tile::kUnitThreads;
      const int own = thread - Tile::kStateThreads - (inputs ? 0 : Tile::kUnitThreads);
      if (inputs) {
        Stager(a, place, counted, shared_floats, own, false).run_inputs();
      } else if constexpr (kPass == ScanPass::kOutputs) {
        Stager(a, place, counted, shared_floats, own, true).run_outputs();
      }
    });
    return;
  }

  // Neighbouring threads read the same B and C, those two apart the same dt: a vector of 16 bytes
  // then takes two turns of shared memory instead of four.
  const int lane = threadIdx.x / 2 % Tile::kLanes;  // among the threads of a channel
  const int channel = (static_cast<int>(threadIdx.x) - kStage) / 32 * Tile::kWarpChannels +
                      threadIdx.x / 16 % 2 * 2 + threadIdx.x % 2;
  // A thread's states are such that their rows lie in different banks.
  const int own_state = lane / 2 * 4 + lane % 2;
  const auto state_of = [&](int s) { return a.first_state + own_state + 2 * s; };
  const auto exists = [&](int s) { return channel < place.channels && state_of(s) < a.states; };
  // Returns the index of (slot, channel, state).
  const auto segment_state = [&](int s) {
    return (place.slot * a.channels + place.channel + channel) * a.states + state_of(s);
  };
  const auto state_at = [&](const StateView& view, int s) {
    return segment.sequence * view.sequence + (place.channel + channel) * view.channel +
           state_of(s) * view.state;
  };
  float A[kS], h[kS], time = 0;
#pragma unroll
  for (int s = 0; s < kS; ++s) {
    A[s] = 0;
    h[s] = 0;
    if (!exists(s)) continue;
    A[s] = a.A[(place.channel + channel) * a.A_channel + state_of(s) * a.A_state];
    if (kPass != ScanPass::kOutputs) continue;
    if (a.segment_states != nullptr) {
      h[s] = a.segment_states[segment_state(s)];
    } else if (a.initial_state.data != nullptr) {
      h[s] = load_either<T>(a.initial_state.data, a.initial_state.is_float,
                            state_at(a.initial_state, s));
    }
  }
  // The next state is kept here, and after so many steps if that is before the segment's end.
  const int length = static_cast<int>(segment.last - segment.first);
  float* kept = nullptr;
  int kept_after = -1;
  if (kPass == ScanPass::kOutputs && a.kept.data != nullptr) {
    const int64_t spacing = a.kept.spacing;
    const int64_t before = ceil_div(segment.first - segment.begin, spacing);
    const int64_t nth = before > 0 ? before : 1, row = a.kept.base(a.segments, segment) + nth;
    const int64_t after = segment.begin + nth * spacing - segment.first;
    kept = a.kept.data + (row * a.states + state_of(0)) * a.channels + place.channel + channel;
    if (after < length) kept_after = static_cast<int>(after);
  }
  const auto keep = [&] {
#pragma unroll
    for (int s = 0; s < kS; ++s) {
      if (exists(s)) kept[2 * s * a.channels] = h[s];
    }
    kept += a.states * a.channels;
  };
  using Values = RowValues<Tile, kPass>;
  using Steps = RowBatch<T, Tile, kPass>;
  const float* of_channel = shared_floats + Tile::channel_at(channel);
  const float* of_state = shared_floats + Tile::state_at(own_state);
  float* sums = shared_floats + Tile::kSums + Tile::sum_at(channel) + lane * Tile::kPartPitch;
  __syncthreads();
  Steps steps(Values(of_channel, of_state), A);
  Values next(of_channel + 4, of_state + 4);
#pragma unroll 1
  for (int i = 0; i < counted.tiles; ++i) {
    float* y_at = sums + (i & 1) * Tile::kSumFloats;
    const bool last_buffer = (i + 1) % Tile::kBuffers == 0;
    const int to_next_tile = (last_buffer ? 1 - Tile::kBuffers : 1) * Tile::kInputFloats - kT;
#pragma unroll 1
    for (int first = 0; first < kT; first += Tile::kBetween) {
      if (kPass == ScanPass::kOutputs && i * kT + first == kept_after) {
        keep();
        kept_after = length - kept_after > a.kept.spacing
                         ? kept_after + static_cast<int>(a.kept.spacing)
                         : -1;
      }
#pragma unroll
      for (int k = 0; k < Tile::kBetween; k += 4) {
        // This brings the batch after next, perhaps of the next tile.
        constexpr int kAhead = 8;
        if (k == Tile::kBetween - kAhead) {
          const int more = first + Tile::kBetween < kT ? 0 : to_next_tile;
          of_channel += Tile::kBetween + more;
          of_state += Tile::kBetween + more;
        }
        const int at = k < Tile::kBetween - kAhead ? k + kAhead : k + kAhead - Tile::kBetween;
        const Values after(of_channel + at, of_state + at);
        const Steps following(next, A);
        float y[4];
        steps.walk(h, y);
        if (kPass == ScanPass::kOutputs) {
          store_four(y_at + first + k, y);
        } else {
          time += steps.time;
        }
        steps = following;
        next = after;
      }
    }
    __syncthreads();
  }
  if (kPass == ScanPass::kOutputs && a.kept.data != nullptr && a.kept.rows_per_batch >= 0 &&
      segment.closes && segment.end > segment.begin &&
      (segment.end - segment.begin) % a.kept.spacing == 0) {
    keep();
  }
#pragma unroll
  for (int s = 0; s < kS; ++s) {
    if (!exists(s)) continue;
    if (kPass != ScanPass::kOutputs) {
      a.segment_states[segment_state(s)] = h[s];
    } else if (a.last_state.data != nullptr && segment.closes) {
      static_cast<float*>(a.last_state.data)[state_at(a.last_state, s)] = h[s];
    }
  }
  if (kPass != ScanPass::kOutputs && lane == 0 && channel < place.channels) {
    a.segment_sums[place.slot * a.channels + place.channel + channel] = time;
  }
}

}  // namespace fk::cuda
