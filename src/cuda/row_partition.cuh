// Tells a thread which rows of a [..., N] tensor, and which of their elements, are its own, and
// loads them: what the kernels of row_reduce.cuh, row_map.cuh and row_in_registers.cuh have in
// common.
#pragma once

#include "cuda/convert.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/launch.h"
#include "cuda/reduce.cuh"
#include "cuda/row_layout.h"

namespace fk::cuda {

// How many loads of each input a thread has in flight.
template <class Op>
constexpr int kBatch = Op::kInputs == 2 ? 2 : 4;

// One part of a row that is cut into 16-byte vectors: `vectors` whole vectors from element `begin`
// on. The row's elements before the first 16-byte border and after the last one are single
// ("ragged") elements; the former belong to part 0, the latter to the last part.
template <class T>
struct RowPart {
  static constexpr int kWidth = kVecWidth<T>;
  int head, ragged;    // how many ragged elements this part has before its vectors, and in all
  int vectors;         // an int is enough, since rows that long are split
  int64_t begin;       // the index in the row of the first vector's first element
  int64_t tail_begin;  // the index in the row of the first element after all vectors

  // Part `split` of `splits` parts of the row of n elements at `row`.
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

  // Returns the index in the row of this part's ragged element i.
  __device__ __forceinline__ int64_t ragged_at(int i) const {
    return i < head ? i : tail_begin + (i - head);
  }
};

// Returns the number of this block in a grid from grid_of.
__device__ __forceinline__ int64_t block_index() {
  return static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
}

// Returns a / b, with a division of 32 bits where both are small enough, as they mostly are: one of
// 64 bits takes as long as a load from the cache. Neither is negative.
__device__ __forceinline__ int64_t divide_likely_small(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// Tells a thread which row, or part of a row, it works on. `group` threads share a part: a power of
// two up to 32, or the whole block.
struct GroupIndex {
  int lane;      // the thread's number in its group
  int64_t part;  // the group's number in the grid

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

constexpr int kColumnBlock = 256;  // threads in a block of reduce_columns and map_columns
constexpr int kColumnLanes = 32;   // the most threads side by side across columns

// Tells a thread of reduce_columns and map_columns where it works. The block is `lines` lines of
// `lanes` threads. The threads of a line stand side by side and take kWidth neighbouring rows each,
// out of groups of `inner` neighbouring rows; the lines take different elements of these rows.
template <int kWidth>
struct ColumnIndex {
  int lane, line, lines;
  bool active;         // false for threads beyond the last row
  int64_t row;         // the first of this thread's kWidth rows
  int split;           // which of the `splits` parts of the rows the block works on
  int64_t begin, end;  // the elements of a row that belong to that part

  __device__ __forceinline__ ColumnIndex(int64_t rows, int64_t n, int64_t inner, int splits,
                                         int lanes) {
    // Divisions of 64 bits are long, so `lanes`, a power of two, is divided by with a shift, and
    // one division serves both ends of the part.
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
    const int64_t share = ceil_div(n, splits);
    begin = split * share;
    end = min(begin + share, n);
  }
};

// Returns how many threads stand side by side across `inner` columns, each `width` columns wide.
inline int column_lanes(int64_t inner, int64_t width) {
  return power_of_two_at_least(std::min<int64_t>(kColumnLanes, ceil_div(inner, width)));
}

// Returns `lanes` for reduce_columns and map_columns with kWidth = 1, which take rows that lie
// anywhere. In the columns layout, up to 32 threads stand side by side across rows; otherwise most
// threads stand along the row, as far as it is long enough.
inline int strided_lanes(const RowLayout& layout) {
  if (layout.columns()) return column_lanes(layout.inner, 1);
  const int64_t lines = std::max<int64_t>(kColumnBlock / kColumnLanes, ceil_div(layout.n, 4));
  return kColumnBlock / power_of_two_at_least(std::min<int64_t>(kColumnBlock, lines));
}

}  // namespace fk::cuda
