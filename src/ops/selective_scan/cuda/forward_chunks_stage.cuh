// What the scan in chunks (cuda/forward_chunks.cuh) keeps in shared memory, and who brings it
// there.
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/launch.h"
#include "cuda/tma.cuh"
#include "ops/selective_scan/cuda/forward_stage.cuh"

namespace fk::cuda {

struct ChunkTile {
  static constexpr int kK = 16;                             // steps of a chunk
  static constexpr int kChannels = 24, kWarpChannels = 24;  // of a block
  static constexpr int kChunks = 16, kT = kChunks * kK;     // of a tile
  static constexpr int kStates = 16, kBetween = kK;
  static constexpr int kTurns = 2;   // blocks that take turns with a sequence
  static constexpr int kStages = 3;  // tiles at a time
  static constexpr int kScan = kChannels * kChunks, kChain = 64, kLoad = 64;  // threads
  static constexpr int kThreads = kScan + kChain + kLoad;
  // u, delta and z as the copy engine puts them: steps of all channels, or, where time is
  // contiguous, columns of 64 steps of all channels, rows of 128 bytes with the pieces swizzled.
  static constexpr int kTensorBytes = 2 * kT * kChannels, kStepBytes = 2 * kChannels;
  static constexpr int kColumn = 64, kColumnBytes = 2 * kColumn * kChannels;

  // B and C of a state: 4 floats more every 64 steps, half a turn off, so that any four chunks one
  // after another lie in different banks.
  static constexpr int kStatePitch = kT + kT / 16;
  __host__ __device__ static constexpr int state_at(int step) {
    return step + (step + 32) / 64 * 4;
  }

  static constexpr int kMadePitch = 2 * kChunks + 4, kEnteredPitch = kChunks + 4;

  struct Stage {
    alignas(1024) unsigned char delta[kTensorBytes], u[kTensorBytes], z[kTensorBytes];
    float B[kStates][kStatePitch], C[kStates][kStatePitch];  // B times ln 2
    uint64_t full, gate, empty;  // barriers: all but z is here, z is, y is
  };
  struct Shared {
    Stage stage[kStages];
    // For a state, `made` is the product of a chunk's decays and what it makes of 0, and `entered`
    // is what enters it.
    float made[2][kChannels][kMadePitch];
    float entered[2][kChannels][kEnteredPitch];
    float A[kStates][kChannels];
    float entering[kStates][kChannels];      // the next tile
    float bias[kChannels], skip[kChannels];  // log2(e) delta_bias, D
    uint64_t ready[2], came[kStates];
  };
  static constexpr int kSharedBytes = sizeof(Shared);
};

// These are u, delta, z and y as (channel, group, step, batch) or (step, channel, group, batch).
struct ChunkMaps {
  CUtensorMap delta, u, z, y;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// A block takes every kTurns-th tile of a sequence.
struct ChunkTurns {
  int first, steps;  // the first tile; of the sequence
  int tiles, count;  // of the sequence, of this block

  __device__ __forceinline__ explicit ChunkTurns(const ScanArgs& a) {
    first = static_cast<int>(blockIdx.z);
    steps = static_cast<int>(a.length);
    tiles = ceil_div(steps, ChunkTile::kT);
    count = ceil_div(tiles - first, ChunkTile::kTurns);
  }
  __device__ __forceinline__ int tile(int turn) const { return turn * ChunkTile::kTurns + first; }
};

// Returns a block's channels. Sequences are neither packed nor cut; blocks of channels go along x,
// groups and batches along y.
__device__ __forceinline__ BlockChannels chunk_channels(const ScanArgs& a) {
  BlockChannels p;
  p.block = static_cast<int>(blockIdx.x);
  p.group = 0;
  unsigned batch = blockIdx.y;
  if (a.groups > 1) {
    p.group = static_cast<int>(batch % a.groups);
    batch /= a.groups;
  }
  p.slot = batch;
  p.segment = {batch, batch, 0, a.length, 0, a.length, true, true, true};
  const int per_group = a.group_channels, within = p.block * ChunkTile::kChannels;
  p.channel = p.group * per_group + within;
  p.channels = min(per_group - within, ChunkTile::kChannels);
  return p;
}

// Some threads bring inputs and take y: one of them has the copy engine do it, and all bring B and
// C.
template <class T, bool kTime>
struct ChunkLoader {
  using Tile = ChunkTile;
  const ScanArgs& a;
  const ChunkMaps& maps;
  const BlockChannels& place;
  const ChunkTurns& turns;
  Tile::Shared& s;
  const int thread;

