// Attention's backward on Hopper: what a block works on, where it lies in shared memory, and the
// thread that loads it.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/tma.cuh"
#include "ops/attention/cuda_sm90_backward.h"

namespace fk::cuda_sm90::backward {

// One key block of one key head. Its query blocks are taken one after another, of each those of all
// heads of the group.
struct Tile {
  int number;  // past the last: nothing more to do
  int batch, kv_head, n;
  int q_begin, q_len, k_begin, k_len;
  int m_first, m_end;          // query blocks that see it
  int plain_first, plain_end;  // those of them whose every query sees every key
  int steps;                   // query blocks of all heads of the group
  int slot;                    // of the sequence's first query block in the workspace
  int head;                    // the key head's number in the batch
  int sum;                     // the sequence's first block of sums, of the group's first head
};

// A block of dQ to bring into its final form.
struct DqBlock {
  float* sum;
  void* to;
  int rows;    // 0: nothing more to do
  int head;    // the key head's number in the batch
  bool again;  // another head takes the place of this sum
};

// Tiles as the copy engine writes them: columns of 64 elements, rows of 128 bytes, swizzled.
// Rings have two places.
template <int kHeadSize, int kQueries>
struct alignas(1024) SharedTiles {
  static constexpr bool kWide = false;
  static constexpr int kD = kHeadSize, kM = kQueries, kN = keys_a_block(kD);
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
  uint64_t tile_full[2], tile_empty[2];
  Tile tile[2];
  DqBlock dq_block[kThreads / 32 - 1];  // by warp, but for the one that loads
};

// The same for head sizes above 128 (cuda_sm90_backward_wide.cuh); rings have as many places as
// there is room for.
template <int kHeadSize, int kValueSize>
struct alignas(1024) WideTiles {
  static constexpr bool kWide = true;
  static constexpr int kD = kHeadSize, kM = 64, kN = keys_a_block(kD), kPanels = kD / 64;
  static constexpr int kE = kValueSize, kValuePanels = kE / 64;
  static constexpr int kKeyPlaces = kE < kD ? 2 : 1, kDoutPlaces = kD > 192 ? 1 : 2;
  // Each part of dQ has a place of its own, if there is room, or else each warp.
  static constexpr int kDqPlaces = kD > 192 ? kConsumerWarps : dq_parts(kD);
  uint16_t k[kKeyPlaces][kN * kD];
  uint16_t v[kN * kE];
  uint16_t q[2][kM * kD];
  uint16_t dout[kDoutPlaces][kM * kE];
  uint16_t ds[2][kM * kN];
  uint4 p[2][kM * kN / 8];  // weights of dP - delta: float16, in the order of the registers
  float dq[kDqPlaces][kM * 16];
  float stats[2][2 * kM];  // -lse * log2(e), delta
  // stage_empty: the second warpgroup, which needs a query block last, is done with it.
  uint64_t q_full[2], stage_empty[2], dout_full[2], dout_empty[2];
  uint64_t k_full[2], k_empty[2], v_full, v_empty;
  uint64_t p_full[2], p_empty[2], ds_full[2], ds_empty[2];
  uint64_t tile_full[2], tile_empty[2];
  Tile tile[2];
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
    cuda::barrier_init(&shared.stage_empty[i], kConsumerWarps);
    cuda::barrier_init(&shared.k_full[i], 1);
    cuda::barrier_init(&shared.k_empty[i], kConsumerWarps);
    cuda::barrier_init(&shared.ds_full[i], kConsumerWarps);
    cuda::barrier_init(&shared.ds_empty[i], kConsumerWarps);
    cuda::barrier_init(&shared.tile_full[i], 1);
    cuda::barrier_init(&shared.tile_empty[i], kConsumerWarps);
  }
  cuda::barrier_init(&shared.v_full, 1);
  cuda::barrier_init(&shared.v_empty, kConsumerWarps);
  cuda::fence_barrier_init();
}

