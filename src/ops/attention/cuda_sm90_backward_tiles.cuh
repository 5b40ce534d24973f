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
  const CUtensorMap* maps;  // Params
  int number;               // past the last: nothing more to do
  int batch, kv_head, n;
  int q_len, k_begin, k_len;
  int m_first, m_end;          // query blocks that see it
  int plain_first, plain_end;  // those of them whose every query sees every key
  int steps;                   // query blocks of all heads of the group
  int slot;                    // of the sequence's first query block in the workspace
  int head;                    // the key head's number in the batch
  int sum;                   // place of the first block of sums (Params) of this sequence and head
  int segment, segment_end;  // of blocks of sums that had these places before (Params::converted)
  int loads;                 // of keys and values before
};

// In which order the tiles of a packed sequence, or of all heads of a batch, are taken.
struct Order {
  int batch, first, end;  // the sequence and its tiles
  int q_len, k_begin, k_len, slot;
  int row, blocks;           // tiles and blocks of sums of a head
  int together, last_heads;  // heads side by side; how many at the end
};

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
  Order order;                  // for the thread that loads
  int pending[kConsumerWarps];  // the head whose dQ this warp has added to; -1: it has been said
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
  Order order;                  // for the thread that loads
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
// Shows this thread's copies a tensor map that an earlier kernel wrote, and has it loaded.
__device__ __forceinline__ void see_tensor_map(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
  cuda::prefetch_tensor_map(map);
}
// Orders this thread's accesses and those of the copy engine.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Whether the call is of packed sequences, by what the kernel is made for.
template <Kind kKind>
__device__ __forceinline__ bool is_packed(const Params& p) {
  return kKind == Kind::kPacked || (kKind != Kind::kBatch && p.problem.packed);
}

// Where packed sequence b begins. Offsets rise (begin_block).
__device__ __forceinline__ int offset(const int32_t* offsets, int64_t stride, int b) {
  return __ldg(offsets + b * stride);
}
__device__ __forceinline__ int query_begin(const Params& p, int b) {
  return offset(p.problem.cu_q, p.problem.cu_q_stride, b);
}
__device__ __forceinline__ int key_begin(const Params& p, int b) {
  return offset(p.problem.cu_k, p.problem.cu_k_stride, b);
}

// The last sequence that begins at `place` or before it, and is not before `from`: most often that
// one itself.
template <class Begin>
__device__ __forceinline__ int sequence_at(const Params& p, int from, int place, Begin begin) {
  int step = 1;
  while (from + step < p.problem.batch && begin(from + step) <= place) {
    from += step;
    step *= 2;
  }
  while (step > 1) {
    step /= 2;
    if (from + step < p.problem.batch && begin(from + step) <= place) from += step;
  }
  return from;
}

// The sequence of tile t, at or behind the one that `order` is of. All that these functions write
// is in shared memory: the registers of the one thread that calls them are few.
template <int kM, int kN, Kind kKind>
__device__ __forceinline__ void find_order(const Params& p, int t, volatile Order& order) {
  int heads = p.kv_heads, row = p.n_blocks, blocks = p.m_blocks;
  if (is_packed<kKind>(p)) {
    const int b =
        sequence_at(p, order.batch, t / heads, [&](int b) { return key_begin(p, b) / kN + b; });
    order.batch = b;
    for (int i = 0; i < 4; ++i) see_tensor_map(p.sequence_maps + b * 4 + i);
    int begin = query_begin(p, b), end = query_begin(p, b + 1);
    order.q_len = end - begin;
    order.slot = begin / kM + b;
    blocks = end / kM + 1 - begin / kM;
    begin = key_begin(p, b), end = key_begin(p, b + 1);
    order.k_begin = begin;
    order.k_len = end - begin;
    row = end / kN + 1 - begin / kN;
    order.first = (begin / kN + b) * heads;
  } else {
    heads *= static_cast<int>(p.problem.batch);
    order.first = order.slot = order.k_begin = 0;
    order.q_len = static_cast<int>(p.problem.q_len);
    order.k_len = static_cast<int>(p.problem.k_len);
  }
  blocks *= p.group;
  order.row = row;
  order.blocks = blocks;
  order.end = order.first + row * heads;
  const int last = p.last_tiles - (p.tiles - order.end);  // tiles of this sequence
  order.last_heads = min(heads, min(max(last + row - 1, 0) / row, p.most_together / blocks));
  order.together = max(p.together / blocks, 1);
}

