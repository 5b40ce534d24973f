// The scan of few channels over a tile or less: time is cut among the threads of a warp as well, so
// that little is done one after another.
//
// Floor: that of a launch and of two ways to memory and back. Per (step, channel) it takes N
// exponentials and about 9 instructions a state.
//
// A warp takes four channels and a quarter of the states; of its threads each takes kK steps of a
// channel, a chunk. For two states after another a thread makes the decays and inputs of its steps,
// which stay in registers, and what they make of a state of 0; the eight chunks of a channel are
// joined by shuffles, and each is walked once more from the state that enters it. The decay over a
// chunk is the power of the sum of its time steps. Half of the threads bring u and delta before
// that, the other half B and C, and take y after it.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/launch.h"
#include "ops/selective_scan/cuda/forward_few_stage.cuh"

namespace fk::cuda {

struct ShortTile {
  static constexpr int kK = 8, kChunks = 8, kT = kChunks * kK, kBetween = kK;
  static constexpr int kStates = 16, kTogether = 2, kS = 4, kParts = kStates / kS;
  static constexpr int kChannels = 8, kWarpChannels = kChannels;
  static constexpr int kUnits = 1, kUnitThreads = 128, kStateThreads = 128, kThreads = 256;
  // Pitches count floats, and spread rows over the banks.
  static constexpr int kChunkPitch = kK + 4;
  static constexpr int kStatePitch = kChunks * kChunkPitch;
  static constexpr int kPitch = kStatePitch + 8, kSumPitch = kPitch;  // of a channel
  static constexpr int kQuadPitch = 4 * kPitch + 12;                  // of four
  static constexpr int kTimes = 2 * kStates * kStatePitch + 32, kValues = 2 * kQuadPitch;
  static constexpr int kBuffers = 1, kInputFloats = kTimes + 2 * kValues, kSums = kInputFloats;
  static constexpr int kPartPitch = kValues, kSumFloats = kParts * kPartPitch;
  static constexpr int kSharedBytes = 4 * (kSums + kSumFloats);

  __host__ __device__ static constexpr int step_at(int step) {
    return step / kK * kChunkPitch + step % kK;
  }
  // B's states come first, then C's.
  __host__ __device__ static constexpr int state_at(int n) { return n * kStatePitch + n / 4 * 4; }
  __device__ __forceinline__ static int channel_at(int channel) {
    return channel / 4 * kQuadPitch + channel % 4 * kPitch;
  }
  __device__ __forceinline__ static int sum_at(int channel) { return channel_at(channel); }
};

// Loads kCount floats that lie side by side.
template <int kCount>
__device__ __forceinline__ void load_fours(const float* from, float (&to)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; k += 4) {
    const float4 v = *reinterpret_cast<const float4*>(from + k);
    to[k] = v.x, to[k + 1] = v.y, to[k + 2] = v.z, to[k + 3] = v.w;
  }
}

template <int kCount>
__device__ __forceinline__ void store_fours(float* to, const float (&from)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; k += 4) {
    *reinterpret_cast<float4*>(to + k) =
        make_float4(from[k], from[k + 1], from[k + 2], from[k + 3]);
  }
}

