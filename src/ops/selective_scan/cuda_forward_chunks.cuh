// The scan of few channels: time is cut among the threads of a warp as well.
//
// Floor: per (step, channel) N exponentials on units that make 16 a clock and multiprocessor, 4
// more for softplus and silu; and about 9 instructions a state and step, 4 a clock.
//
// A scanning warp takes four channels and kS states of a tile of 8 kK steps; of its threads each
// takes kK steps of a channel, a chunk. For one state after another a thread makes the decays and
// inputs of its steps, which stay in registers, and what they make of a state of 0; the eight
// chunks of a channel are joined by shuffles, and each is walked once more from the state that
// enters it. The decay over a chunk is the power of the sum of its time steps.
//
// Other warps bring inputs and take outputs (cuda_forward_chunks_stage.cuh). One barrier a tile:
// between two of them tile i is scanned, tile i + 1 put into shared memory, y of tile i - 1 taken
// from it, and the inputs of tile i + 2 asked for. For sm_90, whose warps can hand registers over
// to others: those that scan hold the five numbers of each of their kK steps.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/launch.h"
#include "cuda/wgmma.cuh"
#include "ops/selective_scan/cuda_forward_chunks_stage.cuh"

namespace fk::cuda {

// kTogether: states that a thread works on at once.
template <int kStepsOfThread, int kStatesAtOnce, int kChannelsOfBlock>
struct ChunkTile {
  static constexpr int kK = kStepsOfThread, kS = 4, kTogether = kStatesAtOnce;
  static constexpr int kChunks = 8, kT = kChunks * kK;
  static constexpr int kStates = 16, kParts = kStates / kS;  // sums that y comes in
  static constexpr int kChannels = kChannelsOfBlock, kQuads = kChannels / 4;
  // Threads that scan, that bring inputs, as many that take outputs, and those for B and C.
  static constexpr int kScanThreads = 32 * kParts * kQuads, kUnitThreads = 32 * kQuads;
  static constexpr int kStateThreads = 64;
  static constexpr int kThreads = kScanThreads + 2 * kUnitThreads + kStateThreads;
  // Registers of a thread that scans, and of the others: as many together as without the exchange.
  static constexpr bool kExchanges = kThreads == 640;
  static constexpr int kScanRegisters = 104, kStageRegisters = 80;
  static constexpr int kUnits = kT / 32;  // of four elements each that a thread brings of a tile
  static constexpr int kStateUnits = kT / 8;  // of four states each, of B or C
  // In floats, spread over the banks.
  static constexpr int kChunkPitch = kK + 4;
  static constexpr int kRow = kChunks * kChunkPitch;         // the steps of a state
  static constexpr int kChannelPitch = kRow + 8;             // the steps of a channel
  static constexpr int kQuadPitch = 4 * kChannelPitch + 12;  // of four
  static constexpr int kStateFloats = 2 * kStates * kRow + 32;
  static constexpr int kFloats = kQuads * kQuadPitch;  // one number of each (step, channel)
  static constexpr int kSharedBytes =
      4 * (2 * (kStateFloats + (2 + kParts) * kFloats) + 2 * kStates * kChannels);
  static_assert(kK % 8 == 0 && kS % kTogether == 0 && kParts % 4 == 0 && kChannels % 4 == 0);

  __device__ __forceinline__ static int step_at(int step) {
    return step / kK * kChunkPitch + step % kK;
  }
  __device__ __forceinline__ static int channel_at(int channel) {
    return channel / 4 * kQuadPitch + channel % 4 * kChannelPitch;
  }
  // B's states, then C's.
  __host__ __device__ static constexpr int state_at(int n) { return n * kRow + n / 4 * 4; }
};

// The decays over kSteps steps for one state. For float, one instruction each would be off to the
// same side step after step, which adds up: so a piece of four steps has its exact decay as well,
// and a state that was walked through it is put right by `add` times the state before it.
template <class T, int kSteps>
struct Decays {
  static constexpr int kPiece = 4;
  static constexpr bool kExact = std::is_same_v<T, float>;
  float step[kSteps], add[kExact ? kSteps / kPiece : 1];

