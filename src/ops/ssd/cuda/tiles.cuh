// Tiles of a chunk in shared memory, and products of them by one warp on tensor cores. A tile has a
// row for each step of the chunk: of x (channels), of B and C (states), or of the chunk's own
// matrix (steps).
//
// float16 and bfloat16 lie there as they are. A float lies there as three bfloat16 numbers, x = p0
// + p1 + p2, which have all of its bits, in three planes; products keep six of the nine products of
// parts, p0 p0 to p0 p2 and p1 p1, as the others are 2^-26 of a term at most.
//
// Rows are 16 bytes longer than their elements: neither the eight rows of a matrix that ldmatrix
// reads, nor the pairs that the lanes of a warp store to eight rows, share a bank.
#pragma once

#include <type_traits>

#include "cuda/convert.cuh"
#include "cuda/mma.cuh"
#include "ops/ssd/cuda/inputs.h"

namespace fk::cuda::ssd {

template <class T>
constexpr int kParts = std::is_same_v<T, float> ? 3 : 1;
// This is the type that the tensor cores multiply.
template <class T>
using PartOf = std::conditional_t<std::is_same_v<T, float>, __nv_bfloat16, T>;

// Tells whether this architecture multiplies T on tensor cores: Turing has float16 only.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <class T>
constexpr bool kMultiplies = std::is_same_v<T, __half>;
#else
template <class T>
constexpr bool kMultiplies = true;
#endif

// Cuts two neighbours into the pairs of their parts.
template <class T>
__device__ __forceinline__ void split_pair(float low, float high, uint32_t (&words)[kParts<T>]) {
  if constexpr (kParts<T> == 1) {
    words[0] = pack_pair<T>(low, high);
  } else {
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      words[part] = pack_pair<__nv_bfloat16>(low, high);
      low -= __uint_as_float(words[part] << 16);
      high -= __uint_as_float(words[part] & 0xffff0000u);
    }
  }
}

// Returns the pair that split_pair cut.
template <class T>
__device__ __forceinline__ float2 join_pair(const uint32_t (&words)[kParts<T>]) {
  if constexpr (std::is_same_v<T, __half>) {
    __half2 pair;
    memcpy(&pair, &words[0], sizeof(pair));
    return __half22float2(pair);
  } else if constexpr (kParts<T> == 1) {
    return make_float2(__uint_as_float(words[0] << 16), __uint_as_float(words[0] & 0xffff0000u));
  } else {
    float low = 0.f, high = 0.f;
#pragma unroll
    for (int part = kParts<T> - 1; part >= 0; --part) {
      low += __uint_as_float(words[part] << 16);
      high += __uint_as_float(words[part] & 0xffff0000u);
    }
    return make_float2(low, high);
  }
}

// A lane's words of 16 x 16 elements, for each part: of a left operand, or of two right ones of 8
// columns (cuda/mma.cuh), of which words[][0] and [1] are the first.
template <class T>
struct Fragment {
  uint32_t words[kParts<T>][4];
};

// sum += left times right, for 16 rows by two times 8 columns. Tensor cores cut off the last bits
// of their sums: those of floats run over 16 terms only, the small ones apart from the large.
template <class T>
__device__ __forceinline__ void multiply(float (&first)[4], float (&second)[4],
                                         const Fragment<T>& left, const Fragment<T>& right) {
  if constexpr (kParts<T> == 1) {
    mma_16816(first, left.words[0], right.words[0][0], right.words[0][1], T());
    mma_16816(second, left.words[0], right.words[0][2], right.words[0][3], T());
  } else {
    constexpr int kLeft[] = {0, 2, 0, 1, 1, 0}, kRight[] = {0, 0, 2, 1, 0, 1};
    float large[2][4] = {}, small[2][4] = {};
#pragma unroll
    for (int i = 0; i < 6; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t(&words)[4] = right.words[kRight[i]];
        mma_16816(i == 0 ? large[half] : small[half], left.words[kLeft[i]], words[2 * half],
                  words[2 * half + 1], __nv_bfloat16());
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      first[e] += large[0][e] + small[0][e];
      second[e] += large[1][e] + small[1][e];
    }
  }
}

// Returns 16 x 16 numbers that a warp holds as sums of a product, two times 8 columns, as a left
// operand of the next: its rows stay rows.
template <class T>
__device__ __forceinline__ Fragment<T> as_left(const float (&first)[4], const float (&second)[4]) {
  Fragment<T> f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float(&from)[4] = i < 2 ? first : second;
    uint32_t words[kParts<T>];
    split_pair<T>(from[i % 2 * 2], from[i % 2 * 2 + 1], words);
#pragma unroll
    for (int part = 0; part < kParts<T>; ++part) f.words[part][i] = words[part];
  }
  return f;
}

// The rows of a chunk in global memory: from its first step's element on.
template <class T>
struct RowsFrom {
  const T* first;
  int64_t row, column;  // strides
  int columns;          // that exist; others are 0
  bool vectors;

