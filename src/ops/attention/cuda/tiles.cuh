// This file holds what the attention kernels on mma.sync share: operands, which tile of which
// sequence a block works on, and tiles of 16-bit elements in shared memory.
//
// Operands are float16 or bfloat16. Others become so in a pass of their own (cuda/rotate.h):
// float32 as two float16 terms, x = scale * (high + low), of which products keep three parts
// (high high + high low + low high), 22 bits, at twice the rate of TF32; bfloat16 on Turing as one
// scaled term.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/convert.cuh"
#include "cuda/launch.h"
#include "cuda/mma.cuh"
#include "ops/attention/problem.h"

namespace fk::cuda::attention {

using fk::attention::Mask;
using fk::attention::Problem;
using fk::attention::Sequence;
using fk::attention::View;

using fk::attention::kLn2;
using fk::attention::kLog2e;

// The host chooses a tile by these: on sm_90, on sm_80 and later, where shared memory is short
// (sm_86) and on Turing, or on Turing alone. Elsewhere its kernel is empty.
enum class Use { kHopper, kLarge, kSmall, kTuring };

#if !defined(__CUDA_ARCH__)
template <class Tile>
constexpr bool kCompiled = true;
#elif __CUDA_ARCH__ >= 800
template <class Tile>
constexpr bool kCompiled = Tile::kUse == Use::kLarge ||
                           Tile::kUse == (__CUDA_ARCH__ < 900 ? Use::kSmall : Use::kHopper);
#else
template <class Tile>
constexpr bool kCompiled = (Tile::kUse == Use::kSmall || Tile::kUse == Use::kTuring) &&
                           !std::is_same_v<typename Tile::T, __nv_bfloat16>;
#endif

// Returns the power of two that brings values up to the given magnitude (as bits) below 2^15:
// float16 holds them and what their first 11 bits leave over. Its reciprocal is finite, too.
__device__ __forceinline__ int scale_exponent(uint32_t magnitude) {
  const int exponent = static_cast<int>(magnitude >> 23) - 14;
  return exponent < 27 ? 27 : exponent;
}
// Operands take one scale for all magnitudes in [2^-6, 2^7), so that most need not be read twice:
// the least of them leaves an error of 2^-27 of it.
constexpr int kUsualExponent = 127 - 8;
constexpr uint32_t kUsualBegin = (127 - 6) << 23, kUsualEnd = (127 + 7) << 23;
__device__ __forceinline__ int operand_exponent(uint32_t magnitude) {
  return magnitude >= kUsualBegin && magnitude < kUsualEnd ? kUsualExponent
                                                           : scale_exponent(magnitude);
}
__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent) << 23);
}

// Describes q, k, v or dout as kernels read them, as 16-bit elements.
struct Operand {
  const uint16_t* data = nullptr;
  int64_t batch = 0, row = 0, head = 0, column = 0;  // strides, in elements
  int64_t low = 0;                                   // from a high term to its low one
  // Holds the largest finite magnitudes of scaled operands as bits, (batch, key heads). NULL means
  // that they are not scaled.
  const uint32_t* maxima = nullptr;
  int kv_heads = 0;
  int columns = 0;       // others are read as 0
  bool vectors = false;  // 16 bytes at a time: unit stride, all rows aligned, columns in eights

  __device__ __forceinline__ int64_t offset(int64_t b, int64_t r, int64_t h) const {
    return b * batch + r * row + h * head;
  }
  __device__ __forceinline__ const uint16_t* at(int64_t b, int64_t r, int64_t h) const {
    return data + offset(b, r, h);
  }
  // Returns what elements are to be multiplied with.
  __device__ __forceinline__ float scale(int64_t b, int kv_head) const {
    return maxima == nullptr ? 1.f : power_of_two(operand_exponent(maxima[b * kv_heads + kv_head]));
  }
  __device__ __forceinline__ float largest(int64_t b, int kv_head) const {
    return __uint_as_float(maxima[b * kv_heads + kv_head]);
  }
};