  Decays() = default;
  __device__ __forceinline__ Decays(const float (&dt)[kSteps], float A) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) step[k] = kExact ? exp2_fast(dt[k] * A) : power<T>(dt[k], A);
    if constexpr (kExact) {
#pragma unroll
      for (int k = 0; k < kSteps; k += kPiece) {
        const float time = (dt[k] + dt[k + 1]) + (dt[k + 2] + dt[k + 3]);
        const float exact = power<T>(time, A);
        const float made = (step[k] * step[k + 1]) * (step[k + 2] * step[k + 3]);
        add[k / kPiece] = exact == made ? 0.f : exact - made;  // of two infinities as well
      }
    }
  }
  // Takes the state `h` through step k, `before` being the state before its piece.
  __device__ __forceinline__ void walk(int k, float added, float& h, float& before) const {
    if (k % kPiece == 0) before = h;
    h = fmaf(step[k], h, added);
    if (kExact && k % kPiece == kPiece - 1) h = fmaf(add[k / kPiece], before, h);
  }
};

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    scan_chunks([[maybe_unused]] const __grid_constant__ ScanArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kK = Tile::kK, kS = Tile::kS, kN = Tile::kTogether;
  constexpr unsigned kAll = 0xffffffffu;
  extern __shared__ __align__(16) float shared_floats[];
  __shared__ Place shared_place;  // for what comes after the loop
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const Place place = Place::of_block(a, Tile::kChannels);
  const Segment& segment = place.segment;
  if (threadIdx.x == 0) shared_place = place;
  // All threads agree, here and below; asked this way, the compiler knows, and shuffles are plain.
  if (!__any_sync(kAll, segment.exists)) return;
  const ChunkSteps steps = ChunkSteps::of<Tile>(segment);
  const ChunkMemory<Tile> memory(shared_floats);
  if (threadIdx.x >= Tile::kScanThreads) {
    if constexpr (Tile::kExchanges) give_registers<Tile::kStageRegisters>();
    if (threadIdx.x >= Tile::kScanThreads + 2 * Tile::kUnitThreads) {
      StateStager<T, Tile>(a, place, steps, memory).run();
      return;
    }
    with_layout(a, place, [&](auto layout) {
      UnitStager<T, Tile, decltype(layout)::value> stager(a, place, steps, memory);
      if (threadIdx.x < Tile::kScanThreads + Tile::kUnitThreads) {
        stager.run_inputs(place);
      } else {
        stager.run_outputs(place);
      }
    });
    return;
  }
  if constexpr (Tile::kExchanges) take_registers<Tile::kScanRegisters>();

  const int part = threadIdx.x / 32 % Tile::kParts;
  const int chunk = threadIdx.x % 32 / 4;
  const int channel = threadIdx.x / (32 * Tile::kParts) * 4 + threadIdx.x % 4;
  const bool exists = channel < place.channels;
  // So that all warps skip the same ones where there are fewer states.
  const auto state_of = [&](int s) { return s * Tile::kParts + part; };
  const auto state_at = [&](const Place& at, const StateView& view, int n) {
    return at.segment.sequence * view.sequence + (at.channel + channel) * view.channel +
           n * view.state;
  };
  if (chunk < kS) {
    const int n = state_of(chunk);
    float A = 0, h = 0;
    if (exists && n < a.states) {
      A = a.A[(place.channel + channel) * a.A_channel + n * a.A_state];
      if (a.initial_state.data != nullptr) {
        h = load_either<T>(a.initial_state.data, a.initial_state.is_float,
                           state_at(place, a.initial_state, n));
      }
    }
    memory.A[n * Tile::kChannels + channel] = A;
    memory.carried[n * Tile::kChannels + channel] = h;
  }
  const int within = Tile::channel_at(channel) + chunk * Tile::kChunkPitch;
  __syncthreads();
#pragma unroll 1
  for (int i = 0; __any_sync(kAll, i < steps.tiles); ++i) {
    float dt[kK], input[kK], y[kK];
    load_fours(memory.times + (i & 1) * Tile::kFloats + within, dt);
    load_fours(memory.inputs + (i & 1) * Tile::kFloats + within, input);
    float time = dt[0];
#pragma unroll
    for (int k = 1; k < kK; ++k) time += dt[k];
#pragma unroll
    for (int k = 0; k < kK; ++k) y[k] = 0;
    const float* B_at = memory.states + (i & 1) * Tile::kStateFloats + Tile::state_at(part) +
                        chunk * Tile::kChunkPitch;
    int own = part * Tile::kChannels + channel;  // (state, channel)
#pragma unroll 1
    for (int first = 0; first < min(a.states, Tile::kStates); first += kN * Tile::kParts) {
      float added[kN][kK], h[kN], product[kN], entered[kN];
      Decays<T, kK> decays[kN];
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float A = memory.A[own + n * Tile::kParts * Tile::kChannels];
        load_fours(B_at + Tile::state_at(n * Tile::kParts), added[n]);
        decays[n] = Decays<T, kK>(dt, A);
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
        product[n] = power<T>(time, A);
        entered[n] = memory.carried[own + n * Tile::kParts * Tile::kChannels];
        if (chunk == 0) h[n] = fmaf(product[n], entered[n], h[n]);
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
        if (chunk == Tile::kChunks - 1) {
          memory.carried[own + n * Tile::kParts * Tile::kChannels] = h[n];
        }
        const float before = __shfl_up_sync(kAll, h[n], 4);
        if (chunk > 0) entered[n] = before;
        h[n] = entered[n];
      }
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        float C[kK], before;
        load_fours(B_at + Tile::state_at(n * Tile::kParts) + Tile::state_at(Tile::kStates), C);
#pragma unroll
        for (int k = 0; k < kK; ++k) {
          decays[n].walk(k, added[n][k], h[n], before);
          y[k] = fmaf(h[n], C[k], y[k]);
        }
      }
      B_at += Tile::state_at(kN * Tile::kParts);
      own += kN * Tile::kParts * Tile::kChannels;
    }
    store_fours(memory.sums + ((i & 1) * Tile::kParts + part) * Tile::kFloats + within, y);
    __syncthreads();
  }
  if (a.last_state.data == nullptr || !exists || chunk >= kS || state_of(chunk) >= a.states) return;
  const int n = state_of(chunk);
  static_cast<float*>(a.last_state.data)[state_at(shared_place, a.last_state, n)] =
      memory.carried[n * Tile::kChannels + channel];
#endif
}

using EightTile = ChunkTile<8, 2, 8>;
// Chunks as long as there are registers for.
template <class T>
using TwelveTile = ChunkTile<sizeof(T) == 2 ? 16 : 8, sizeof(T) == 2 ? 1 : 2, 12>;

}  // namespace fk::cuda
