// Which elements of the rows of a [..., N] tensor a thread reads and writes, and in what pieces:
// what the loops of row_reduce.cuh, row_map.cuh and row_tile.cuh have in common.
#pragma once

#include "cuda/convert.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/launch.h"
#include "cuda/reduce.cuh"
#include "cuda/row_layout.h"

namespace fk::cuda {

// Loads per thread in flight.
template <class Op>
constexpr int kBatch = Op::kInputs == 2 ? 2 : 4;

// A load of data that the kernel itself may overwrite afterwards (an output in place of an input),
// so not by the read-only path. Volatile keeps it where it was written, ahead of the work on other
// data. kOnce: passes L1 by.
template <int N, bool kOnce = true, class T>
__device__ __forceinline__ Vec<T, N> load_in_order(const T* p) {
  constexpr int kBytes = sizeof(T) * N;
  Vec<T, N> v;
  if constexpr (kBytes == 16) {
    uint4 w;
    if constexpr (kOnce) {
      asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                   : "l"(p));
    } else {
      asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                   : "l"(p));
    }
    memcpy(v.data, &w, kBytes);
  } else if constexpr (kBytes == 4) {
    uint32_t w;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(w) : "l"(p));
    memcpy(v.data, &w, kBytes);
  } else {
    static_assert(kBytes == 2);
    uint16_t w;
    asm volatile("ld.global.b16 %0, [%1];" : "=h"(w) : "l"(p));
    memcpy(v.data, &w, kBytes);
  }
  return v;
}

// A part of a row in 16-byte vectors: up to the first 16-byte border and after the last one,
// `ragged` single elements; between them, `vectors` whole vectors from `begin` on. Part 0 has the
// elements before, the last part those after.
template <class T>
struct RowPart {
  static constexpr int kWidth = kVecWidth<T>;
  int head, ragged;
  int vectors;  // fits: rows of so many bytes are split
  int64_t begin;
  int64_t tail_begin;

  __device__ __forceinline__ RowPart(const T* row, int64_t n, int split, int splits) {
    const int phase = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T)) & (kWidth - 1);
    const int64_t to_border = (kWidth - phase) & (kWidth - 1);
    const int row_head = static_cast<int>(to_border < n ? to_border : n);
    const int64_t all = (n - row_head) / kWidth;
    const int64_t from = splits == 1 ? 0 : all * split / splits;
    const int64_t to = splits == 1 ? all : all * (split + 1) / splits;
    vectors = static_cast<int>(to - from);
    begin = row_head + from * kWidth;
    tail_begin = row_head + all * kWidth;
    head = split == 0 ? row_head : 0;
    ragged = head + (split == splits - 1 ? static_cast<int>(n - tail_begin) : 0);
  }

  // Index in the row of ragged element i.
  __device__ __forceinline__ int64_t ragged_at(int i) const {
    return i < head ? i : tail_begin + (i - head);
  }
};

__device__ __forceinline__ int64_t block_index() {
  return static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
}

// a / b where both are small as a rule: a division of 64 bits is as long as a trip to the cache.
__device__ __forceinline__ int64_t divide_likely_small(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// A grid of at least `blocks` blocks for block_index().
inline dim3 grid_of(int64_t blocks) {
  constexpr int64_t kMaxX = 1 << 30;
  return dim3(static_cast<unsigned>(std::min(blocks, kMaxX)),
              static_cast<unsigned>(ceil_div(blocks, kMaxX)));
}

// Which row or part of one a thread works on, among how many: `group` threads share a part, a power
// of two up to 32, or the block.
struct GroupIndex {
  int lane;
  int64_t part;

  __device__ __forceinline__ explicit GroupIndex(int group) {
    if (group <= kWarpSize) {
      const int shift = __ffs(group) - 1;
      lane = threadIdx.x & (group - 1);
      part = block_index() * (blockDim.x >> shift) + (threadIdx.x >> shift);
    } else {
      lane = threadIdx.x;
      part = block_index();
    }
  }
};

constexpr int kColumnBlock = 256;
constexpr int kColumnLanes = 32;  // at most

// Where a thread of reduce_columns and map_columns works: `lanes` threads side by side take kWidth
// neighbouring rows each, out of `inner`, and the block's other threads other places along the
// axis.
template <int kWidth>
struct ColumnIndex {
  int lane, line, lines;
  bool active;
  int64_t row;  // the first of kWidth
  int split;
  int64_t begin, end;  // of the axis

  __device__ __forceinline__ ColumnIndex(int64_t rows, int64_t n, int64_t inner, int splits,
                                         int lanes) {
    // Divisions of 64 bits are much code: none by a power of two, such as `lanes`, and one for both
    // ends of the split.
    const int shift = __ffs(lanes) - 1;
    const int64_t tiles = ((inner - 1) / kWidth >> shift) + 1;
    const int64_t block = block_index();
    const int64_t strip = block / tiles;
    const int64_t outer = strip / splits;
    lane = threadIdx.x & (lanes - 1);
    const int64_t column = (((block - strip * tiles) << shift) + lane) * kWidth;
    line = threadIdx.x >> shift;
    lines = kColumnBlock >> shift;
    split = static_cast<int>(strip - outer * splits);
    row = outer * inner + column;
    active = column < inner && row < rows;
    const int64_t share = (n + splits - 1) / splits;
    begin = split * share;
    end = min(begin + share, n);
  }
};

// Lanes side by side across columns, each `width` columns wide.
inline int column_lanes(int64_t inner, int64_t width) {
  return power_of_two_at_least(std::min<int64_t>(kColumnLanes, ceil_div(inner, width)));
}

// How reduce_columns and map_columns with kWidth = 1 take rows that lie anyhow: threads along the
// row where that is the fast dimension or there are few rows, else across rows.
inline int strided_lanes(const RowLayout& layout) {
  if (layout.columns()) return column_lanes(layout.inner, 1);
  const int64_t lines = std::max<int64_t>(kColumnBlock / kColumnLanes, ceil_div(layout.n, 4));
  return kColumnBlock / power_of_two_at_least(std::min<int64_t>(kColumnBlock, lines));
}

}  // namespace fk::cuda
