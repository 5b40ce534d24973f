// This file computes attention of a few query rows over one head of the cache, with a running
// softmax.
//
// The floor for one token is reading the cache's bytes. For a prompt it is one multiply-add per
// row, dimension and vector of keys, twice. Rows are taken kRows at a time and keys in tiles of
// kKeyTile: one load of keys per dimension serves the scores of all rows (a lane is a key), and one
// load of values per key serves the sums of all rows (a lane is a dimension).
#include <cmath>
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/attention.cc"
#include "core/integers.h"
#include "cpu/axis_plan.h"
#include "cpu/foreach_target.h"
#include "cpu/gemm/tiles.h"
#include "cpu/simd.h"
#include "engine/kv_cache.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {

using engine::AttentionRows;
using engine::kKeyBlock;
using engine::KvCache;

// The scores of this many keys are held at a time. A chunk of the cache is a whole number of tiles,
// so a tile never crosses from one chunk into the next.
constexpr int64_t kKeyTile = 64;
static_assert(engine::kKeyChunk % kKeyTile == 0);

// Computes scores[r][j] = q[r] . key j for the kRows query rows and the keys of one tile, which
// begins at `keys`. Only the first `blocks` blocks of kKeyBlock keys are read and scored.
template <class T, int kRows>
HWY_INLINE void score_tile(const float* const* q, const T* keys, int64_t head_dim,
                           int64_t padded_dim, int64_t blocks, float (*scores)[kKeyTile]) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t b = 0; b < blocks; ++b) {
    const T* block = keys + b * kKeyBlock * padded_dim;
    for (int64_t part = 0; part < kKeyBlock; part += lanes) {
      hn::Vec<F32> sum[kRows];
      detail::repeat<kRows>([&](auto r) FK_MATRIX_BODY { sum[r] = hn::Zero(d); });
      for (int64_t i = 0; i < head_dim; ++i) {
        const auto key = LoadF32(d, block + i * kKeyBlock + part);
        detail::repeat<kRows>(
            [&](auto r) FK_MATRIX_BODY { sum[r] = hn::MulAdd(key, hn::Set(d, q[r][i]), sum[r]); });
      }
      detail::repeat<kRows>(
          [&](auto r) FK_MATRIX_BODY { hn::StoreU(sum[r], d, scores[r] + b * kKeyBlock + part); });
    }
  }
}

// Adds to each out[r] the sum of p[r][j] * values[j] over the tile's first `keys` keys.
template <class T, int kRows>
HWY_INLINE void add_values(const float (*p)[kKeyTile], const T* values, int64_t padded_dim,
                           int64_t keys, float* const* out) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = 0; i < padded_dim; i += lanes) {
    hn::Vec<F32> sum[kRows];
    detail::repeat<kRows>([&](auto r) FK_MATRIX_BODY { sum[r] = hn::LoadU(d, out[r] + i); });
    for (int64_t j = 0; j < keys; ++j) {
      const auto value = LoadF32(d, values + j * padded_dim + i);
      detail::repeat<kRows>(
          [&](auto r) FK_MATRIX_BODY { sum[r] = hn::MulAdd(value, hn::Set(d, p[r][j]), sum[r]); });
    }
    detail::repeat<kRows>([&](auto r) FK_MATRIX_BODY { hn::StoreU(sum[r], d, out[r] + i); });
  }
}

// Takes the online softmax of one row one tile further: replaces `scores` by exp(score - maximum),
// updates the running maximum and sum, and rescales `out` where the maximum has grown. `keys` is a
// multiple of the vector length; scores that do not count are -infinity.
HWY_INLINE void soften(float* scores, int64_t keys, int64_t padded_dim, float* max, float* sum,
                       float* out) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  auto top = hn::Set(d, -kInfinity);
  for (int64_t j = 0; j < keys; j += lanes) top = hn::Max(top, hn::LoadU(d, scores + j));
  const float tile_max = ReduceMax(d, top);
  if (tile_max > *max) {
    const float factor = *max == -kInfinity ? 0.0f : std::exp(*max - tile_max);
    *sum *= factor;
    *max = tile_max;
    for (int64_t i = 0; i < padded_dim; i += lanes) {
      hn::StoreU(hn::Mul(hn::LoadU(d, out + i), hn::Set(d, factor)), d, out + i);
    }
  }
  const float shift = *max == -kInfinity ? 0.0f : *max;
  auto total = hn::Zero(d);
  for (int64_t j = 0; j < keys; j += lanes) {
    const auto e = Exp(d, hn::Sub(hn::LoadU(d, scores + j), hn::Set(d, shift)));
    total = hn::Add(total, e);
    hn::StoreU(e, d, scores + j);
  }
  *sum += ReduceSum(d, total);
}