  // Calls copy(at, coordinates) for all pieces of a tensor's tile.
  template <class Copy>
  __device__ __forceinline__ void for_pieces(int tile, const Copy& copy) const {
    const int step = tile * Tile::kT, batch = static_cast<int>(place.segment.batch);
    const int channel = place.block * Tile::kChannels;
    if constexpr (kTime) {
#pragma unroll
      for (int k = 0; k < Tile::kT / Tile::kColumn; ++k) {
        copy(k * Tile::kColumnBytes, step + k * Tile::kColumn, channel, place.group, batch);
      }
    } else {
      copy(0, channel, place.group, step, batch);
    }
  }
  __device__ __forceinline__ void take(int i) const {
    const unsigned char* y = s.stage[i % Tile::kStages].z;
    for_pieces(turns.tile(i), [&](int at, int c0, int c1, int c2, int c3) {
      tensor_store(&maps.y, y + at, c0, c1, c2, c3);
    });
    bulk_commit();
    bulk_wait_read<0>();
  }
  __device__ __forceinline__ void bring_tensors(int i) const {
    Tile::Stage& stage = s.stage[i % Tile::kStages];
    const bool gate = a.z.data != nullptr;
    barrier_arrive_expect(&stage.full, 2 * Tile::kTensorBytes);
    for_pieces(turns.tile(i), [&](int at, int c0, int c1, int c2, int c3) {
      tensor_load(stage.delta + at, &maps.delta, &stage.full, c0, c1, c2, c3);
      tensor_load(stage.u + at, &maps.u, &stage.full, c0, c1, c2, c3);
    });
    if (!gate) return;
    barrier_arrive_expect(&stage.gate, Tile::kTensorBytes);
    for_pieces(turns.tile(i), [&](int at, int c0, int c1, int c2, int c3) {
      tensor_load(stage.z + at, &maps.z, &stage.gate, c0, c1, c2, c3);
    });
  }

