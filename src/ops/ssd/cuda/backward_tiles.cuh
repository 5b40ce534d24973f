// The products of squares in shared memory (backward_load.cuh) that ssd's backward is made of, on
// tensor cores or, for what Turing's tensor cores cannot multiply, on FMA units.
//
// A block's eight warps share the 64 x 64 results: warp w has rows 16 (w / 2) to 16 (w / 2) + 15
// and half of the columns, from 32 (w % 2) on, in the fragments of cuda/mma.cuh.
#pragma once

#include "cuda/gemm/portable_product.cuh"
#include "cuda/major.h"
#include "cuda/mma.cuh"
#include "cuda/parameter.cuh"
#include "ops/ssd/cuda/backward_load.cuh"

namespace fk::cuda::ssd {

// --- a warp's part of results ---

// This is where a warp's fragments lie in a tile: element i of block j is in row + row_of(i) and
// column + column_of(j, i).
struct WarpPlace {
  int row, column;  // of the warp
  int lane;

  __device__ __forceinline__ WarpPlace() : WarpPlace(thread_now()) {}
  __device__ __forceinline__ explicit WarpPlace(int thread)
      : row(thread / 64 * 16), column(thread / 32 % 2 * 32), lane(thread % 32) {}
  __device__ __forceinline__ int row_of(int i) const { return row + lane / 4 + i / 2 * 8; }
  __device__ __forceinline__ int column_of(int j, int i) const {
    return column + 8 * j + lane % 4 * 2 + i % 2;
  }
  // Returns how many of the warp's two groups of 16 columns are needed where `columns` of the
  // tile's are.
  __device__ __forceinline__ int groups_of(int columns) const {
    return columns <= column ? 0 : columns <= column + 16 ? 1 : 2;
  }
  // The same for the lower triangle of a square of steps.
  __device__ __forceinline__ int groups_below() const { return groups_of(row + 16); }
};

// A warp's 16 x 32 sums.
using WarpSums = float[4][4];

__device__ __forceinline__ void clear_sums(WarpSums& sums) {
#pragma unroll
  for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] = 0;
}

// --- products ---

// Loads the fragment of 16 of the outer dimension by 32 bytes of K, as OperandTile does.
template <class S, Major kMajor>
__device__ __forceinline__ void load_square_fragment(uint32_t (&words)[4], const char* tile,
                                                     int outer, int k, int lane) {
  constexpr int kWidth = 16 / static_cast<int>(sizeof(S));
  if constexpr (kMajor == Major::kK) {
    load_matrices(
        words, shared_address(tile + square_place<S>(outer + lane % 16, k + lane / 16 * kWidth)));
  } else if constexpr (sizeof(S) == 2) {
    load_matrices_transposed(
        words, shared_address(
                   tile + square_place<S>(k + lane / 16 * 8 + lane % 8, outer + lane / 8 % 2 * 8)));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = *reinterpret_cast<const uint32_t*>(
          tile + square_place<S>(k + lane % 4 + i / 2 * 4, outer + lane / 4 + i % 2 * 8));
    }
  }
}

template <class S, Major kMajor>
__device__ __forceinline__ float square_element(const char* tile, int outer, int k) {
  const bool along = kMajor == Major::kK;
  return to_float(
      *reinterpret_cast<const S*>(tile + square_place<S>(along ? outer : k, along ? k : outer)));
}

