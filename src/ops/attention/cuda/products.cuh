// This file computes products of tiles (cuda/tiles.cuh) by one warp, and what goes into them. With
// two terms an operand, three products are added up, the small ones apart from the large.
#pragma once

#include "ops/attention/cuda/tiles.cuh"

namespace fk::cuda::attention {

// Returns what is left over of two floats by pack_pair<__half>, which made `high` of them.
__device__ __forceinline__ uint32_t pack_rest(float x, float y, uint32_t high) {
  __half2 pair;
  memcpy(&pair, &high, sizeof(high));
  const float2 h = __half22float2(pair);
  return pack_pair<__half>(x - h.x, y - h.y);
}

// Makes 16-byte pieces of the two terms of eight numbers times `factor`. A number that is not
// finite has no low term.
__device__ __forceinline__ void split_eight(const float (&values)[8], float factor, uint4* high,
                                            uint4* low) {
  uint32_t h[4], l[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x = values[2 * i] * factor, y = values[2 * i + 1] * factor;
    h[i] = pack_pair<__half>(x, y);
    __half2 pair;
    memcpy(&pair, &h[i], sizeof(pair));
    const float2 f = __half22float2(pair);
    l[i] = pack_pair<__half>(isfinite(f.x) ? x - f.x : 0.f, isfinite(f.y) ? y - f.y : 0.f);
  }
  *high = make_uint4(h[0], h[1], h[2], h[3]);
  *low = make_uint4(l[0], l[1], l[2], l[3]);
}

__device__ __forceinline__ float larger_finite(float largest, const float (&values)[8]) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float x = fabsf(values[e]);
    if (x > largest && x <= 3.402823466e38f) largest = x;
  }
  return largest;
}

// Splits a tile of float32 into two terms, with a scale of its own.
struct TileScale {
  int exponent;
  uint32_t magnitude;  // the largest finite one that this thread has met, as bits
};
template <int kDim, int kRows, int kThreads>
__device__ __forceinline__ TileScale split_tile(uint32_t tile, const Operand& x, const float* rows,
                                                int valid) {
  constexpr int kPieces = kDim / 8, kStep = kThreads / kPieces;
  constexpr int kAtOnce = kRows % (kStep * 4) == 0 ? 4 : 2;
  static_assert(kRows % (kStep * kAtOnce) == 0);
  const int column = threadIdx.x % kPieces, first = threadIdx.x / kPieces;
  const int wanted = x.columns - column * 8;
  const auto split = [&](int exponent) {
    float largest = 0.f;
#pragma unroll 1
    for (int r0 = first; r0 < kRows; r0 += kStep * kAtOnce) {
      float values[kAtOnce][8] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int r = r0 + i * kStep;
        const float* from = rows + r * x.row + column * 8 * x.column;
        if (r >= valid || wanted <= 0) continue;
        if (x.vectors) {
#pragma unroll
          for (int e = 0; e < 8; e += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + e);
            values[i][e] = four.x;
            values[i][e + 1] = four.y;
            values[i][e + 2] = four.z;
            values[i][e + 3] = four.w;
          }
        } else {
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            if (e < wanted) values[i][e] = from[e * x.column];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        uint4 high, low;
        split_eight(values[i], power_of_two(254 - exponent), &high, &low);
        const uint32_t to = piece<kDim>(tile, r0 + i * kStep, column);
        store_shared(to, high);
        store_shared(to + kRows * kDim * 2, low);
        largest = larger_finite(largest, values[i]);
      }
    }
    return largest;
  };
  const uint32_t magnitude = __float_as_uint(split(kUsualExponent));
  if (!__syncthreads_or(magnitude >= kUsualEnd) && __syncthreads_or(magnitude >= kUsualBegin)) {
    return {kUsualExponent, magnitude};
  }
  uint32_t largest = 0;  // its exponent, bit by bit
#pragma unroll 1
  for (uint32_t bit = 1u << 30; bit >= 1u << 23; bit >>= 1) {
    if (__syncthreads_or(magnitude >= (largest | bit))) largest |= bit;
  }
  split(scale_exponent(largest));
  return {scale_exponent(largest), magnitude};
}