template <class T>
__global__ void __launch_bounds__(ShortTile::kThreads)
    scan_short(const __grid_constant__ ScanArgs a) {
  using Tile = ShortTile;
  constexpr int kK = Tile::kK, kN = Tile::kTogether;
  constexpr unsigned kAll = 0xffffffffu;
  extern __shared__ __align__(16) float shared_floats[];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const BlockChannels place = BlockChannels::of_block(a, Tile::kChannels);
  const Segment& segment = place.segment;
  // All threads agree; asked this way, the compiler knows, and shuffles are plain.
  if (!__any_sync(kAll, segment.exists)) return;
  const RowSteps steps = {1, static_cast<int>(segment.last - segment.first)};
  const int own = threadIdx.x % Tile::kUnitThreads;
  const bool takes = threadIdx.x >= Tile::kUnitThreads && a.y.data != nullptr;

  const int part = threadIdx.x / 32 % Tile::kParts;
  const int chunk = threadIdx.x % 32 / 4;
  const int channel = threadIdx.x / (32 * Tile::kParts) * 4 + threadIdx.x % 4;
  // States are taken so that all warps skip the same ones where there are fewer.
  const auto state_of = [&](int s) { return s * Tile::kParts + part; };
  const auto exists = [&](int s) { return channel < place.channels && state_of(s) < a.states; };
  const auto state_at = [&](const StateView& view, int s) {
    return segment.sequence * view.sequence + (place.channel + channel) * view.channel +
           state_of(s) * view.state;
  };
  HeldUnits<T, 1> held;  // for y
  with_layout(a, place, [&](auto layout) {
    UnitStager<T, Tile, decltype(layout)::value> units(a, place, steps, shared_floats, own, takes);
    if (threadIdx.x < Tile::kUnitThreads) {
      units.ask_inputs(0, held);
      units.put_inputs(0, held);
    } else {
      StateStager<T, Tile> states(a, place, steps, shared_floats, own);
      states.ask(0, states.held[0]);
      if (takes) units.ask_outputs(0, held);
      states.put(0, states.held[0]);
    }
  });
  float A[Tile::kS], first[Tile::kS];  // the state before the first chunk
#pragma unroll
  for (int s = 0; s < Tile::kS; ++s) {
    A[s] = 0;
    first[s] = 0;
    if (!exists(s)) continue;
    A[s] = a.A[(place.channel + channel) * a.A_channel + state_of(s) * a.A_state];
    if (chunk == 0 && a.initial_state.data != nullptr) {
      first[s] = load_either<T>(a.initial_state.data, a.initial_state.is_float,
                                state_at(a.initial_state, s));
    }
  }
  const int within = Tile::channel_at(channel) + chunk * Tile::kChunkPitch;
  __syncthreads();
  float dt[kK], input[kK], y[kK], time = 0;
  load_fours(shared_floats + Tile::kTimes + within, dt);
  load_fours(shared_floats + Tile::kTimes + Tile::kValues + within, input);
#pragma unroll
  for (int k = 0; k < kK; ++k) {
    time += dt[k];
    y[k] = 0;
  }
  // These are the steps up to the end of the chunk, and whether the state then is one that is kept,
  // or the last.
  const int after = (chunk + 1) * kK;
  const bool keeps =
      a.kept.data != nullptr && after <= steps.last_steps && after % a.kept.spacing == 0;
  const bool closes = a.last_state.data != nullptr && chunk == Tile::kChunks - 1;
#pragma unroll
  for (int s = 0; s < Tile::kS; s += kN) {
    if (s * Tile::kParts >= a.states) break;
    const float* B_at = shared_floats + Tile::state_at(part) + chunk * Tile::kChunkPitch;
    float added[kN][kK], h[kN], product[kN], entered[kN];
    Decays<T, kK> decays[kN];
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      load_fours(B_at + Tile::state_at((s + n) * Tile::kParts), added[n]);
      decays[n] = Decays<T, kK>(dt, A[s + n]);
      float before = 0;
      h[n] = 0;
#pragma unroll
      for (int k = 0; k < kK; ++k) {
        added[n][k] *= input[k];
        if (k == 0) {
          h[n] = added[n][0];
        } else {
          decays[n].walk(k, added[n][k], h[n], before);
        }
      }
      product[n] = power<T>(time, A[s + n]);
      if (chunk == 0) h[n] = fmaf(product[n], first[s + n], h[n]);
    }
#pragma unroll
    for (int away = 1; away < Tile::kChunks; away *= 2) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float before = __shfl_up_sync(kAll, h[n], 4 * away);
        const float decay_before =
            2 * away < Tile::kChunks ? __shfl_up_sync(kAll, product[n], 4 * away) : 0.f;
        if (chunk >= away) h[n] = fmaf(product[n], before, h[n]);
        product[n] *= decay_before;
      }
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      if (exists(s + n)) {
        const int state = state_of(s + n);
        if (keeps) {
          const int64_t row = a.kept.base(a.segments, segment) + after / a.kept.spacing;
          a.kept.data[(row * a.states + state) * a.channels + place.channel + channel] = h[n];
        }
        if (closes) {
          static_cast<float*>(a.last_state.data)[state_at(a.last_state, s + n)] = h[n];
        }
      }
      const float before = __shfl_up_sync(kAll, h[n], 4);
      entered[n] = chunk > 0 ? before : first[s + n];
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float C[kK], before;
      load_fours(B_at + Tile::state_at((s + n) * Tile::kParts) + Tile::state_at(Tile::kStates), C);
#pragma unroll
      for (int k = 0; k < kK; ++k) {
        decays[n].walk(k, added[n][k], entered[n], before);
        y[k] = fmaf(entered[n], C[k], y[k]);
      }
    }
  }
  store_fours(shared_floats + Tile::kSums + part * Tile::kPartPitch + within, y);
  __syncthreads();
  if (!takes) return;
  with_layout(a, place, [&](auto layout) {
    UnitStager<T, Tile, decltype(layout)::value>(a, place, steps, shared_floats, own, true)
        .put_outputs(0, held);
  });
}

}  // namespace fk::cuda
