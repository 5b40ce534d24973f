// A matrix product on the FMA units, for what Turing's tensor cores cannot multiply, float and
// bfloat16, and anywhere for floats of a call that asks for it (on_float_units). C[m, n] = sum over
// k of A[m, k] B[n, k].
//
// Floor: M N K multiply-adds, 64 a clock and multiprocessor of a T4. A block has four warps and a
// tile of 64 x 64, a thread 8 x 4 of it; a slice of K goes from global memory through registers
// into one of two places in shared memory, as floats, while the slice before is multiplied. Sums
// over 64 of K meet those of the rest only then: errors grow with the square root of their number.
#pragma once

#include "cuda/gemm/portable_epilogue.cuh"
#include "cuda/gemm/portable_operand.cuh"

namespace fk::cuda {

struct FloatUnitsTile {
  static constexpr int kRows = 64, kColumns = 64, kThreads = 128;
  static constexpr int kPitch = 64 + 4;  // of a row of 64 in shared memory, which is one of K
};

// A thread's part of a slice of one operand.
template <class T>
struct FloatUnitsSlice {
  static constexpr int kWidth = kVecWidth<T>, kDepth = sizeof(T) == 2 ? 32 : 16;
  static constexpr int kThreads = FloatUnitsTile::kThreads, kPitch = FloatUnitsTile::kPitch;
  static constexpr int kCount = 64 * kDepth / kThreads / kWidth;

  const ProductOperand& from;
  const OuterRange range;
  Vec<T, kWidth> values[kCount];

  __device__ __forceinline__ void place(int index, int* outer, int* k) const {
    *outer = from.rows_are_outer ? index / kDepth : index % 64;
    *k = from.rows_are_outer ? index % kDepth : index / 64;
  }
  __device__ __forceinline__ void fetch(int64_t k, int64_t end) {
    if (!from.in_vectors) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int outer, inner;
      place((static_cast<int>(threadIdx.x) + i * kThreads) * kWidth, &outer, &inner);
      values[i] = Vec<T, kWidth>{};
      const int64_t at = range.index(outer);
      if (at >= 0 && k + inner < end) values[i] = load<kWidth>(from.at<T>(at, k + inner));
    }
  }
  __device__ __forceinline__ void put(float* to, int64_t k, int64_t end) const {
    if (!from.in_vectors) {
#pragma unroll 1
      for (int i = threadIdx.x; i < 64 * kDepth; i += kThreads) {
        int outer, inner;
        place(i, &outer, &inner);
        const int64_t at = range.index(outer);
        const bool there = at >= 0 && k + inner < end;
        to[inner * kPitch + outer] = there ? to_float(from.element<T>(at, k + inner)) : 0.f;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int outer, inner;
      place((static_cast<int>(threadIdx.x) + i * kThreads) * kWidth, &outer, &inner);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const int at =
            from.rows_are_outer ? (inner + e) * kPitch + outer : inner * kPitch + outer + e;
        to[at] = to_float(values[i].data[e]);
      }
    }
  }
};

template <class T>
__global__ void __launch_bounds__(FloatUnitsTile::kThreads, 2)
    portable_product_in_float(const __grid_constant__ PortableArguments a) {
  using Tile = FloatUnitsTile;
  using Slice = FloatUnitsSlice<T>;
  constexpr int kPitch = Tile::kPitch, kDepth = Slice::kDepth;
  constexpr int64_t kStretch = 64;
  __shared__ __align__(16) float tiles[2][2][kDepth * kPitch];
  int row_tile, column_tile;
  a.order.place(blockIdx.x, &row_tile, &column_tile);
  const int64_t row = int64_t{row_tile} * Tile::kRows;
  const int64_t column = int64_t{column_tile} * Tile::kColumns;
  const int first_row = threadIdx.x / 16 * 8, first_column = threadIdx.x % 16 * 4;
  const int64_t slices = (a.depth + kDepth - 1) / kDepth;
  const int64_t each = (slices + a.splits - 1) / a.splits;
  const int64_t begin = blockIdx.y * each * kDepth;
  const int64_t end = begin + each * kDepth < a.depth ? begin + each * kDepth : a.depth;
  float sum[8][4] = {}, part[8][4] = {};
  const auto gather = [&] {
#pragma unroll
    for (int r = 0; r < 8; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sum[r][c] += part[r][c];
        part[r][c] = 0;
      }
    }
  };
  Slice left{a.a, {row, a.rows, 0}, {}};
  Slice right{a.b, {a.gated ? column / 2 : column, a.columns, a.gated ? a.columns : 0}, {}};
  left.fetch(begin, end);
  right.fetch(begin, end);
  int stage = 0;
#pragma unroll 1
  for (int64_t k = begin; k < end; k += kDepth, stage ^= 1) {
    float* const from_a = tiles[stage][0];
    float* const from_b = tiles[stage][1];
    left.put(from_a, k, end);
    right.put(from_b, k, end);
    __syncthreads();
    left.fetch(k + kDepth, end);
    right.fetch(k + kDepth, end);
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const Vec<float, 4> x0 = load<4>(from_a + i * kPitch + first_row);
      const Vec<float, 4> x1 = load<4>(from_a + i * kPitch + first_row + 4);
      const Vec<float, 4> w = load<4>(from_b + i * kPitch + first_column);
#pragma unroll
      for (int r = 0; r < 8; ++r) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          part[r][c] = fmaf(r < 4 ? x0.data[r] : x1.data[r - 4], w.data[c], part[r][c]);
        }
      }
    }
    if ((k + kDepth) % kStretch == 0) gather();
  }
  gather();
  __syncthreads();
  const StagedSums<Tile::kRows, Tile::kColumns> staged{&tiles[0][0][0]};
  static_assert(sizeof(tiles) >= staged.kBytes);
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    store(staged.at(first_row + r, first_column),
          Vec<float, 4>{{sum[r][0], sum[r][1], sum[r][2], sum[r][3]}});
  }
  __syncthreads();
  staged.template finish<T, Tile::kThreads>(a, row, column);
}

}  // namespace fk::cuda
