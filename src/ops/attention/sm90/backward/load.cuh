// This file is a part of attention's backward on Hopper: the thread that loads what a block works
// on, for whichever map of shared memory (SharedTiles, WideTiles, PairTiles) the kernel has.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/pipeline.cuh"
#include "cuda/tma.cuh"
#include "ops/attention/sm90/backward/arguments.h"
#include "ops/attention/sm90/backward/order.cuh"

namespace fk::cuda_sm90::backward {

// Names a block of dQ that is to be brought into its final form.
struct DqBlock {
  float* sum;
  void* to;
  int rows;      // 0: nothing more to do
  int segment;   // Params::converted
  int sequence;  // of the last block
  bool again;    // another head takes the place of this sum
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using cuda::Ring;
using Turn = Ring<2>;

__device__ __forceinline__ int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void add_release(int* to) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(to) : "memory");
}
// Orders this thread's accesses and those of the copy engine.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Returns the number of the next tile, by how many there were before.
template <class Shared>
__device__ __forceinline__ int next_number(const Params& p, Shared&, const Turn& turn) {
  if (p.parts == 1) return atomicAdd(&p.counters->tile, 1);
  return turn.number == 0 ? static_cast<int>(blockIdx.x) : p.tiles;
}

// Runs on one thread.
template <Kind kKind, class Shared>
__device__ __forceinline__ void produce(const Params& p, Shared& shared) {
  using namespace fk::cuda;  // NOLINT: the instructions
  constexpr int kPanels = Shared::kPanels, kValuePanels = Shared::kValuePanels;
  constexpr int kM = Shared::kM, kN = Shared::kN, kKeyPlaces = Shared::kKeyPlaces;
  constexpr int kRows = Shared::kRows;
  constexpr bool kPair = Shared::kPair;
  Turn stage, tile_turn;
  while (true) {
    // This comes late, because a tile taken early would wait here while other blocks have nothing
    // to do. Each waits for earlier ones at most (their conversion, their turn), which blocks that
    // run have taken.
    barrier_wait(&shared.tile_empty[tile_turn.index()], tile_turn.phase() ^ 1);
    volatile Tile& tile = shared.tile[tile_turn.index()];
    const volatile Tile& last = shared.tile[tile_turn.index() ^ 1];
    const bool packed = is_packed<kKind>(p);
    const int t = next_number(p, shared, tile_turn);
    if (packed) {
      barrier_arrive_expect(&shared.tile_read, sizeof(ListedTile));
      bulk_copy_to_shared(&shared.tile[tile_turn.index()], p.list + min(t, p.tiles),
                          sizeof(ListedTile), &shared.tile_read);
      barrier_wait(&shared.tile_read, tile_turn.number % 2);
    } else {
      find_tile<kM, kN>(p, t, tile);
    }
    tile.loads = last.loads + (last.steps > 0);
    const bool end = tile.number >= p.tiles;
    if (!end && p.done != nullptr && tile.segment_end > 0) {
      // The blocks of sums that had the tile's places before must be converted.
      for (int s = tile.segment; s < tile.segment_end; ++s) {
        while (load_acquire(p.converted + s) < p.segment) __nanosleep(200);
      }
      fence_async();
    }
    barrier_arrive(&shared.tile_full[tile_turn.index()]);
    ++tile_turn.number;
    if (end) return;
    if (tile.steps > 0) {
      // Returns where the sequence begins, as the maps see it (map_rows).
      const auto first_key = [&] {
        return (packed ? static_cast<int>(p.problem.k_len) - tile.k_len : 0) + tile.n * kN;
      };
      const auto own_key = [&] { return first_key() + (kPair ? cluster_rank() * kRows : 0); };
      const auto key_entry = [&] { return packed ? tile.k_begin + tile.k_len : tile.batch; };
      const auto load_keys = [&] {
        const Ring<kKeyPlaces> place{static_cast<uint32_t>(tile.loads)};
        const int kv = place.number % kKeyPlaces;
        barrier_wait(&shared.k_empty[kv], place.phase() ^ 1);
        barrier_arrive_expect(&shared.k_full[kv], sizeof(shared.k[kv]));
        for (int c = 0; c < kPanels; ++c) {
          tensor_load(shared.k[kv] + c * kRows * 64, &p.maps[kMapK], &shared.k_full[kv], c * 64,
                      tile.kv_head, own_key(), key_entry());
        }
      };
      // Loads go in the order in which places get free.
      if constexpr (kKeyPlaces > 1 || kPair) {
        load_keys();
      } else {
        for (int c = 0; c < kPanels; ++c) {
          tensor_prefetch(&p.maps[kMapK], c * 64, tile.kv_head, first_key(), key_entry());
        }
      }
      int head = tile.kv_head * p.group, m = first_block(p, tile);
      for (int steps = tile.steps; steps > 0; --steps) {
        const int s = stage.index();
        barrier_wait(&shared.stage_empty[s], stage.phase() ^ 1);
        barrier_arrive_expect(&shared.q_full[s], sizeof(shared.q[s]) + sizeof(shared.stats[s]));
        const int row = (packed ? static_cast<int>(p.problem.q_len) - tile.q_len : 0) + m * kM;
        const int q_entry = packed ? tile.q_begin + tile.q_len : tile.batch;
        const int64_t block = head * p.slots + tile.slot + m;
        bulk_copy_to_shared(shared.stats[s], p.stats + block * (2 * kM), sizeof(shared.stats[s]),
                            &shared.q_full[s]);
        for (int c = 0; c < kPanels; ++c) {
          tensor_load(shared.q[s] + c * kM * 64, &p.maps[kMapQ], &shared.q_full[s], c * 64, head,
                      row, q_entry);
        }
        const Ring<Shared::kDoutPlaces> dout{stage.number};
        const int d = dout.index();
        if constexpr (Shared::kWide) barrier_wait(&shared.dout_empty[d], dout.phase() ^ 1);
        barrier_arrive_expect(&shared.dout_full[d], sizeof(shared.dout[d]));
        for (int c = 0; c < kValuePanels; ++c) {
          tensor_load(shared.dout[d] + c * kM * 64, &p.maps[kMapDout], &shared.dout_full[d], c * 64,
                      head, row, q_entry);
        }
        if (steps == tile.steps) {
          barrier_wait(&shared.v_empty, tile.loads % 2 ^ 1);
          barrier_arrive_expect(&shared.v_full, sizeof(shared.v));
          for (int c = 0; c < kValuePanels; ++c) {
            tensor_load(shared.v + c * kRows * 64, &p.maps[kMapV], &shared.v_full, c * 64,
                        tile.kv_head, own_key(), key_entry());
          }
          if constexpr (kPair) {
            load_half(p, shared, tile, first_key(), key_entry());
          } else if constexpr (kKeyPlaces == 1) {
            load_keys();
          }
        }
        ++stage.number;
        if (++head == (tile.kv_head + 1) * p.group) {
          head -= p.group;
          m += p.m_step;
        }
      }
    }
  }
}

#endif

}  // namespace fk::cuda_sm90::backward