// Returns what products of the two are to be multiplied with. It would underflow for operands that
// are next to nothing, and a masked score, -inf, times 0 is NaN.
__device__ __forceinline__ float product_scale(float x, float y) { return fmaxf(x * y, 0x1p-100f); }

// Returns a quotient and sets what is left over. 32-bit divisions are far quicker.
__device__ __forceinline__ int64_t divide(int64_t a, int64_t b, int64_t* rest) {
  const int64_t quotient =
      ((a | b) >> 32) == 0 ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
  *rest = a - quotient * b;
  return quotient;
}

// Describes a block's work: rows [begin, begin + kRows) of a sequence.
struct BlockRows {
  int64_t batch;  // of the tensors: 0 where sequences are packed
  int64_t b;      // the sequence
  int head;
  int begin;
  bool any;
};

// Says whether a block owns rows of q or rows of k.
enum class Owned { kQueries, kKeys };

// Finds tile `index`, where every sequence is cut into tiles of kRows rows of what blocks own.
// Grids are (tiles, heads); see tile_grid. The last `together` heads of a batch come tile by tile
// (see heads_together). Packed sequences are looked up by each warp, 32 at a time.
template <int kRows, Owned kOwned>
__device__ __forceinline__ BlockRows find_block_rows(const Problem& p, int tiles, int heads,
                                                     int together, bool last_first) {
  int64_t rest;
  int tile;
  if (gridDim.y == 1) {  // 32-bit divisions are far quicker
    unsigned row = blockIdx.x / static_cast<unsigned>(tiles);
    tile = static_cast<int>(blockIdx.x - row * tiles);
    const unsigned first = static_cast<unsigned>(p.batch) * heads - together;
    if (together > 0 && row >= first) {
      const unsigned index = blockIdx.x - first * tiles;
      tile = static_cast<int>(index / static_cast<unsigned>(together));
      row = first + index - static_cast<unsigned>(tile) * together;
    }
    rest = row;
  } else {
    const int64_t index = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    rest = index / tiles;
    tile = static_cast<int>(index - rest * tiles);
  }
  if (last_first) tile = tiles - 1 - tile;
  BlockRows place;
  if (!p.packed) {
    place.b = place.batch =
        gridDim.y == 1 ? static_cast<unsigned>(rest) / static_cast<unsigned>(heads) : rest / heads;
    place.head = static_cast<int>(rest - place.b * heads);
    place.begin = tile * kRows;
    place.any = place.b < p.batch;
    return place;
  }
  place.head = static_cast<int>(rest);
  place.batch = 0;
  place.any = false;
  place.b = 0;
  place.begin = 0;
  if (rest >= heads) return place;
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int64_t b0 = 0; b0 < p.batch; b0 += 32) {
    int mine = 0;
    if (b0 + lane < p.batch) {
      const Sequence s = p.sequence(b0 + lane);
      mine = static_cast<int>(ceil_div(kOwned == Owned::kQueries ? s.q_len : s.k_len, kRows));
    }
    int sum = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    const int total = __shfl_sync(0xffffffffu, sum, 31);
    if (tile < before + total) {
      const unsigned found = __ballot_sync(0xffffffffu, tile < before + sum);
      const int owner = __ffs(found) - 1;
      const int start = __shfl_sync(0xffffffffu, sum - mine, owner);
      place.b = b0 + owner;
      place.begin = (tile - before - start) * kRows;
      place.any = true;
      return place;
    }
    before += total;
  }
  return place;
}

// Returns the tiles of a batch entry, or of all packed sequences.
inline int64_t tile_count(const Problem& p, int64_t length, int rows) {
  return p.packed ? length / rows + p.batch : ceil_div(length, rows);
}

inline dim3 tile_grid(const Problem& p, int64_t tiles, int64_t heads) {
  return grid_of(tiles * heads * (p.packed ? 1 : p.batch));
}

// Tells which keys a query sees, as 32-bit numbers, since sequences are shorter than 2^30.
struct Window {
  int offset;       // where query 0 sits
  int left, right;  // at most 2^30
  int keys;

