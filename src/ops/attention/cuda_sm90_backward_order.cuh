// Attention's backward on Hopper: the tiles a block works on, and in which order blocks take them.
#pragma once

#include <cuda.h>

#include <cstdint>

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
  int sum;                   // place of the first block of sums (Params) of this sequence and head
  int segment, segment_end;  // of blocks of sums that had these places before (Params::converted)
  int loads;                 // of keys and values before
};

// In which order the tiles of a packed sequence, or of all heads of a batch, are taken.
struct Order {
  int batch, first, end;  // the sequence and the places of its tiles
  int tiles;              // less than there are places, if packed
  int q_begin, q_len, k_begin, k_len, slot;
  int row, blocks;           // tiles and blocks of sums of a head
  int together, last_heads;  // heads side by side; how many at the end
};

// The last packed sequences under a causal mask, if they are short, have their tiles taken
// together, the longest first: from place `level_first` on those that have, in their sequence,
// `level` key blocks from their own on.
constexpr int kLastSequences = 16;
struct Last {
  int first;                      // the place of their first tile
  int level, level_first, begin;  // begin: of `rows`
  int rows[kLastSequences];  // key blocks, by sequence from the last but 15 on; 0: is not of those
};

// One thread's; the rest of the block sees only tiles.
struct Schedule {
  Order order[2];  // that of the last tile, and the next
  int current;     // which is the former
  Last last;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

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

template <int kM>
__device__ __forceinline__ void read_sequence(const Params& p, int b, volatile Order& order) {
  order.batch = b;
  int begin = query_begin(p, b), end = query_begin(p, b + 1);
  order.q_begin = begin;
  order.q_len = end - begin;
  order.slot = begin / kM + b;
  order.blocks = (end / kM + 1 - begin / kM) * p.group;
  begin = key_begin(p, b), end = key_begin(p, b + 1);
  order.k_begin = begin;
  order.k_len = end - begin;
}

// A warp, before the first tile of packed sequences.
template <int kM, int kN>
__device__ __forceinline__ void begin_last(const Params& p, Last& last) {
  const int i = threadIdx.x % 32, b = static_cast<int>(p.problem.batch) - kLastSequences + i;
  int first = p.tiles, rows = 0;
  if (i < kLastSequences && b >= 0) {
    const int place = (key_begin(p, b) / kN + b) * p.kv_heads;
    // Their sums must not get into each other's way.
    if (p.tiles - place <= p.last_tiles / 2 * 3 &&
        (p.slots - query_begin(p, b) / kM - b) * p.kv_heads * p.group <= p.most_together) {
      first = place;
      rows = (key_begin(p, b + 1) - key_begin(p, b) + kN - 1) / kN;
    }
  }
  const uint32_t those = __ballot_sync(~0u, first < p.tiles);
  last.begin = __ffs(those) - 1;
  if (__popc(those) < 2) {  // a sequence alone has an order of its own
    first = p.tiles;
    rows = 0;
  }
  last.first = last.level_first = __reduce_min_sync(~0u, first);
  last.level = __reduce_max_sync(~0u, rows);
  if (i < kLastSequences) last.rows[i] = rows;
}

// The sequence of tile t, at or behind the one that `order` is of. All that these functions write
// is in shared memory: the registers of the one thread that calls them are few.
template <int kM, int kN, Kind kKind>
__device__ __forceinline__ void find_order(const Params& p, int t, volatile Order& order) {
  int heads = p.kv_heads, row = p.n_blocks, places = p.n_blocks;
  if (is_packed<kKind>(p)) {
    const int b =
        sequence_at(p, order.batch, t / heads, [&](int b) { return key_begin(p, b) / kN + b; });
    read_sequence<kM>(p, b, order);
    const int begin = order.k_begin, end = begin + order.k_len;
    row = (end - begin + kN - 1) / kN;
    places = end / kN + 1 - begin / kN;
    order.first = (begin / kN + b) * heads;
  } else {
    heads *= static_cast<int>(p.problem.batch);
    order.first = order.slot = order.k_begin = 0;
    order.q_len = static_cast<int>(p.problem.q_len);
    order.k_len = static_cast<int>(p.problem.k_len);
    order.blocks = p.m_blocks * p.group;
  }
  const int blocks = order.blocks;
  order.row = row;
  order.tiles = row * heads;
  order.end = order.first + places * heads;
  row = max(row, 1);
  const int last = p.last_tiles - (p.tiles - order.end);  // tiles of this sequence
  order.last_heads = min(heads, min(max(last + row - 1, 0) / row, p.most_together / blocks));
  order.together = max(p.together / blocks, 1);
}

// The key block and the head of a tile of the last sequences. False: there is none.
template <int kM>
__device__ __forceinline__ bool find_last(const Params& p, volatile Tile& tile,
                                          volatile Order& order, volatile Last& last) {
#pragma unroll 1
  for (; last.level > 0; --last.level) {
    int left = tile.number - last.level_first;
#pragma unroll 1
    for (int i = last.begin; i < kLastSequences; ++i) {
      if (last.rows[i] < last.level) continue;
      if (left < p.kv_heads) {
        tile.n = last.rows[i] - last.level;
        tile.kv_head = left;
        read_sequence<kM>(p, static_cast<int>(p.problem.batch) - kLastSequences + i, order);
        return true;
      }
      left -= p.kv_heads;
    }
    last.level_first = tile.number - left;
  }
  return false;
}

// False: this is a place that no key block has.
template <int kM, int kN, Kind kKind>
__device__ __forceinline__ bool find_tile(const Params& p, volatile Tile& tile,
                                          volatile Schedule& schedule) {
  uint32_t t = atomicAdd(&p.counters->tile, 1);
  tile.number = t;
  const int number = t;
  if (number >= p.tiles) return true;
  const bool packed = is_packed<kKind>(p);
  if (packed && number >= schedule.order[schedule.current].end &&
      number >= schedule.order[schedule.current ^ 1].first) {
    schedule.current ^= 1;
  }
  volatile Order& order = schedule.order[packed ? schedule.current : 0];
  uint32_t head;
  if (packed && number >= schedule.last.first) {
    if (!find_last<kM>(p, tile, order, schedule.last)) return false;
    head = tile.kv_head;
  } else {
    if (number >= order.end) {
      find_order<kM, kN, kKind>(p, t, order);
      if (number >= order.end) return false;
    }
    t -= order.first;
    if (packed && static_cast<int>(t) >= order.tiles) {
      // Nor do those up to the next sequence.
      atomicMax(&p.counters->tile, order.end);
      return false;
    }
    // The first of those heads that are together, and how many.
    const uint32_t row = order.row;
    uint32_t together = order.last_heads;
    head = order.tiles / row - together;
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
  }
  tile.slot = order.slot;
  tile.k_begin = order.k_begin;
  tile.q_len = order.q_len;
  tile.k_len = order.k_len;
  const int blocks = order.blocks;
  int sum = head * blocks;
  if (packed) {
    tile.batch = order.batch;
    tile.q_begin = order.q_begin;
    tile.kv_head = head;
    tile.head = order.batch * p.kv_heads + head;
    sum += order.slot * p.kv_heads * p.group;
  } else {
    const uint32_t batch = head / p.kv_heads;
    tile.batch = batch;
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
  return true;
}

// Of packed sequences: what find_tile will need to know of the sequence that comes after tile t, if
// the next tile is likely to be of that one.
template <int kM, int kN, Kind kKind>
__device__ __forceinline__ void find_next(const Params& p, int t, volatile Schedule& schedule) {
  t += gridDim.x;
  volatile Order& next = schedule.order[schedule.current ^ 1];
  if (t < schedule.last.first && t >= schedule.order[schedule.current].end && t >= next.end) {
    find_order<kM, kN, kKind>(p, t, next);
  }
}

// The query block a tile begins with.
__device__ __forceinline__ int first_block(const Params& p, const volatile Tile& tile) {
  return p.m_step > 0 ? tile.m_first : tile.m_end - 1;
}

#endif

}  // namespace fk::cuda_sm90::backward
