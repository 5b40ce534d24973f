// Attention's backward on Hopper: where what a block works on lies in shared memory, and the thread
// that loads it.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/tma.cuh"
#include "ops/attention/sm90/backward.h"
#include "ops/attention/sm90/backward_order.cuh"

namespace fk::cuda_sm90::backward {

// A block of dQ to bring into its final form.
struct DqBlock {
  float* sum;
  void* to;
  int rows;      // 0: nothing more to do
  int segment;   // Params::converted
  int sequence;  // of the last block
  bool again;    // another head takes the place of this sum
};

// Tiles as the copy engine writes them: columns of 64 elements, rows of 128 bytes, swizzled.
// Rings have two places.
template <int kHeadSize, int kQueries>
struct alignas(1024) SharedTiles {
  static constexpr bool kWide = false, kPair = false;
  static constexpr int kThreads = backward::kThreads, kWarps = kConsumerWarps;
  static constexpr int kServeRegisters = 24;
  static constexpr int kD = kHeadSize, kM = kQueries, kN = keys_a_block(kD), kRows = kN;
  static constexpr int kPanels = (kD + 63) / 64, kColumns = kPanels * 64;
  static constexpr int kValuePanels = kPanels;
  static constexpr int kKeyPlaces = kM == 80 ? 1 : 2;  // 80 queries leave room for one only
  static constexpr int kDoutPlaces = 2;
  uint16_t k[kKeyPlaces][kN * kColumns];  // of this tile and the next
  uint16_t v[kN * kColumns];              // free once the last dP is there, so one place is enough
  uint16_t q[2][kM * kColumns];
  uint16_t dout[2][kM * kColumns];
  uint16_t ds[2][kM * kN];
  float dq[dq_parts(kD)][kM * kD / dq_parts(kD)];
  float stats[2][2 * kM];  // -lse * log2(e), delta
  uint64_t q_full[2], dout_full[2], stage_empty[2];
  uint64_t k_full[2], k_empty[2], v_full, v_empty;
  uint64_t ds_full[2], ds_empty[2];
  uint64_t tile_full[2], tile_empty[2], tile_read;
  uint64_t other_ready, other_full;  // the other block of the cluster is done, its sums are here
  Tile tile[2];
  int pending[kConsumerWarps];  // the head whose dQ this warp has added to; -1: it has been said
  DqBlock dq_block[kThreads / 32 - 1];  // by warp, but for the one that loads
};

// The same for head sizes above 128 (sm90/backward_wide.cuh); rings have as many places as
// there is room for.
template <int kHeadSize>
struct alignas(1024) WideTiles {
  static constexpr bool kWide = true, kPair = false;
  static constexpr int kThreads = backward::kThreads, kWarps = kConsumerWarps;
  static constexpr int kServeRegisters = 24;
  static constexpr int kD = kHeadSize, kM = 64, kN = keys_a_block(kD), kRows = kN;
  static constexpr int kPanels = kD / 64, kValuePanels = kPanels;
  static constexpr int kKeyPlaces = 1, kDoutPlaces = kD > 192 ? 1 : 2;
  // Each part of dQ has a place of its own, if there is room, or else each warp.
  static constexpr int kDqPlaces = kD > 192 ? kConsumerWarps : dq_parts(kD);
  uint16_t k[kKeyPlaces][kN * kD];
  uint16_t v[kN * kD];
  uint16_t q[2][kM * kD];
  uint16_t dout[kDoutPlaces][kM * kD];
  uint16_t ds[2][kM * kN];
  uint4 p[2][kM * kN / 8];  // weights of dP - delta: float16, in the order of the registers
  float dq[kDqPlaces][kM * 16];
  float stats[2][2 * kM];  // -lse * log2(e), delta
  // stage_empty: the second warpgroup, which needs a query block last, is done with it.
  uint64_t q_full[2], stage_empty[2], dout_full[2], dout_empty[2];
  uint64_t k_full[2], k_empty[2], v_full, v_empty;
  uint64_t p_full[2], p_empty[2], ds_full[2], ds_empty[2];
  uint64_t tile_full[2], tile_empty[2], tile_read;
  Tile tile[2];
  int pending[kConsumerWarps];  // the head whose dQ this warp has added to; -1: it has been said
  DqBlock dq_block[kThreads / 32 - 1];  // by warp, but for the one that loads
};

template <int kD, int kM>
constexpr int kSharedBytes = sizeof(SharedTiles<kD, kM>);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// How often a ring was used: which place is next, and the parity of its barrier's phase.
template <int kPlaces>
struct Ring {
  uint32_t number = 0;
  // Of one place, 0 in a form that the compiler takes for a value that changes: it would keep all
  // descriptors of what is there in registers.
  __device__ __forceinline__ int index() const {
    return kPlaces == 1 ? number >> 31 : number % kPlaces;
  }
  __device__ __forceinline__ uint32_t phase() const { return number / kPlaces % 2; }
};
using Turn = Ring<2>;

template <int kD, int kM>
__device__ __forceinline__ void init_barriers(SharedTiles<kD, kM>& shared) {
  for (int i = 0; i < 2; ++i) {
    cuda::barrier_init(&shared.q_full[i], 1);
    cuda::barrier_init(&shared.dout_full[i], 1);
    cuda::barrier_init_for_warps(&shared.stage_empty[i], kConsumerWarps);
    cuda::barrier_init(&shared.k_full[i], 1);
    cuda::barrier_init_for_warps(&shared.k_empty[i], kConsumerWarps);
    cuda::barrier_init_for_warps(&shared.ds_full[i], kConsumerWarps);
    cuda::barrier_init_for_warps(&shared.ds_empty[i], kConsumerWarps);
    cuda::barrier_init(&shared.tile_full[i], 1);
    cuda::barrier_init_for_warps(&shared.tile_empty[i], kConsumerWarps);
  }
  cuda::barrier_init(&shared.v_full, 1);
  cuda::barrier_init_for_warps(&shared.v_empty, kConsumerWarps);
  cuda::barrier_init(&shared.tile_read, 1);
  cuda::barrier_init(&shared.other_ready, kConsumerWarps);
  cuda::barrier_init(&shared.other_full, 1);
  cuda::fence_barrier_init();
  cuda::fence_barrier_init_cluster();
  cuda::barrier_arrive_expect(&shared.other_full, kD * shared.kN * sizeof(float));
}

template <int kD>
__device__ __forceinline__ void init_barriers(WideTiles<kD>& shared) {
  constexpr int kGroupWarps = kConsumerWarps / 2;
  for (int i = 0; i < 2; ++i) {
    cuda::barrier_init(&shared.q_full[i], 1);
    cuda::barrier_init_for_warps(&shared.stage_empty[i], kGroupWarps);
    cuda::barrier_init(&shared.dout_full[i], 1);
    cuda::barrier_init(&shared.k_full[i], 1);
    cuda::barrier_init_for_warps(&shared.k_empty[i], kConsumerWarps);
    cuda::barrier_init_for_warps(&shared.dout_empty[i], kConsumerWarps);
    cuda::barrier_init_for_warps(&shared.p_full[i], kGroupWarps);
    cuda::barrier_init_for_warps(&shared.p_empty[i], kGroupWarps);
    cuda::barrier_init_for_warps(&shared.ds_full[i], kGroupWarps);
    cuda::barrier_init_for_warps(&shared.ds_empty[i], kConsumerWarps);
    cuda::barrier_init(&shared.tile_full[i], 1);
    cuda::barrier_init_for_warps(&shared.tile_empty[i], kConsumerWarps);
  }
  cuda::barrier_init(&shared.v_full, 1);
  cuda::barrier_init_for_warps(&shared.v_empty, kGroupWarps);
  cuda::barrier_init(&shared.tile_read, 1);
  cuda::fence_barrier_init();
}

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

// The number of the next tile, by how many there were before.
template <class Shared>
__device__ __forceinline__ int next_number(const Params& p, Shared&, const Turn& turn) {
  if (p.parts == 1) return atomicAdd(&p.counters->tile, 1);
  return turn.number == 0 ? static_cast<int>(blockIdx.x) : p.tiles;
}

// One thread.
template <Kind kKind, class Shared>
__device__ __forceinline__ void produce(const Params& p, Shared& shared) {
  using namespace fk::cuda;  // NOLINT: the instructions
  constexpr int kPanels = Shared::kPanels, kValuePanels = Shared::kValuePanels;
  constexpr int kM = Shared::kM, kN = Shared::kN, kKeyPlaces = Shared::kKeyPlaces;
  constexpr int kRows = Shared::kRows;
  constexpr bool kPair = Shared::kPair;
  Turn stage, tile_turn;
  while (true) {
    // Late: a tile taken early would wait here while other blocks have nothing to do. Each waits
    // for earlier ones at most (their conversion, their turn), which blocks that run have taken.
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
      // What had its place before has to be through.
      for (int s = tile.segment; s < tile.segment_end; ++s) {
        while (load_acquire(p.converted + s) < p.segment) __nanosleep(200);
      }
      fence_async();
    }
    barrier_arrive(&shared.tile_full[tile_turn.index()]);
    ++tile_turn.number;
    if (end) return;
    if (tile.steps > 0) {
      // Where the sequence begins, as the maps see it (map_rows).
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
      // In the order in which places get free.
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