template <int kD, int kE>
__device__ __forceinline__ void init_barriers(WideTiles<kD, kE>& shared) {
  constexpr int kGroupWarps = kConsumerWarps / 2;
  for (int i = 0; i < 2; ++i) {
    cuda::barrier_init(&shared.q_full[i], 1);
    cuda::barrier_init(&shared.stage_empty[i], kGroupWarps);
    cuda::barrier_init(&shared.dout_full[i], 1);
    cuda::barrier_init(&shared.k_full[i], 1);
    cuda::barrier_init(&shared.k_empty[i], kConsumerWarps);
    cuda::barrier_init(&shared.dout_empty[i], kConsumerWarps);
    cuda::barrier_init(&shared.p_full[i], kGroupWarps);
    cuda::barrier_init(&shared.p_empty[i], kGroupWarps);
    cuda::barrier_init(&shared.ds_full[i], kGroupWarps);
    cuda::barrier_init(&shared.ds_empty[i], kConsumerWarps);
    cuda::barrier_init(&shared.tile_full[i], 1);
    cuda::barrier_init(&shared.tile_empty[i], kConsumerWarps);
  }
  cuda::barrier_init(&shared.v_full, 1);
  cuda::barrier_init(&shared.v_empty, kGroupWarps);
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

// The sequence whose query blocks `slot` is one of, where sequences are packed.
template <int kM>
__device__ __forceinline__ int sequence_at(const Params& p, int slot) {
  int low = 0, high = static_cast<int>(p.problem.batch) - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (static_cast<int>(p.problem.sequence(middle).q_begin) / kM + middle <= slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// `tile` is in shared memory: the registers of the one thread that calls this are few.
template <int kM, int kN>
__device__ __forceinline__ void find_tile(const Params& p, int t, volatile Tile& tile) {
  tile.number = t;
  if (t >= p.tiles) return;
  // Key blocks of a head, or, where they are packed, of all sequences.
  const int row = p.problem.packed ? p.tiles / p.kv_heads : p.n_blocks;
  int first_head = p.last_heads, end_head = p.tiles / row;
  if (t < p.last_heads * row) {
    first_head = t / (row * p.heads_together) * p.heads_together;
    end_head = min(first_head + p.heads_together, p.last_heads);
  }
  const int rest = t - first_head * row;
  const int head = first_head + rest % (end_head - first_head);
  int place = rest / (end_head - first_head);
  if (p.descending) place = row - 1 - place;
  if (p.problem.packed) {
    // Sequence b has the key block places from k_begin / kN + b on: always enough, and found
    // without a sum over the sequences before it.
    tile.kv_head = head;
    int low = 0, high = static_cast<int>(p.problem.batch) - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      const int begin = static_cast<int>(p.problem.sequence(middle).k_begin);
      if (begin / kN + middle <= place) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    tile.batch = low;
    const attention::Sequence s = p.problem.sequence(low);
    tile.q_begin = static_cast<int>(s.q_begin);
    tile.q_len = static_cast<int>(s.q_len);
    tile.k_begin = static_cast<int>(s.k_begin);
    tile.k_len = static_cast<int>(s.k_len);
    tile.n = place - (tile.k_begin / kN + low);
    tile.slot = tile.q_begin / kM + low;
    tile.head = low * p.kv_heads + tile.kv_head;
    tile.sum = tile.kv_head * p.group * p.slots + tile.slot;
  } else {
    tile.n = place;
    tile.batch = head / p.kv_heads;
    tile.kv_head = head % p.kv_heads;
    tile.q_begin = 0;
    tile.k_begin = 0;
    tile.q_len = static_cast<int>(p.problem.q_len);
    tile.k_len = static_cast<int>(p.problem.k_len);
    tile.slot = tile.batch * p.m_blocks;
    tile.head = head;
    tile.sum = head % p.ring * p.group * p.m_blocks;
  }
  const int n0 = tile.n * kN, n1 = min(n0 + kN, tile.k_len);
  const int offset = tile.k_len - tile.q_len;
  const int first = max(0, n0 - p.right - offset);
  const int end = n0 < tile.k_len ? min(tile.q_len, n1 + p.left - offset) : 0;
  tile.m_first = first / kM;
  tile.m_end = end > first ? (end + kM - 1) / kM : tile.m_first;
  tile.steps = (tile.m_end - tile.m_first) * p.group;
  // Queries that are not there need no mask: their P is 0.
  tile.plain_first = (max(0, n1 - 1 - p.right - offset) + kM - 1) / kM;
  const int seen_end = n0 + p.left - offset + 1;  // queries before this one see key n0
  tile.plain_end = seen_end >= tile.q_len ? kFar : max(0, seen_end) / kM;
  if (n0 + kN > tile.k_len) tile.plain_end = 0;
}

// The query block a tile begins with.
__device__ __forceinline__ int first_block(const Params& p, const Tile& tile) {
  return p.m_step > 0 ? tile.m_first : tile.m_end - 1;
}

// One thread.
template <class Shared>
__device__ __forceinline__ void produce(const Params& p, Shared& shared) {
  using namespace fk::cuda;  // NOLINT: the instructions
  constexpr int kPanels = Shared::kPanels, kValuePanels = Shared::kValuePanels;
  constexpr int kM = Shared::kM, kN = Shared::kN;
  Turn stage, tile_turn, kv_turn;
  while (true) {
    // Late: a tile taken early would wait here while other blocks have nothing to do. Each waits
    // for earlier ones at most (their conversion, their turn), which blocks that run have taken.
    const int t = atomicAdd(&p.counters->tile, 1);
    barrier_wait(&shared.tile_empty[tile_turn.index()], tile_turn.phase() ^ 1);
    Tile& tile = shared.tile[tile_turn.index()];
    find_tile<kM, kN>(p, t, tile);
    if (t < p.tiles && !p.problem.packed && tile.head >= p.ring && p.done != nullptr) {
      // The head that had this place before has to be through.
      const int* converted = p.converted + (tile.head - p.ring);
      while (load_acquire(converted) < p.group * p.m_blocks) __nanosleep(200);
      fence_async();
    }
    barrier_arrive(&shared.tile_full[tile_turn.index()]);
    ++tile_turn.number;
    if (t >= p.tiles) return;
    if (tile.steps > 0) {
      const int batch = p.problem.packed ? 0 : tile.batch;
      const int key = tile.k_begin + tile.n * kN;
      constexpr int kKeyPlaces = Shared::kKeyPlaces;
      const int kv = kv_turn.number % kKeyPlaces;
      barrier_wait(&shared.k_empty[kv], kv_turn.number / kKeyPlaces % 2 ^ 1);
      barrier_arrive_expect(&shared.k_full[kv], sizeof(shared.k[kv]));
      for (int c = 0; c < kPanels; ++c) {
        tensor_load(shared.k[kv] + c * kN * 64, &p.k, &shared.k_full[kv], c * 64, tile.kv_head, key,
                    batch);
      }
      barrier_wait(&shared.v_empty, kv_turn.number % 2 ^ 1);
      barrier_arrive_expect(&shared.v_full, sizeof(shared.v));
      for (int c = 0; c < kValuePanels; ++c) {
        tensor_load(shared.v + c * kN * 64, &p.v, &shared.v_full, c * 64, tile.kv_head, key, batch);
      }
      ++kv_turn.number;
      const int first_head = tile.kv_head * p.group;
      int head = first_head, m = first_block(p, tile);
      const float* stats =
          p.stats + static_cast<int64_t>(head * p.slots + tile.slot + m) * (2 * kM);
      for (int steps = tile.steps; steps > 0; --steps) {
        const int s = stage.index();
        barrier_wait(&shared.stage_empty[s], stage.phase() ^ 1);
        barrier_arrive_expect(&shared.q_full[s], sizeof(shared.q[s]) + sizeof(shared.stats[s]));
        const int row = tile.q_begin + m * kM;
        bulk_copy_to_shared(shared.stats[s], stats, sizeof(shared.stats[s]), &shared.q_full[s]);
        for (int c = 0; c < kPanels; ++c) {
          tensor_load(shared.q[s] + c * kM * 64, &p.q, &shared.q_full[s], c * 64, head, row, batch);
        }
        const Ring<Shared::kDoutPlaces> dout{stage.number};
        const int d = dout.index();
        if constexpr (Shared::kWide) barrier_wait(&shared.dout_empty[d], dout.phase() ^ 1);
        barrier_arrive_expect(&shared.dout_full[d], sizeof(shared.dout[d]));
        for (int c = 0; c < kValuePanels; ++c) {
          tensor_load(shared.dout[d] + c * kM * 64, &p.dout, &shared.dout_full[d], c * 64, head,
                      row, batch);
        }
        ++stage.number;
        ++head;
        stats += p.slots * (2 * kM);
        if (head == first_head + p.group) {
          head = first_head;
          stats += static_cast<int64_t>(p.m_step - p.group * p.slots) * (2 * kM);
          m += p.m_step;
        }
      }
    }
  }
}

#endif

}  // namespace fk::cuda_sm90::backward