// Adds, to a warp's sums, the product of its rows of `a` and the first `groups` groups of 16 of its
// columns of `b`, over K from `begin` to `end`, multiples of 16.
//
// Floats are three bfloat16 numbers each, whose six products run over 16 of K before they are added
// up in float (cuda/gemm/portable_product.cuh).
template <class S, Major kA, Major kB>
__device__ __forceinline__ void multiply_squares(WarpSums& sums, const WarpPlace& place,
                                                 const char* a, const char* b, int groups,
                                                 int begin, int end) {
  if (groups == 0) return;
  if constexpr (sizeof(S) == 2) {
#pragma unroll 2
    for (int k = begin; k < end; k += 16) {
      uint32_t x[4];
      load_square_fragment<S, kA>(x, a, place.row, k, place.lane);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (c >= groups) break;
        uint32_t w[4];
        load_square_fragment<S, kB>(w, b, place.column + 16 * c, k, place.lane);
        mma_16816(sums[2 * c], x, w[0], w[2], S());
        mma_16816(sums[2 * c + 1], x, w[1], w[3], S());
      }
    }
  } else if constexpr (!kTuring) {
#pragma unroll 1
    for (int k = begin; k < end; k += 16) {
      uint32_t x[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_square_fragment<S, kA>(x[half], a, place.row, k + 8 * half, place.lane);
      }
      const FloatParts left(x);
      constexpr int kLeft[] = {0, 2, 0, 1, 1, 0}, kRight[] = {0, 0, 2, 1, 0, 1};
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (c >= groups) break;
        uint32_t w[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          load_square_fragment<S, kB>(w[half], b, place.column + 16 * c, k + 8 * half, place.lane);
        }
        const FloatParts right(w);
        float large[2][4] = {}, small[2][4] = {};
#pragma unroll
        for (int i = 0; i < 6; ++i) {
          const uint32_t(&parts)[4] = right.words[kRight[i]];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            mma_16816(i == 0 ? large[j] : small[j], left.words[kLeft[i]], parts[j], parts[j + 2],
                      __nv_bfloat16());
          }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sums[2 * c + i / 4][i % 4] += large[i / 4][i % 4] + small[i / 4][i % 4];
        }
      }
    }
  } else {
    WarpSums part = {};
#pragma unroll 1
    for (int k = begin; k < end; ++k) {
      const float x[2] = {square_element<S, kA>(a, place.row_of(0), k),
                          square_element<S, kA>(a, place.row_of(2), k)};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j >= 2 * groups) break;
        const float w[2] = {square_element<S, kB>(b, place.column_of(j, 0), k),
                            square_element<S, kB>(b, place.column_of(j, 1), k)};
#pragma unroll
        for (int i = 0; i < 4; ++i) part[j][i] = fmaf(x[i / 2], w[i % 2], part[j][i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] += part[i / 4][i % 4];
  }
}

// Returns so many of K that a product of tiles runs over where `count` are left.
__device__ __forceinline__ int depth_of(int count) {
  return count >= kSide ? kSide : (count + 15) / 16 * 16;
}

// --- elements of tiles and tensors ---

// Stores two neighbouring columns of a tile.
template <class S>
__device__ __forceinline__ void put_two(char* tile, int row, int column, float x0, float x1) {
  char* const to = tile + square_place<S>(row, column);
  if constexpr (sizeof(S) == 2) {
    *reinterpret_cast<uint32_t*>(to) = pack_pair<S>(x0, x1);
  } else {
    *reinterpret_cast<float2*>(to) = make_float2(x0, x1);
  }
}
template <class S>
__device__ __forceinline__ float2 get_two(const char* tile, int row, int column) {
  const Vec<S, 2> v = load<2>(reinterpret_cast<const S*>(tile + square_place<S>(row, column)));
  return make_float2(to_float(v.data[0]), to_float(v.data[1]));
}

// Stores two neighbours of a row of `columns` elements, from an even column on.
template <class T>
__device__ __forceinline__ void store_two(T* row, int64_t column_stride, bool in_vectors,
                                          int column, int columns, float x0, float x1) {
  if (in_vectors) {
    if (column >= columns) return;
    const float both[2] = {x0, x1};
    store(row + column, pack<T>(both));
    return;
  }
  if (column < columns) row[column * column_stride] = from_float<T>(x0);
  if (column + 1 < columns) row[(column + 1) * column_stride] = from_float<T>(x1);
}

// Stores a warp's sums, of steps of a chunk by columns of a tensor from `from` on.
template <class T>
__device__ __forceinline__ void store_steps(const Rows& to, const Segment& chunk, int head,
                                            int columns, int from, const WarpPlace& place,
                                            const WarpSums& sums) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const int64_t step = chunk.first + place.row_of(i);
    if (step >= chunk.last) continue;
    T* const row = static_cast<T*>(to.data) + to.offset(chunk.batch, step, head);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      store_two(row, to.strides[3], to.vectors, from + place.column_of(j, 0), columns, sums[j][i],
                sums[j][i + 1]);
    }
  }
}

}  // namespace fk::cuda::ssd