  __device__ __forceinline__ Window(const Mask& mask, const Sequence& s) {
    constexpr int64_t kFar = int64_t{1} << 30;
    offset = static_cast<int>(s.k_len - s.q_len);
    left = static_cast<int>(mask.left < kFar ? mask.left : kFar);
    right = static_cast<int>(mask.right < kFar ? mask.right : kFar);
    keys = static_cast<int>(s.k_len);
  }
  __device__ __forceinline__ int first(int i) const {
    const int first = i + offset - left;
    return first < 0 ? 0 : first;
  }
  __device__ __forceinline__ int end(int i) const {
    const int end = i + offset + (right + 1);
    return end > keys ? keys : end;
  }
  __device__ __forceinline__ bool sees(int i, int j) const { return j >= first(i) && j < end(i); }
  // Returns the first of the queries that see key j; end_query returns where they end, of
  // `queries`.
  __device__ __forceinline__ int first_query(int j) const {
    const int first = j - right - offset;
    return first < 0 ? 0 : first;
  }
  __device__ __forceinline__ int end_query(int j, int queries) const {
    const int end = j + left - offset + 1;
    return end > queries ? queries : end;
  }
};

// Holds what a block works on. It lies in shared memory where registers are short.
struct Block {
  BlockRows place;
  Sequence sequence;
  Window window;
};

// Addresses a tile in shared memory, which has kDim columns of 16 bits; the 16-byte pieces of row r
// are swapped among 8 neighbours by r % 8 (narrow tiles: among as many as there are), so that both
// rows and columns of 8 pieces spread over all banks.
template <int kDim>
__device__ __forceinline__ uint32_t piece(uint32_t tile, int row, int column_piece) {
  const int swap = kDim >= 64 ? row & 7 : kDim == 32 ? (row >> 1) & 3 : (row >> 2) & 1;
  return tile + row * (kDim * 2) + ((column_piece ^ swap) << 4);
}

// Says how a lane addresses the four 8x8 matrices of a 16x16 patch: stacked (two along rows, then
// two along columns) or side by side (columns first).
enum class Patch { kStacked, kSide };

template <int kDim>
struct LaneAddress {
  uint32_t lane;

  __device__ __forceinline__ LaneAddress(uint32_t tile, Patch patch,
                                         unsigned thread = threadIdx.x) {
    const int l = thread % 32;
    const int row = patch == Patch::kStacked ? l & 15 : (l & 7) | ((l >> 4) << 3);
    const int column = patch == Patch::kStacked ? l >> 4 : (l >> 3) & 1;
    lane = piece<kDim>(tile, row, column);
  }
  // Returns an address `columns` further, a multiple of 16. at() may then reach as far as the next
  // multiple of 64, or over whole ones.
  __device__ __forceinline__ LaneAddress moved(int columns) const {
    LaneAddress copy = *this;
    copy.lane = (lane ^ (((columns / 8) & 7) << 4)) + columns / 64 * 128;
    return copy;
  }
  __device__ __forceinline__ LaneAddress fresh() const {
    LaneAddress copy = *this;
    asm volatile("" : "+r"(copy.lane));
    return copy;
  }
  // Returns the address of the patch at `row`, a multiple of 8, and `column`, a multiple of 16.
  __device__ __forceinline__ uint32_t at(int row, int column) const {
    return (lane ^ (((column / 8) & 7) << 4)) + row * (kDim * 2) + column / 64 * 128;
  }
};

// Makes a value unknown to the compiler, which else keeps multiples of it in registers over a loop
// that has none to spare.
__device__ __forceinline__ void hide(int64_t& x) { asm volatile("" : "+l"(x)); }

// Returns threadIdx.x, read anew for the same reason.
__device__ __forceinline__ int thread_index() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// Says how many copies are unrolled. On Turing they go through registers, which tiles with few
// threads have none to spare of.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <int kThreads>
constexpr int kCopiesAtOnce = kThreads > 64 ? 4 : 1;
constexpr int kColumnsAhead = 1;
#else
template <int kThreads>
constexpr int kCopiesAtOnce = 4;
constexpr int kColumnsAhead = 4;
#endif