  __device__ __forceinline__ const T* states_of(const scan::GroupView& view) const {
    return static_cast<const T*>(view.data) + place.segment.batch * view.batch +
           place.group * view.group;
  }
  // Asks for eight states of one step of B or C. The lanes of a warp have neighbouring steps and
  // the same half of the states.
  __device__ __forceinline__ uint4 ask_states(const T* states, int64_t apart, int step,
                                              int half) const {
    if (step >= turns.steps) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(states + step * apart + 8 * half);
  }
  __device__ __forceinline__ static void put_states(const uint4& v, int step, int half, float scale,
                                                    float* states) {
    Vec<T, 8> eight;
    memcpy(eight.data, &v, sizeof(eight));
    float floats[8];
    unpack(eight, floats);
    float* to = states + half * (8 * Tile::kStatePitch) + Tile::state_at(step);
#pragma unroll
    for (int n = 0; n < 8; ++n) to[n * Tile::kStatePitch] = floats[n] * scale;
  }
  __device__ __forceinline__ void bring_states(int begin, Tile::Stage& stage) const {
    static_assert(Tile::kLoad == 64);
    const int half = thread / 32;
    const T *of_B = states_of(a.B), *of_C = states_of(a.C);
#pragma unroll 1
    for (int step = thread % 32; step < Tile::kT; step += 64) {
      uint4 B[2], C[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        B[k] = ask_states(of_B, a.B.step, begin + step + 32 * k, half);
        C[k] = ask_states(of_C, a.C.step, begin + step + 32 * k, half);
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        put_states(B[k], step + 32 * k, half, kLn2, &stage.B[0][0]);
        put_states(C[k], step + 32 * k, half, 1.f, &stage.C[0][0]);
      }
    }
  }
  __device__ __forceinline__ void run() const {
#pragma unroll 1
    for (int i = 0; i < turns.count + Tile::kStages; ++i) {
      Tile::Stage& stage = s.stage[i % Tile::kStages];
      if (i >= Tile::kStages) {
        barrier_wait(&stage.empty, i / Tile::kStages & 1 ^ 1);
        if (thread == 0) take(i - Tile::kStages);
      }
      if (i < turns.count) {
        if (i > 0) {
          if (thread == 0) bring_tensors(i);
          bring_states(turns.tile(i) * Tile::kT, stage);
        }
        barrier_arrive(&stage.full);
      }
    }
  }
};

// Runs until the first tile is there: while the copy engine brings it, everybody brings its B and C
// and the parameters. Addresses are made before the wait, and all loads are asked for ahead of the
// first use of one.
template <class T, bool kTime, bool kScans>
__device__ __forceinline__ void begin_chunks(const ChunkLoader<T, kTime>& loader, int thread) {
  using Tile = ChunkTile;
  const ScanArgs& a = loader.a;
  const BlockChannels& place = loader.place;
  Tile::Shared& s = loader.s;
  static_assert(Tile::kThreads == 2 * Tile::kT && Tile::kScan == Tile::kChannels * Tile::kStates);
  const int step = thread % Tile::kT, half = thread / Tile::kT;
  const int begin = loader.turns.first * Tile::kT + step;
  const T* of_B = loader.states_of(a.B) + begin * a.B.step + 8 * half;
  const T* of_C = loader.states_of(a.C) + begin * a.C.step + 8 * half;
  const int channel = thread / Tile::kStates, n = thread % Tile::kStates;
  const bool exists = kScans && channel < place.channels;
  const float* of_A = a.A + (place.channel + channel) * a.A_channel + n * a.A_state;
  const int other = thread - Tile::kScan;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const bool leads = !kScans && other == Tile::kChain;
  if (leads) loader.bring_tensors(0);
  const float A = exists ? *of_A : 0.f;
  uint4 B = make_uint4(0, 0, 0, 0), C = B;
  if (begin < loader.turns.steps) {
    B = *reinterpret_cast<const uint4*>(of_B);
    C = *reinterpret_cast<const uint4*>(of_C);
  }
  if constexpr (kScans) {
    if (loader.turns.first == 0) {
      float h = 0;
      if (exists && a.initial_state.data != nullptr) {
        const StateView& from = a.initial_state;
        h = load_either<T>(from.data, from.is_float,
                           place.segment.sequence * from.sequence +
                               (place.channel + channel) * from.channel + n * from.state);
      }
      s.entering[n][channel] = h;
    }
    s.A[n][channel] = A;
  } else if (other < Tile::kChannels) {
    s.bias[other] = channel_value<T>(a.bias, place, other) * kLog2E;
  } else if (other >= 32 && other < 32 + Tile::kChannels) {
    s.skip[other - 32] = channel_value<T>(a.D, place, other - 32);
  } else if (leads) {
    for (int i = 0; i < Tile::kStages; ++i) {
      if (i > 0) {
        barrier_init(&s.stage[i].full, Tile::kLoad + 1);
        barrier_init(&s.stage[i].gate, 1);
      }
      barrier_init(&s.stage[i].empty, Tile::kScan / 32);
    }
    for (uint64_t& barrier : s.ready) barrier_init(&barrier, 32);
    for (uint64_t& barrier : s.came) barrier_init(&barrier, 1);
    fence_barrier_init_cluster();
  }
  loader.put_states(B, step, half, kLn2, &s.stage[0].B[0][0]);
  loader.put_states(C, step, half, 1.f, &s.stage[0].C[0][0]);
  __syncthreads();
  cluster_arrive_relaxed();
  cluster_wait();
}

#endif

}  // namespace fk::cuda