// Packs two floats, with their low terms where there are two terms.
template <class T, int kTerms>
__device__ __forceinline__ void split_pair(uint32_t (&words)[kTerms], float x, float y) {
  words[0] = pack_pair<T>(x, y);
  if constexpr (kTerms == 2) words[1] = pack_rest(x, y, words[0]);
}

// The left side of a product lies in registers or in shared memory. get() gives the fragments of 16
// columns.
template <int kSteps_, int kTerms, int kRowTiles>
struct Fragments {
  static constexpr int kSteps = kSteps_;
  uint32_t fragments[kSteps][kTerms][kRowTiles][4];

  __device__ __forceinline__ void get(uint32_t (&a)[kTerms][kRowTiles][4], int step) const {
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[term][m][e] = fragments[step][term][m][e];
      }
    }
  }
};

template <int kDim, bool kFully = false>
struct FromShared {
  // Long rows are not unrolled fully, because that takes more registers than some kernels have.
  static constexpr int kUnrolled = kDim >= 256 && !kFully ? 4 : kDim / 16;
  LaneAddress<kDim> at;  // stacked
  int term_bytes;

  template <int kTerms, int kRowTiles>
  __device__ __forceinline__ void get(uint32_t (&a)[kTerms][kRowTiles][4], int step) const {
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        load_matrices(a[term][m], at.at(m * 16, step * 16) + term * term_bytes);
      }
    }
  }
};

template <int kDim, int kTerms, int kRowTiles>
struct FromRegisters : Fragments<kDim / 16, kTerms, kRowTiles> {
  static constexpr int kUnrolled = kDim / 16;

  __device__ __forceinline__ void load(const FromShared<kDim>& from) {
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) from.get(this->fragments[step], step);
  }
};

// Computes s = a b^T of one warp. b's rows lie in shared memory (side by side), and kDim columns
// are summed over.
template <class T, int kTerms, int kDim, int kRowTiles, int kColumnTiles, class Left>
__device__ __forceinline__ void multiply_transposed(float (&s)[kRowTiles][kColumnTiles][4],
                                                    const Left& left, const LaneAddress<kDim>& b_at,
                                                    int b_term_bytes) {
  // The tensor cores truncate sums, so the small cross terms have one of their own.
  constexpr bool kCross = kTerms == 2;
  float cross[kCross ? kRowTiles : 1][kCross ? kColumnTiles : 1][4] = {};
  // Long rows are added up outside, 64 columns at a time.
  constexpr bool kLong = kCross && kDim == 256;
  float total[kLong ? kRowTiles : 1][kLong ? kColumnTiles : 1][4] = {};
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[m][n][e] = 0.f;
    }
  }
#pragma unroll(Left::kUnrolled)
  for (int d = 0; d < kDim / 16; ++d) {
    uint32_t a[kTerms][kRowTiles][4];
    left.get(a, d);
#pragma unroll
    for (int n = 0; n < kColumnTiles / 2; ++n) {
      uint32_t b[kTerms][4];
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        load_matrices(b[term], b_at.at(n * 16, d * 16) + term * b_term_bytes);
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if constexpr (kCross) {
            mma_16816(cross[m][2 * n + h], a[0][m], b[1][2 * h], b[1][2 * h + 1], T());
            mma_16816(cross[m][2 * n + h], a[1][m], b[0][2 * h], b[0][2 * h + 1], T());
          }
          mma_16816(s[m][2 * n + h], a[0][m], b[0][2 * h], b[0][2 * h + 1], T());
        }
      }
    }
    if constexpr (kLong) {
      if (d % 4 == 3) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              total[m][n][e] += s[m][n][e];
              s[m][n][e] = 0.f;
            }
          }
        }
      }
    }
  }
  if constexpr (kCross) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[m][n][e] = cross[m][n][e] + (kLong ? total[m][n][e] : s[m][n][e]);
        }
      }
    }
  }
}

