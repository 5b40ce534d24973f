// This file says which tiles a block of attention's backward on Hopper works on, and in which order
// blocks take them. Tiles of a batch are found when they are taken. Those of packed sequences are
// listed by the pass ahead: the one thread that loads would need longer to find them than a short
// tile takes.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/integers.h"
#include "ops/attention/sm90/backward/arguments.h"

namespace fk::cuda_sm90::backward {

// A tile is one key block of one key head. Its query blocks are taken one after another, and in
// each those of all heads of the group.
struct alignas(16) ListedTile {
  int number;  // p.tiles or more: nothing more to do
  int batch, kv_head, n;
  int q_begin, q_len, k_begin, k_len;
  int m_first, m_end;                // query blocks that see it
  int unmasked_first, unmasked_end;  // those of them whose every query sees every key
  int steps;                         // query blocks of all heads of the group
  int slot;                          // of the sequence's first query block in the workspace
  int head;                          // the key head's number in the batch
  int sum;                   // place of the first block of sums (Params) of this sequence and head
  int segment, segment_end;  // of blocks of sums that had these places before (Params::converted)
};

struct Tile : ListedTile {
  int loads;  // of keys and values before
};
static_assert(sizeof(Tile) > sizeof(ListedTile), "`loads` is not listed");

// Returns whether the call is of packed sequences, by what the kernel is made for.
template <Kind kKind>
__device__ __forceinline__ bool is_packed(const Params& p) {
  return kKind == Kind::kPacked || (kKind != Kind::kBatch && p.problem.packed);
}

// Returns where packed sequence b begins. Offsets rise (list_tiles).
__device__ __forceinline__ int query_begin(const attention::Problem& p, int b) {
  return p.cu_q[b * p.cu_q_stride];
}
__device__ __forceinline__ int key_begin(const attention::Problem& p, int b) {
  return p.cu_k[b * p.cu_k_stride];
}

// Orders heads with `row` tiles and `blocks` blocks of sums each, behind which `after` tiles come.
FK_HOST_DEVICE HeadOrder order_heads(const TileParams& p, int heads, int row, int blocks,
                                     int after) {
  const int last = max(p.last_tiles - after + row - 1, 0) / row;
  return {max(p.together / blocks, 1), min(heads, min(last, p.most_together / blocks))};
}

// Names the head and the key block of tile t of `heads` heads with `row` tiles each.
struct HeadTile {
  int head, n;
};
__device__ __forceinline__ HeadTile find_head(const TileParams& p, HeadOrder order, uint32_t heads,
                                              uint32_t row, uint32_t t) {
  // `head` is the first of those heads that are together, and `together` is how many they are.
  uint32_t together = order.last_heads, head = heads - together;
  if (t < head * row) {
    together = order.together;
    const uint32_t first = t / (row * together) * together;
    together = min(together, head - first);
    head = first;
  }
  t -= head * row;
  const uint32_t n = t / together;
  head += t - n * together;
  return {static_cast<int>(head), static_cast<int>(p.descending ? row - 1 - n : n)};
}

// Sets what follows from a tile's place in its sequence. `sum` is its place among all blocks of
// sums, and its head has `blocks` of them.
template <class AnyTile>
__device__ __forceinline__ void describe_tile(const TileParams& p, TileSize size, int sum,
                                              int blocks, AnyTile& tile) {
  tile.segment_end = 0;
  tile.sum = sum;
  if (sum + blocks > p.ring) {
    tile.sum = sum % p.ring;
    sum -= p.ring;
    tile.segment = max(sum, 0) / p.segment;
    tile.segment_end = ceil_div(sum + blocks, p.segment);
  }
  const int n0 = tile.n * size.keys, n1 = min(n0 + size.keys, tile.k_len);
  const int offset = tile.k_len - tile.q_len;
  const int first = max(0, n0 - p.right - offset);
  const int end = n0 < tile.k_len ? min(tile.q_len, n1 + p.left - offset) : 0;
  tile.m_first = first / size.queries;
  tile.m_end = end > first ? ceil_div(end, size.queries) : tile.m_first;
  tile.steps = (tile.m_end - tile.m_first) * p.group;
  // Queries that are not there need no mask, since their P is 0.
  tile.unmasked_first = ceil_div(max(0, n1 - 1 - p.right - offset), size.queries);
  const int seen_end = n0 + p.left - offset + 1;  // queries before this one see key n0
  tile.unmasked_end = seen_end >= tile.q_len ? kFar : max(0, seen_end) / size.queries;
  if (n0 + size.keys > tile.k_len) tile.unmasked_end = 0;
}

// The last packed sequences under a causal mask, if they are short, have their tiles taken
// together, the longest first.
constexpr int kLastSequences = 16;
struct Last {
  int begin;                 // the first of them
  int tiles;                 // of those before
  int rows[kLastSequences];  // key blocks, by sequence from the last but 15 on; 0: is not of those
};

// A whole warp calls this.
__device__ __forceinline__ void find_last(const attention::Problem& problem, const TileParams& p,
                                          TileSize size, int total, Last& last) {
  const int batch = static_cast<int>(problem.batch);
  const int i = threadIdx.x % 32, b = batch - kLastSequences + i;
  int rows = 0;
  bool fits = false;
  if (i < kLastSequences && b >= 0) {
    rows = ceil_div(key_begin(problem, b + 1) - key_begin(problem, b), size.keys);
    // The sums of these sequences must not get into each other's way.
    const int slots = p.slots - query_begin(problem, b) / size.queries - b;
    fits = slots * p.kv_heads * p.group <= p.most_together;
  }
  int behind = rows;  // key blocks from this sequence on
  for (int step = 1; step < kLastSequences; step *= 2) {
    behind += __shfl_down_sync(~0u, behind, step);
  }
  uint32_t those = __ballot_sync(~0u, fits && behind * p.kv_heads <= p.last_tiles / 2 * 3);
  if (__popc(those) < 2) those = 0;  // a sequence alone has an order of its own
  const int first = those == 0 ? kLastSequences : __ffs(those) - 1;
  const bool is_last = i >= first;
  if (i == first) {
    last.begin = b;
    last.tiles = (total - behind) * p.kv_heads;
  }
  if (i < kLastSequences) last.rows[i] = is_last ? rows : 0;
}

// Writes down the tiles of packed sequences in the order in which blocks take them. All threads of
// each of `parts` blocks take part.
template <int kBlockThreads>
__device__ __forceinline__ void list_tiles(const attention::Problem& problem, const TileParams& p,
                                           TileSize size, ListedTile* list, int part, int parts) {
  __shared__ int sum, warp_sums[kBlockThreads / 32];
  __shared__ int ends[kBlockThreads];  // by sequence: key blocks of those up to it
  __shared__ Last last;
  const int batch = static_cast<int>(problem.batch), heads = p.kv_heads;
  const int thread = threadIdx.x, lane = thread % 32;
  const auto rows_of = [&](int b) {
    return ceil_div(key_begin(problem, b + 1) - key_begin(problem, b), size.keys);
  };
  if (thread == 0) sum = 0;
  bool rise = query_begin(problem, 0) == 0 && query_begin(problem, batch) <= problem.q_len &&
              key_begin(problem, 0) == 0 && key_begin(problem, batch) <= problem.k_len;
  int rows = 0;
  for (int b = thread; b < batch; b += kBlockThreads) {
    rise = rise && query_begin(problem, b) <= query_begin(problem, b + 1) &&
           key_begin(problem, b) <= key_begin(problem, b + 1);
    rows += rows_of(b);
  }
  rise = __syncthreads_and(rise);
  atomicAdd(&sum, rows);
  __syncthreads();
  const int total = rise ? sum : 0;
  if (thread < 32) find_last(problem, p, size, total, last);
  // Behind the last tile there is nothing to do. If offsets do not rise, there is nothing at all.
  for (int i = total * heads + part * kBlockThreads + thread; i <= p.tiles;
       i += parts * kBlockThreads) {
    list[i].number = rise ? p.tiles : p.tiles + 1;
  }
  int before = 0;  // key blocks
  for (int first = 0; before < total; first += kBlockThreads) {
    rows = first + thread < batch ? rows_of(first + thread) : 0;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, rows, step);
      if (lane >= step) rows += other;
    }
    if (lane == 31) warp_sums[thread / 32] = rows;
    __syncthreads();
    for (int w = 0; w < thread / 32; ++w) rows += warp_sums[w];
    ends[thread] = before + rows;
    __syncthreads();
    const int end = ends[kBlockThreads - 1];
    for (int i = before * heads + part * kBlockThreads + thread; i < end * heads;
         i += parts * kBlockThreads) {
      int s = 0;
      for (int step = kBlockThreads / 2; step > 0; step /= 2) {
        if (ends[s + step - 1] <= i / heads) s += step;
      }
      const int begin = s > 0 ? ends[s - 1] : before, b = first + s;
      ListedTile tile;
      tile.batch = b;
      tile.q_begin = query_begin(problem, b);
      tile.q_len = query_begin(problem, b + 1) - tile.q_begin;
      tile.k_begin = key_begin(problem, b);
      tile.k_len = key_begin(problem, b + 1) - tile.k_begin;
      const int first_slot = tile.q_begin / size.queries;
      const int slots = (tile.q_begin + tile.q_len) / size.queries + 1 - first_slot;
      const int row = ends[s] - begin, blocks = slots * p.group;
      tile.number = i;
      const int t = i - begin * heads;
      if (b >= last.begin) {
        const int level = row - t / heads;  // key blocks from this one on
        int earlier = 0;
        for (int j = 0; j < kLastSequences; ++j) {
          earlier += max(last.rows[j] - level, 0);
          if (j < b - batch + kLastSequences && last.rows[j] >= level) ++earlier;
        }
        tile.n = row - level;
        tile.kv_head = t - tile.n * heads;
        tile.number = last.tiles + earlier * heads + tile.kv_head;
      } else {
        const HeadOrder order = order_heads(p, heads, row, blocks, (total - ends[s]) * heads);
        const HeadTile at = find_head(p, order, heads, row, t);
        tile.kv_head = at.head;
        tile.n = at.n;
      }
      tile.slot = first_slot + b;
      tile.head = b * heads + tile.kv_head;
      describe_tile(p, size, tile.slot * heads * p.group + tile.kv_head * blocks, blocks, tile);
      list[tile.number] = tile;
    }
    before = end;
    __syncthreads();
  }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Finds tile t of a batch. All that it writes is in shared memory, since the registers of the one
