// The second launch of ssd's backward for whole vectors: what each chunk begins with, and the
// gradient of what it ends with.
//
//   h_next  = decay h  + sum over s of weight_s x_s B_s^T   from a sequence's first chunk on
//   dh_prev = decay dh + sum over t of grown_t dy_t C_t^T   from its last chunk back
//
// A block of four warps walks the chunks of one sequence and head in one direction, with all states
// of 64 channels in registers, as the forward does without outputs. While it multiplies one chunk,
// the next one is copied. Before each chunk the states are stored, rounded, as rows of channels.
#pragma once

#include "ops/ssd/cuda/backward.h"
#include "ops/ssd/cuda/prepared.cuh"
#include "ops/ssd/cuda/states.cuh"

namespace fk::cuda::ssd {

// The tiles of the backward for whole vectors.
template <class T_, int kStates_>
struct VectorTile {
  using T = T_;
  static constexpr int kStates = kStates_;
  using ChannelsTile = Tile<T, 64, 64>;
  using StatesTile = Tile<T, 64, kStates>;
  static constexpr int kStageBytes = ChannelsTile::kBytes + StatesTile::kBytes;
  static constexpr int kWalkBytes = 2 * (kStageBytes + static_cast<int>(sizeof(ChunkDecays)));
};

// Zeros the columns of a tile of states that no copy fills. `thread` counts from 0 to 127.
template <class StatesTile, int kStates>
__device__ __forceinline__ void clear_missing_states(uint32_t tile, int rows, int states,
                                                     int thread) {
  constexpr int kRow = kStates / 8;
  if (states == kStates || thread % kRow * 8 < states) return;
#pragma unroll 1
  for (int row = thread / kRow; row < rows; row += 128 / kRow) {
    store_shared(tile + row * StatesTile::kPitch + thread % kRow * 16, make_uint4(0, 0, 0, 0));
  }
}

// Stores a warp's states, rounded: `to` is its first channel. Neighbouring lanes swap, so that one
// has four neighbours of the first eight states and the other four of the last.
template <class T, int kStates>
__device__ __forceinline__ void store_rounded(const WarpState<T, kStates>& state, T* to, int states,
                                              int pitch) {
  const int lane = threadIdx.x % 32;
  const bool even = lane % 2 == 0;
  T* const row = to + lane / 4 * pitch + (even ? lane % 4 * 2 : 8 + (lane % 4 - 1) * 2);
  const int left = states - (even ? 0 : 8);
#pragma unroll
  for (int n = 0; n < kStates; n += 16) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float(&first)[4] = state.h[n / 8];
      const float(&last)[4] = state.h[n / 8 + 1];
      const uint32_t low = pack_pair<T>(first[2 * r], first[2 * r + 1]);
      const uint32_t high = pack_pair<T>(last[2 * r], last[2 * r + 1]);
      const uint32_t other = __shfl_xor_sync(0xffffffffu, even ? high : low, 1);
      if (n < left) {
        *reinterpret_cast<uint2*>(row + r * 8 * pitch + n) =
            even ? make_uint2(low, other) : make_uint2(other, high);
      }
    }
  }
}