// Copies kRows rows of 16-byte pieces; those from `valid` on become zeros. `thread` of kThreads
// reads its first piece at `from`. The copies are complete after copies_wait and a barrier.
template <int kDim, int kRows, int kThreads>
__device__ __forceinline__ void copy_rows(uint32_t tile, const Operand& x, const uint16_t* from,
                                          int thread, int valid) {
  constexpr int kPieces = kDim / 8, kStep = kThreads / kPieces;
  static_assert(kThreads % kPieces == 0 && kRows % kStep == 0);
  const int column = thread % kPieces, first = thread / kPieces;
  valid = column * 8 < x.columns ? valid - first : 0;
  int64_t step = kStep * x.row;
  hide(step);
#pragma unroll(kCopiesAtOnce <kThreads>)
  for (int r = 0; r < kRows; r += kStep) {
    copy_16_bytes(piece<kDim>(tile, first + r, column), from, r < valid);
    from += step;
  }
}

// Copies rows from the tile's first row on. With kAnyStrides operands that do not allow
// accesses of 16 bytes are read element by element.
constexpr bool kAnyStrides = true;
template <int kDim, int kRows, int kThreads, bool kAnyStride>
__device__ __forceinline__ void load_tile(uint32_t tile, const Operand& x, const uint16_t* rows,
                                          int valid) {
  constexpr int kPieces = kDim / 8, kStep = kThreads / kPieces;
  const int thread = thread_index();
  const int column = thread % kPieces, first = thread / kPieces;
  if constexpr (kAnyStride) {
    if (!x.vectors) {
      const int wanted = x.columns - column * 8;
#pragma unroll 1
      for (int r = first; r < kRows; r += kStep) {
        uint32_t words[4] = {};
        if (r < valid) {
          const uint16_t* from = rows + r * x.row + column * 8 * x.column;
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            if (e < wanted) {
              words[e / 2] |= static_cast<uint32_t>(from[e * x.column]) << (e % 2 * 16);
            }
          }
        }
        store_shared(piece<kDim>(tile, r, column),
                     make_uint4(words[0], words[1], words[2], words[3]));
      }
      return;
    }
  }
  copy_rows<kDim, kRows, kThreads>(tile, x, rows + first * x.row + column * 8, thread, valid);
}

// Sums that atomics add to lie in patches of 16 rows x 8 columns, in the order in which the lanes
// of a warp hold them after a product, so that a warp adds to whole lines. Patches of the same rows
// stand one after another. Each sequence's rows begin a new patch: first_patch_row says where among
// the patch_rows of a head.
inline int64_t patch_rows(const Problem& p, int64_t length) {
  return (length / 16 + (p.packed ? p.batch + 1 : length % 16 != 0)) * 16;
}
__device__ __forceinline__ int64_t first_patch_row(const Problem& p, int64_t begin, int64_t b) {
  return p.packed ? (begin / 16 + b) * 16 : 0;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr int kPatchLane = 4, kPatchElement = 1;
#else
constexpr int kPatchLane = 1, kPatchElement = 32;
#endif
// Adds a warp's sums times `factor`. `patch` is where this lane's first element lies, and sums have
// `columns` columns. Only the first `rows` rows of patches, and `count` patches of each, count.
template <int kColumnTiles, int kRowTiles>
__device__ __forceinline__ void add_patches(float* patch,
                                            const float (&x)[kRowTiles][kColumnTiles][4],
                                            float factor, int columns, int rows, int count) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      if (m < rows && n < count) {
        float* to = patch + n * 128;
        const float(&four)[4] = x[m][n];
        if constexpr (kPatchElement == 1) {
          add_four(to, four[0] * factor, four[1] * factor, four[2] * factor, four[3] * factor);
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) add_one(to + e * kPatchElement, four[e] * factor);
        }
      }
    }
    patch += 16 * columns;
  }
}

// Returns the address of an element in a tile of float32 on its way out.
template <int kDim>
__device__ __forceinline__ uint32_t float_place(uint32_t tile, int row, int column) {
  return tile + row * (kDim * 4) + (((column >> 2) ^ (row & 7)) << 4) + (column & 3) * 4;
}

}  // namespace fk::cuda::attention