// thread that calls it are few.
template <int kM, int kN>
__device__ __forceinline__ void find_tile(const Params& p, int t, volatile Tile& tile) {
  tile.number = t;
  if (t >= p.tiles) return;
  const int row = p.n_blocks;
  const HeadTile at = find_head(p, p.heads, p.tiles / row, row, t);
  tile.n = at.n;
  const int batch = static_cast<uint32_t>(at.head) / static_cast<uint32_t>(p.kv_heads);
  tile.batch = batch;
  tile.kv_head = at.head - batch * p.kv_heads;
  tile.slot = batch * p.m_blocks;
  tile.head = at.head;
  tile.k_begin = 0;
  tile.q_len = static_cast<int>(p.problem.q_len);
  tile.k_len = static_cast<int>(p.problem.k_len);
  const int blocks = p.m_blocks * p.group;
  describe_tile(p, {kM, kN}, at.head * blocks, blocks, tile);
  if (p.parts > 1) {  // a half for each block of the cluster
    const int middle = (tile.m_first + tile.m_end + 1) / 2;
    if (blockIdx.z == 0) {
      tile.m_end = middle;
    } else {
      tile.m_first = middle;
    }
    tile.steps = (tile.m_end - tile.m_first) * p.group;
  }
}

// Returns the query block a tile begins with.
__device__ __forceinline__ int first_block(const Params& p, const volatile Tile& tile) {
  return p.m_step > 0 ? tile.m_first : tile.m_end - 1;
}

#endif

}  // namespace fk::cuda_sm90::backward