// False: this is a place that no key block of the sequence has.
template <int kM, int kN, Kind kKind>
__device__ __forceinline__ bool find_tile(const Params& p, volatile Tile& tile,
                                          volatile Order& order) {
  uint32_t t = atomicAdd(&p.counters->tile, 1);
  tile.number = t;
  if (static_cast<int>(t) >= p.tiles) return true;
  if (static_cast<int>(t) >= order.end) {
    find_order<kM, kN, kKind>(p, t, order);
    if (static_cast<int>(t) >= order.end) return false;
  }
  // The first of those heads that are together, and how many.
  const uint32_t row = order.row;
  uint32_t together = order.last_heads;
  uint32_t head = (order.end - order.first) / row - together;
  t -= order.first;
  if (t < head * row) {
    together = order.together;
    const uint32_t first = t / (row * together) * together;
    together = min(together, head - first);
    head = first;
  }
  t -= head * row;
  const uint32_t n = t / together;
  head += t - n * together;
  tile.n = p.descending ? row - 1 - n : n;
  tile.slot = order.slot;
  tile.k_begin = order.k_begin;
  tile.q_len = order.q_len;
  tile.k_len = order.k_len;
  const int blocks = order.blocks;
  int sum = head * blocks;
  if (is_packed<kKind>(p)) {
    tile.batch = order.batch;
    tile.maps = p.sequence_maps + order.batch * 4;
    tile.kv_head = head;
    tile.head = order.batch * p.kv_heads + head;
    sum += order.slot * p.kv_heads * p.group;
  } else {
    const uint32_t batch = head / p.kv_heads;
    tile.batch = batch;
    tile.maps = p.maps;
    tile.kv_head = head - batch * p.kv_heads;
    tile.slot = batch * p.m_blocks;
    tile.head = head;
  }
  tile.segment_end = 0;
  tile.sum = sum;
  if (sum + blocks > p.ring) {
    tile.sum = sum % p.ring;
    sum -= p.ring;
    tile.segment = max(sum, 0) / p.segment;
    tile.segment_end = (sum + blocks + p.segment - 1) / p.segment;
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
  return n0 < tile.k_len;
}

// The query block a tile begins with.
__device__ __forceinline__ int first_block(const Params& p, const volatile Tile& tile) {
  return p.m_step > 0 ? tile.m_first : tile.m_end - 1;
}

// One thread.
template <Kind kKind, class Shared>
__device__ __forceinline__ void produce(const Params& p, Shared& shared) {
  using namespace fk::cuda;  // NOLINT: the instructions
  constexpr int kPanels = Shared::kPanels, kValuePanels = Shared::kValuePanels;
  constexpr int kM = Shared::kM, kN = Shared::kN;
  Turn stage, tile_turn;
  const auto map_of = [&p](const volatile Tile& tile, MapOf what) {
    return kKind == Kind::kBatch ? &p.maps[what] : tile.maps + what;
  };
  while (true) {
    // Late: a tile taken early would wait here while other blocks have nothing to do. Each waits
    // for earlier ones at most (their conversion, their turn), which blocks that run have taken.
    barrier_wait(&shared.tile_empty[tile_turn.index()], tile_turn.phase() ^ 1);
    volatile Tile& tile = shared.tile[tile_turn.index()];
    const volatile Tile& last = shared.tile[tile_turn.index() ^ 1];
    while (!find_tile<kM, kN, kKind>(p, tile, shared.order)) {
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
      const int batch = is_packed<kKind>(p) ? 0 : tile.batch;
      const int key = tile.n * kN;
      constexpr int kKeyPlaces = Shared::kKeyPlaces;
      const Ring<kKeyPlaces> place{static_cast<uint32_t>(tile.loads)};
      const int kv = place.number % kKeyPlaces;
      barrier_wait(&shared.k_empty[kv], place.phase() ^ 1);
      barrier_arrive_expect(&shared.k_full[kv], sizeof(shared.k[kv]));
      for (int c = 0; c < kPanels; ++c) {
        tensor_load(shared.k[kv] + c * kN * 64, map_of(tile, kMapK), &shared.k_full[kv], c * 64,
                    tile.kv_head, key, batch);
      }
      barrier_wait(&shared.v_empty, tile.loads % 2 ^ 1);
      barrier_arrive_expect(&shared.v_full, sizeof(shared.v));
      for (int c = 0; c < kValuePanels; ++c) {
        tensor_load(shared.v + c * kN * 64, map_of(tile, kMapV), &shared.v_full, c * 64,
                    tile.kv_head, key, batch);
      }
      int head = tile.kv_head * p.group, m = first_block(p, tile);
      for (int steps = tile.steps; steps > 0; --steps) {
        const int s = stage.index();
        barrier_wait(&shared.stage_empty[s], stage.phase() ^ 1);
        barrier_arrive_expect(&shared.q_full[s], sizeof(shared.q[s]) + sizeof(shared.stats[s]));
        const int row = m * kM;
        const int64_t block = head * p.slots + tile.slot + m;
        bulk_copy_to_shared(shared.stats[s], p.stats + block * (2 * kM), sizeof(shared.stats[s]),
                            &shared.q_full[s]);
        for (int c = 0; c < kPanels; ++c) {
          tensor_load(shared.q[s] + c * kM * 64, map_of(tile, kMapQ), &shared.q_full[s], c * 64,
                      head, row, batch);
        }
        const Ring<Shared::kDoutPlaces> dout{stage.number};
        const int d = dout.index();
        if constexpr (Shared::kWide) barrier_wait(&shared.dout_empty[d], dout.phase() ^ 1);
        barrier_arrive_expect(&shared.dout_full[d], sizeof(shared.dout[d]));
        for (int c = 0; c < kValuePanels; ++c) {
          tensor_load(shared.dout[d] + c * kM * 64, map_of(tile, kMapDout), &shared.dout_full[d],
                      c * 64, head, row, batch);
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