template <class Tile>
__global__ void __launch_bounds__(128, 3) keep_states(const __grid_constant__ BackwardArguments a) {
  using T = typename Tile::T;
  using ChannelsTile = typename Tile::ChannelsTile;
  using StatesTile = typename Tile::StatesTile;
  constexpr int kStates = Tile::kStates, kStage = Tile::kStageBytes;
  if constexpr (kTakesVectors<T>) {
    extern __shared__ __align__(16) char shared[];
    const Inputs& in = a.in;
    int64_t block = block_index();
    const int64_t walk = divide_likely_small(block, in.heads);
    const int head = static_cast<int>(block - walk * in.heads), group = in.group(head);
    const bool back = walk % 2 != 0;
    const int64_t sequence = walk / 2;
    if (sequence >= a.chunks.sequences.count) return;
    const int warp = threadIdx.x / 32;
    const SequenceSteps whole = a.chunks.sequences[sequence];
    const int64_t slot = a.chunks.first_slot(sequence);
    const int chunks = static_cast<int>(a.chunks.count_of(sequence));
    const int chunk_steps = static_cast<int>(a.chunks.steps);
    const int length = static_cast<int>(whole.end - whole.begin);
    const int moves = back && a.dinitial_state.data != nullptr ? chunks : chunks - 1;
    const auto at = [&](int i) { return back ? chunks - 1 - i : i; };

    const uint32_t base = shared_address(shared);
    constexpr int kRow = kStates / 8;
    const uint32_t x_to = threadIdx.x / 8 * ChannelsTile::kPitch + threadIdx.x % 8 * 16;
    const uint32_t B_to =
        ChannelsTile::kBytes + threadIdx.x / kRow * StatesTile::kPitch + threadIdx.x % kRow * 16;
    const ChunkRows<T, 64> x(back ? a.dy : in.x, whole.batch, whole.begin, head, 0, 64,
                             threadIdx.x);
    const ChunkRows<T, kStates> B(back ? in.C : in.B, whole.batch, whole.begin, group, 0, in.states,
                                  threadIdx.x);
    const char* const decays = reinterpret_cast<const char*>(
        static_cast<const ChunkDecays*>(a.decays) + slot * in.heads + head);
    const auto decays_of = [&](int i) {
      return shared + 2 * kStage + i % 2 * static_cast<int>(sizeof(ChunkDecays));
    };
    const auto copy = [&](int i) {
      const int count = min(length - at(i) * chunk_steps, chunk_steps);
      const int64_t step = int64_t{at(i)} * chunk_steps;
      const uint32_t to = base + i % 2 * kStage;
      copy_rows<64>(to + x_to, x.at + step * x.row_bytes, x.row_bytes, count, true, threadIdx.x);
      copy_rows<kStates>(to + B_to, B.at + step * B.row_bytes, B.row_bytes, count, B.wanted,
                         threadIdx.x);
      if (threadIdx.x < sizeof(ChunkDecays) / 16) {
        copy_16_bytes(shared_address(decays_of(i)) + threadIdx.x * 16,
                      decays + int64_t{at(i)} * in.heads * sizeof(ChunkDecays) + threadIdx.x * 16,
                      true);
      }
      copies_commit();
    };
    for (int stage = 0; stage < 2; ++stage) {
      clear_missing_states<StatesTile, kStates>(base + stage * kStage + ChannelsTile::kBytes, 64,
                                                in.states, threadIdx.x);
    }
    if (length > 0 && moves > 0) copy(0);
    WarpState<T, kStates> state;
    const WarpChannels own{head, warp * 16};
    state.clear();
    const View& given = back ? a.dfinal_state : in.initial_state;
    if (given.data != nullptr) state.load(in, given, sequence, own);
    T* const kept = static_cast<T*>(back ? a.dstates : a.states);
#pragma unroll 1
    for (int i = 0; i < chunks; ++i) {
      store_rounded(state, kept + a.state_at(slot + at(i), head) + warp * 16 * a.state_pitch,
                    in.states, a.state_pitch);
      if (length == 0 || i >= moves) break;
      copies_wait<0>();
      __syncthreads();
      if (i + 1 < moves) copy(i + 1);
      const ChunkDecays& decay = *reinterpret_cast<const ChunkDecays*>(decays_of(i));
      const float* const factors = back ? decay.grown : decay.weight;
      const uint32_t stage = base + i % 2 * kStage;
      const ChannelsTile x_tile{stage};
      const StatesTile B_tile{stage + ChannelsTile::kBytes};
      state.scale(decay.whole);
#pragma unroll
      for (int s = 0; s < 64; s += 16) {
        const Fragment<T> weighted = scale_columns(x_tile.left_turned(s, warp * 16), factors + s);
#pragma unroll
        for (int n = 0; n < kStates; n += 16) {
          multiply(state.h[n / 8], state.h[n / 8 + 1], weighted, B_tile.right_turned(s, n));
        }
      }
    }
    if (back && a.dinitial_state.data != nullptr) state.store(in, a.dinitial_state, sequence, own);
  }
}

}  // namespace fk::cuda::ssd
