// This file holds what the kernels share in which a warp walks along rows of time, each lane with a
// vector of channels.
#pragma once

#include <climits>

#include "cuda/mma.cuh"
#include "cuda/row_partition.cuh"
#include "ops/causal_conv1d/cuda/conv.cuh"

namespace fk::cuda {

__device__ __forceinline__ void prefetch_to_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Brings kCount rows to L2 at once; each lane brings a line of 128 bytes of them.
template <class T, int kVec, int kCount>
struct RowPrefetch {
  static constexpr int kLine = 128 / static_cast<int>(sizeof(T));
  static constexpr int kLines = ceil_div(32 * kVec, kLine);  // of a row
  static_assert(kCount * kLines <= 32);
  const T* from;
  int row;

  // `x` is the lane's vector in the first row.
  __device__ __forceinline__ RowPrefetch(const T* x, int64_t step, int lane)
      : from(x - lane * kVec + lane / kLines * step + lane % kLines * kLine),
        row(lane < kCount * kLines ? lane / kLines : INT_MAX / 2) {}

  // Brings rows from `t` on, where there are `rows`.
  __device__ __forceinline__ void operator()(int t, int64_t step, int rows) const {
    if (row + t < rows) prefetch_to_l2(from + t * step);
  }
};

// The rows of a warp pass through a ring in shared memory, kRows at a time. A lane copies 16 bytes
// of them at once, which other lanes use. Single elements (kVec = 1) may have any stride: each lane
// copies its own, and waits.
template <class T, int kVec, int kRows>
struct RowRing {
  static constexpr int kStages = 4;
  static constexpr int kWide = 32 * kVec, kStage = kRows * kWide;
  static constexpr int kPiece = kVec > 1 ? kVecWidth<T> : 1;  // elements that a lane copies at once
  static constexpr int kLanes = kWide / kPiece;               // that copy one row
  static constexpr int kTogether = 32 / kLanes;               // rows
  using Shared = T[kStages * kStage];
  T *to, *own;  // the lane's piece of stage 0, and its vector of it
  const T* from;
  int64_t step;
  int copied = 0, used = 0;  // stages
  int lane_row, rows;        // `rows` there are to copy
  bool there;                // the lane's piece is within the channels

  // `x` is the lane's vector in row 0. `channels` exist from the warp's first on.
  __device__ __forceinline__ RowRing(Shared& ring, const T* x, int64_t step, int lane,
                                     int64_t channels, int rows)
      : step(step), rows(rows) {
    const int column = lane % kLanes * kPiece;
    lane_row = lane / kLanes;
    there = column < channels;
    to = ring + lane_row * kWide + column;
    own = ring + lane * kVec;
    from = kVec > 1 ? x - lane * kVec + lane_row * step + column : x;
  }

  __device__ __forceinline__ void copy() {
    T* place = to + copied % kStages * kStage;
    const int left = rows - copied * kRows;
    if constexpr (kVec == 1) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        place[r * kWide] = there && r < left ? from[r * step] : from_float<T>(0.f);
      }
    } else if (there && left >= kRows) {
#pragma unroll
      for (int r = 0; r < kRows; r += kTogether) {
        copy_16_bytes(shared_address(place + r * kWide), from + r * step, true);
      }
    } else {
#pragma unroll
      for (int r = 0; r < kRows; r += kTogether) {
        copy_16_bytes(shared_address(place + r * kWide), from + r * step,
                      there && lane_row + r < left);
      }
    }
    from += kRows * step;
    ++copied;
  }

  // Returns the lane's vector in row r of the stage in use.
  __device__ __forceinline__ const T* at(int r) const {
    return own + used % kStages * kStage + r * kWide;
  }
};

// Holds the last kTaps inputs; row t of the walk is at t % kTaps.
template <int kTaps, int kVec>
struct RowWindow {
  float rows[kTaps][kVec];

  // Begins with the inputs before row 0.
  template <class T>
  __device__ __forceinline__ explicit RowWindow(const RawVec<T, kVec> (&before)[kTaps - 1])
      : rows{} {
#pragma unroll
    for (int k = 1; k < kTaps; ++k) before[k - 1].unpack_to(rows[k]);
  }

  // Returns the input of tap k at row r.
  __device__ __forceinline__ float at(int r, int k, int c) const {
    return rows[(r + 1 + k) % kTaps][c];
  }

  __device__ __forceinline__ float sum(const ConvArgs& a, const ConvWeights<kTaps, kVec>& w, int r,
                                       int c) const {
    float sum = w.bias[c];
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      if (has_tap<kTaps>(a, k)) sum = fmaf(w.tap[k][c], at(r, k, c), sum);
    }
    return sum;
  }

  // Makes row 0 the next one again, after a row 0.
  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
#pragma unroll
      for (int k = 1; k + 1 < kTaps; ++k) rows[k][c] = rows[k + 1][c];
      rows[kTaps - 1][c] = rows[0][c];
    }
  }
};

// Tells which segment and channels a warp of a block has: tiles of 32 vectors across the channels,
// and strips of a segment for each warp.
template <int kVec, int kWarps>
struct RowPlace {
  int lane, warp;
  int64_t strip, slot, first, channel;  // `first` of the tile

  __device__ __forceinline__ explicit RowPlace(const ConvArgs& a) {
    lane = threadIdx.x % 32;
    warp = threadIdx.x / 32;
    const int64_t block = block_index();
    strip = divide_likely_small(block, a.tiles);
    slot = strip * kWarps + warp;
    first = (block - strip * a.tiles) * 32 * kVec;
    channel = first + lane * kVec;
  }
};

}  // namespace fk::cuda
