// How a CPU kernel that works along an axis is cut into pieces for the threads.
//
// Two layouts are fast. Rows: the axis has stride 1, and vectors run along it. Columns: the axis is
// strided but the innermost other dim has stride 1 (axis 0 of a matrix), and vectors run across it,
// a tile of neighbouring rows at a time. With any other strides a row is copied block by block.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "core/exec.h"
#include "core/rows.h"
#include "core/tensor.h"
#include "cpu/cache.h"

namespace fk::cpu {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

inline float log_of(double sum) { return std::log(static_cast<float>(sum)); }

// Calls of fewer elements are over before a second thread has woken.
constexpr int64_t kInlineElements = 32768;

// The grain of Exec::parallel_for over `items` of `elements` each.
inline int64_t grain_of(int64_t items, int64_t elements) {
  if (items * elements <= kInlineElements) return items;
  return std::max<int64_t>(1, kInlineElements / 4 / std::max<int64_t>(1, elements));
}

// Whether a call that reads and writes `bytes` in all should store its output past the caches.
// Later than for plain copies (cpu/cache.h): exponentials hide part of what an ordinary store
// costs.
inline bool pays_to_stream_beside_arithmetic(int64_t bytes) {
  return bytes > int64_t{32} << 20 && pays_to_stream(bytes);
}

// Where a row is copied to or folded at a time. Short enough that fp32 sums stay accurate and that
// a block read twice is still in the first-level cache, long enough that the ends do not matter.
constexpr int64_t kBlock = 1024;

// The most neighbouring rows that a kernel for columns works on at a time.
constexpr int64_t kTile = 256;

// A call as tiles of neighbouring rows: `width` rows whose starts lie `stride` apart in each
// tensor.
struct Tiles {
  int64_t inner = 1;  // consecutive rows that are evenly spaced in all tensors
  int64_t width = 1;  // of a full tile
  int64_t per_inner = 1;
  int64_t count = 0;

  struct Tile {
    int64_t row, width;
  };
  Tile operator[](int64_t i) const {
    const int64_t outer = i / per_inner, first = (i - outer * per_inner) * width;
    return {outer * inner + first, std::min(width, inner - first)};
  }
};

// How many rows, counted from any multiple of the result, are evenly spaced in all of `tensors`.
inline int64_t evenly_spaced_rows(std::initializer_list<const Rows*> tensors) {
  int64_t inner = (*tensors.begin())->count;
  for (const Rows* rows : tensors) {
    if (rows->ndim > 0) inner = std::min(inner, rows->sizes[rows->ndim - 1]);
  }
  return inner;
}

// Whether neighbouring rows of `t` stand side by side and are better read that way.
inline bool in_columns(const Tensor& t, const Rows& rows) {
  return rows.ndim > 0 && rows.last_stride == 1 && (t.stride(-1) != 1 || t.size(-1) == 1);
}

// `count` rows as tiles of `width` rows, or fewer where the even spacing ends.
inline Tiles tiles_of(int64_t count, int64_t inner, int64_t width) {
  Tiles tiles;
  if (inner == 0) return tiles;
  tiles.inner = inner;
  tiles.width = std::min(inner, width);
  tiles.per_inner = (inner - 1) / tiles.width + 1;
  tiles.count = count / inner * tiles.per_inner;
  return tiles;
}

// Tiles for a kernel that reads rows of n elements more than once: as wide as the second-level
// cache allows and as leaves work for several threads, but at least a cache line.
inline Tiles cached_tiles_of(int64_t count, int64_t inner, int64_t n) {
  constexpr int64_t kCacheElements = 256 * 1024;
  constexpr int64_t kFewestTiles = 8;
  int64_t width = std::min(kTile, kCacheElements / std::max<int64_t>(1, n));
  if (count * n > kInlineElements) width = std::min(width, count / kFewestTiles);
  return tiles_of(count, inner, std::max<int64_t>(16, width / 16 * 16));
}

// Runs `kernel` over the rows of `job`, or over its tiles if it has some.
template <class Job, class Kernel>
void parallel(const Job& job, Kernel kernel, int64_t rows, int64_t n, const Exec& exec) {
  const Tiles& tiles = job.tiles;
  const int64_t items = tiles.count > 0 ? tiles.count : rows;
  const int64_t grain = grain_of(items, tiles.count > 0 ? n * tiles.width : n);
  exec.parallel_for(items, grain, [&](int64_t b, int64_t e) { kernel(job, b, e); });
}

}  // namespace fk::cpu