  // `i` is the head or group, `column` the first of its channels or states that are taken, of
  // `size`.
  __device__ __forceinline__ RowsFrom(const Rows& t, int64_t batch, int64_t step, int i, int column,
                                      int size)
      : first(static_cast<const T*>(t.data) + t.offset(batch, step, i, column)),
        row(t.strides[1]),
        column(t.strides[3]),
        columns(size - column),
        vectors(t.vectors) {}
};

template <class T, int kRows, int kColumns>
struct Tile {
  static constexpr int kPitch = kColumns * 2 + 16;  // of a row, in bytes
  static constexpr int kPartBytes = kRows * kPitch;
  static constexpr int kBytes = kParts<T> * kPartBytes;

  uint32_t base;  // in shared memory

  __device__ __forceinline__ uint32_t at(int row, int column) const {
    return base + row * kPitch + column * 2;
  }

  // Copies the chunk's `count` rows, and zeros behind them. Threads 0 to `threads` take part. Where
  // the copies run in the background, they are complete after copies_wait.
  __device__ __forceinline__ void load(const RowsFrom<T>& from, int count, int thread,
                                       int threads) const {
    constexpr int kEights = kColumns / 8, kAtOnce = kParts<T> == 1 && kColumns < 256 ? 2 : 1;
#pragma unroll(kAtOnce)
    for (int i = thread; i < kRows * kEights; i += threads) {
      const int row = i / kEights, column = i % kEights * 8;
      const T* const p = from.first + row * from.row + column * from.column;
      const int wanted = row < count ? from.columns - column : 0;
      if (kParts<T> == 1 && from.vectors) {
        copy_16_bytes(at(row, column), wanted > 0 ? p : from.first, wanted > 0);
        continue;
      }
      float values[8] = {};
      if (from.vectors) {
        if (wanted > 0) unpack_eight(p, values, wanted);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (e < wanted) values[e] = to_float(p[e * from.column]);
        }
      }
      put_eight(row, column, values);
    }
  }

  // Stores two neighbours.
  __device__ __forceinline__ void put_pair(int row, int column, float low, float high) const {
    uint32_t words[kParts<T>];
    split_pair<T>(low, high, words);
#pragma unroll
    for (int part = 0; part < kParts<T>; ++part) {
      store_shared(at(row, column) + part * kPartBytes, words[part]);
    }
  }

  // The loads of 16 x 16 elements from `row` and `column` on. left: rows are the operand's rows.
  // left_turned: columns are. right: rows are the operand's columns. right_turned: columns are.
  __device__ __forceinline__ Fragment<T> left(int row, int column) const {
    return load_parts<false>(stacked(row, column));
  }
  __device__ __forceinline__ Fragment<T> left_turned(int row, int column) const {
    return load_parts<true>(side_by_side(row, column));
  }
  __device__ __forceinline__ Fragment<T> right(int row, int column) const {
    return load_parts<false>(side_by_side(row, column));
  }
  __device__ __forceinline__ Fragment<T> right_turned(int row, int column) const {
    return load_parts<true>(stacked(row, column));
  }

 private:
  // Which row of which of the four matrices of ldmatrix this lane names: the second matrix lies
  // below the first, or to its right.
  __device__ __forceinline__ uint32_t stacked(int row, int column) const {
    const int lane = threadIdx.x % 32;
    return at(row + lane % 16, column + lane / 16 * 8);
  }
  __device__ __forceinline__ uint32_t side_by_side(int row, int column) const {
    const int lane = threadIdx.x % 32;
    return at(row + lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * 8);
  }
  template <bool kTurned>
  __device__ __forceinline__ static Fragment<T> load_parts(uint32_t address) {
    Fragment<T> f;
#pragma unroll
    for (int part = 0; part < kParts<T>; ++part) {
      if constexpr (kTurned) {
        load_matrices_transposed(f.words[part], address + part * kPartBytes);
      } else {
        load_matrices(f.words[part], address + part * kPartBytes);
      }
    }
    return f;
  }
  // Loads floats, four at a time; the last four may not exist.
  __device__ __forceinline__ static void unpack_eight(const T* p, float (&values)[8], int wanted) {
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
      for (int e = 0; e < 8; e += 4) {
        if (e >= wanted) continue;
        const Vec<float, 4> four = fk::cuda::load<4>(p + e);
#pragma unroll
        for (int k = 0; k < 4; ++k) values[e + k] = four.data[k];
      }
    }
  }
  __device__ __forceinline__ void put_eight(int row, int column, const float (&values)[8]) const {
    uint32_t words[kParts<T>][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t pair[kParts<T>];
      split_pair<T>(values[2 * i], values[2 * i + 1], pair);
#pragma unroll
      for (int part = 0; part < kParts<T>; ++part) words[part][i] = pair[part];
    }
#pragma unroll
    for (int part = 0; part < kParts<T>; ++part) {
      store_shared(at(row, column) + part * kPartBytes,
                   make_uint4(words[part][0], words[part][1], words[part][2], words[part][3]));
    }
  }
};

}  // namespace fk::cuda::ssd