// A product's result is the left side of the next one.
template <class T_, int kTerms_, int kRowTiles, int kColumns>
struct Packed : Fragments<kColumns / 16, kTerms_, kRowTiles> {
  using T = T_;
  static constexpr int kTerms = kTerms_;

  // Sets two neighbours, term by term, in row g + 8 r of the row tile m, column tile n.
  __device__ __forceinline__ void set(int m, int n, int r, const uint32_t (&words)[kTerms]) {
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      this->fragments[n / 2][term][m][n % 2 * 2 + r] = words[term];
    }
  }
  __device__ __forceinline__ void pack(const float (&x)[kRowTiles][kColumns / 8][4]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          uint32_t words[kTerms];
          split_pair<T>(words, x[m][n][2 * r], x[m][n][2 * r + 1]);
          set(m, n, r, words);
        }
      }
    }
  }
};

// Adds a b of one warp to out. b's rows, which are summed over, lie in shared memory (stacked).
template <int kDim, class Left, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void multiply_add(float (&out)[kRowTiles][kColumnTiles][4],
                                             const Left& left, const LaneAddress<kDim>& b_at,
                                             int b_term_bytes) {
  using T = typename Left::T;
  constexpr int kSteps = Left::kSteps;
  if constexpr (Left::kTerms == 1) {
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      uint32_t a[1][kRowTiles][4];
      left.get(a, j);
#pragma unroll
      for (int n = 0; n < kColumnTiles / 2; ++n) {
        uint32_t b[4];
        load_matrices_transposed(b, b_at.at(j * 16, n * 16));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma_16816(out[m][2 * n], a[0][m], b[0], b[1], T());
          mma_16816(out[m][2 * n + 1], a[0][m], b[2], b[3], T());
        }
      }
    }
  } else {
    // The tensor cores truncate sums. So long ones are added up outside, and within a tile the
    // small cross terms come first.
    uint32_t a[kSteps][2][kRowTiles][4];
#pragma unroll
    for (int j = 0; j < kSteps; ++j) left.get(a[j], j);
#pragma unroll
    for (int n = 0; n < kColumnTiles / 2; ++n) {
      // This holds the loads of later columns back, because their registers are not free yet.
      if (kRowTiles == 2 || n % kColumnsAhead == 0) __syncwarp();
      float sum[kRowTiles][2][4] = {};
      uint32_t b[kSteps][2][4];
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        load_matrices_transposed(b[j][0], b_at.at(j * 16, n * 16));
        load_matrices_transposed(b[j][1], b_at.at(j * 16, n * 16) + b_term_bytes);
      }
#pragma unroll
      for (int product = 0; product < 3; ++product) {
        const int of_a = product == 1, of_b = product == 0;
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              mma_16816(sum[m][h], a[j][of_a][m], b[j][of_b][2 * h], b[j][of_b][2 * h + 1], T());
            }
          }
        }
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int e = 0; e < 4; ++e) out[m][2 * n + h][e] += sum[m][h][e];
        }
      }
    }
  }
}

// Writes the sums of one warp into a tile of float32.
template <int kDim, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void put_sums(uint32_t tile,
                                         const float (&x)[kRowTiles][kColumnTiles][4], float factor,
                                         int row, int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        store_shared(
            float_place<kDim>(tile, row + m * 16 + r * 8 + lane / 4, column + n * 8 + lane % 4 * 2),
            x[m][n][2 * r] * factor, x[m][n][2 * r + 1] * factor);
      }
    }
  }
}

// Writes the sums of one warp into a tile of 16 bits.
template <int kDim, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void put_halves(uint32_t tile,
                                           const float (&x)[kRowTiles][kColumnTiles][4],
                                           float factor, int row, int column, bool bfloat16) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float a = x[m][n][2 * r] * factor, b = x[m][n][2 * r + 1] * factor;
        store_shared(
            piece<kDim>(tile, row + m * 16 + r * 8 + lane / 4, column / 8 + n) + lane % 4 * 4,
            bfloat16 ? pack_pair<__nv_bfloat16>(a, b) : pack_pair<__half>(a, b));
      }
    }
  }
}

}  // namespace fk::cuda::attention