// Attends rows [row, row + kRows) of `rows` to the keys in [begin, end), tile by tile.
template <class T, int kRows>
HWY_NOINLINE void attend_tile_rows(const KvCache& cache, int64_t layer, int64_t head,
                                   const AttentionRows& rows, int64_t row, int64_t begin,
                                   int64_t end) {
  const int64_t dim = cache.padded_dim;
  alignas(64) float scores[kRows][kKeyTile];
  int64_t first = rows.first[row], last = rows.last[row];
  int64_t highest_first = first, lowest_last = last;
  for (int r = 0; r < kRows; ++r) {
    rows.max[row + r] = -kInfinity;
    rows.sum[row + r] = 0;
    for (int64_t i = 0; i < dim; ++i) rows.out[row + r][i] = 0;
    first = std::min(first, rows.first[row + r]);
    last = std::max(last, rows.last[row + r]);
    highest_first = std::max(highest_first, rows.first[row + r]);
    lowest_last = std::min(lowest_last, rows.last[row + r]);
  }
  end = std::min(end, last + 1);
  for (int64_t tile = begin; tile < end; tile += kKeyTile) {
    const int64_t count = std::min(kKeyTile, end - tile);
    if (tile + count <= first) continue;
    const int64_t blocks = ceil_div(count, kKeyBlock);
    const T* keys = static_cast<const T*>(cache.keys(layer, head, tile));
    score_tile<T, kRows>(rows.q + row, keys, cache.head_dim, dim, blocks, scores);
    for (int r = 0; r < kRows; ++r) {
      if (tile < highest_first || tile + blocks * kKeyBlock - 1 > lowest_last) {
        const int64_t low = rows.first[row + r] - tile;
        const int64_t high = std::min(rows.last[row + r] - tile, count - 1);
        for (int64_t j = 0; j < blocks * kKeyBlock; ++j) {
          if (j < low || j > high) scores[r][j] = -kInfinity;
        }
      }
      soften(scores[r], blocks * kKeyBlock, dim, &rows.max[row + r], &rows.sum[row + r],
             rows.out[row + r]);
    }
    const T* values = static_cast<const T*>(cache.values(layer, head, tile));
    add_values<T, kRows>(scores, values, dim, count, rows.out + row);
  }
}

// Cuts the rows into groups of as many as there are registers for, for a cache of elements T.
template <class T>
void attend_rows(const KvCache& cache, int64_t layer, int64_t head, const AttentionRows& rows,
                 int64_t begin, int64_t end) {
  constexpr int kMany = HWY_TARGET == HWY_AVX3 ? 8 : 6;
  int64_t r = 0;
  for (; r + kMany <= rows.rows; r += kMany) {
    attend_tile_rows<T, kMany>(cache, layer, head, rows, r, begin, end);
  }
  for (; r + 3 <= rows.rows; r += 3) {
    attend_tile_rows<T, 3>(cache, layer, head, rows, r, begin, end);
  }
  if (r + 2 <= rows.rows) {
    attend_tile_rows<T, 2>(cache, layer, head, rows, r, begin, end);
    r += 2;
  }
  if (r < rows.rows) attend_tile_rows<T, 1>(cache, layer, head, rows, r, begin, end);
}

void attend_head(const KvCache& cache, int64_t layer, int64_t head, const AttentionRows& rows,
                 int64_t begin, int64_t end) {
  if (cache.half) return attend_rows<float16_t>(cache, layer, head, rows, begin, end);
  attend_rows<float>(cache, layer, head, rows, begin, end);
}

// Stores a key and a value in a cache of elements T: a key is one lane of its block of 16.
template <class T>
HWY_INLINE void append_as(const KvCache& cache, int64_t layer, int64_t head, int64_t position,
                          const float* key, const float* value) {
  const int64_t lane = position % kKeyBlock;
  T* k = static_cast<T*>(cache.keys(layer, head, position - lane)) + lane;
  T* v = static_cast<T*>(cache.values(layer, head, position));
  for (int64_t i = 0; i < cache.head_dim; ++i) {
    FromF32(key[i], k + i * kKeyBlock);
    FromF32(value[i], v + i);
  }
}

void append_position(const KvCache& cache, int64_t layer, int64_t head, int64_t position,
                     const float* key, const float* value) {
  if (cache.half) return append_as<float16_t>(cache, layer, head, position, key, value);
  append_as<float>(cache, layer, head, position, key, value);
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {
FK_CPU_EXPORT(attend_head);
FK_CPU_EXPORT(append_position);
static auto attend_now() { return FK_CPU_DISPATCH(attend_head); }
static auto append_now() { return FK_CPU_DISPATCH(append_position); }
}  // namespace fk::cpu

namespace fk::engine {

void append(const KvCache& cache, int64_t layer, int64_t head, int64_t position, const float* key,
            const float* value) {
  cpu::append_now()(cache, layer, head, position, key, value);
}

void attend(const KvCache& cache, int64_t layer, int64_t head, const AttentionRows& rows,
            int64_t begin, int64_t end) {
  cpu::attend_now()(cache, layer, head, rows, begin, end);
}

}  // namespace fk::engine
#endif
