// Cuts the work of a CPU kernel that works along an axis (softmax, norms, reductions) into pieces
// for the threads.
//
// Two layouts are fast. Rows: the axis has stride 1, and vectors run along it. Columns: the axis is
// strided but the innermost other dim has stride 1 (axis 0 of a matrix), and vectors run across it,
// a tile of neighbouring rows at a time. With any other strides, the kernel copies a row to a
// buffer, block by block.
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

// Returns the logarithm of a sum, in float.
inline float log_of(double sum) { return std::log(static_cast<float>(sum)); }

// A call of fewer elements runs on one thread: it is over before a second one has woken.
constexpr int64_t kInlineElements = 32768;

// Returns the grain, for Exec::parallel_for, of a loop over `items` of `elements` elements each.
inline int64_t grain_of(int64_t items, int64_t elements) {
  if (items * elements <= kInlineElements) return items;
  return std::max<int64_t>(1, kInlineElements / 4 / std::max<int64_t>(1, elements));
}

// Returns whether a kernel that computes exponentials, and reads and writes `bytes` in all, should
// store its output past the caches. The limit is higher than that of copies (cpu/cache.h), because
// the arithmetic hides part of what an ordinary store costs.
inline bool pays_to_stream_beside_arithmetic(int64_t bytes) {
  return bytes > int64_t{32} << 20 && pays_to_stream(bytes);
}

// This many elements of a row, a block, are copied or summed at a time. A block is short enough
// that float sums stay accurate and that it is still in the first-level cache when it is read
// twice, and long enough that the work at its ends does not matter.
constexpr int64_t kBlock = 1024;

// A kernel for columns works on no more than this many neighbouring rows at a time.
constexpr int64_t kTile = 256;

// Cuts the rows of a call into tiles of neighbouring rows, which are evenly spaced in every tensor.
// tiles[i] is tile number i.
struct Tiles {
  int64_t inner = 1;      // how many consecutive rows are evenly spaced in all tensors
  int64_t width = 1;      // rows in a full tile
  int64_t per_inner = 1;  // tiles in `inner` rows
  int64_t count = 0;      // tiles in all

  struct Tile {
    int64_t row, width;  // the first row, and the number of rows
  };
  Tile operator[](int64_t i) const {
    const int64_t outer = i / per_inner, first = (i - outer * per_inner) * width;
    return {outer * inner + first, std::min(width, inner - first)};
  }
};

// Returns how many rows, counted from any multiple of the result, are evenly spaced in all of
// `tensors`.
inline int64_t evenly_spaced_rows(std::initializer_list<const Rows*> tensors) {
  int64_t inner = (*tensors.begin())->count;
  for (const Rows* rows : tensors) {
    if (rows->ndim > 0) inner = std::min(inner, rows->sizes[rows->ndim - 1]);
  }
  return inner;
}

// Returns whether `t` has the columns layout: neighbouring rows stand side by side, and reading
// across them is better than reading along one. `rows` are t's rows.
inline bool in_columns(const Tensor& t, const Rows& rows) {
  return rows.ndim > 0 && rows.last_stride == 1 && (t.stride(-1) != 1 || t.size(-1) == 1);
}

// Cuts `count` rows into tiles of `width` rows, or fewer where the even spacing of `inner` rows
// ends.
inline Tiles tiles_of(int64_t count, int64_t inner, int64_t width) {
  Tiles tiles;
  if (inner == 0) return tiles;
  tiles.inner = inner;
  tiles.width = std::min(inner, width);
  tiles.per_inner = (inner - 1) / tiles.width + 1;
  tiles.count = count / inner * tiles.per_inner;
  return tiles;
}

// Cuts rows into tiles for a kernel that reads its rows of n elements more than once. A tile is as
// wide as the second-level cache and work for several threads allow, but at least 16 rows, a cache
// line of floats.
inline Tiles cached_tiles_of(int64_t count, int64_t inner, int64_t n) {
  constexpr int64_t kCacheElements = 256 * 1024;
  constexpr int64_t kFewestTiles = 8;
  int64_t width = std::min(kTile, kCacheElements / std::max<int64_t>(1, n));
  if (count * n > kInlineElements) width = std::min(width, count / kFewestTiles);
  return tiles_of(count, inner, std::max<int64_t>(16, width / 16 * 16));
}

// Runs kernel(job, begin, end) on the threads of `exec`, over the tiles of `job` if it has any, or
// else over its `rows` rows of n elements.
template <class Job, class Kernel>
void parallel(const Job& job, Kernel kernel, int64_t rows, int64_t n, const Exec& exec) {
  const Tiles& tiles = job.tiles;
  const int64_t items = tiles.count > 0 ? tiles.count : rows;
  const int64_t grain = grain_of(items, tiles.count > 0 ? n * tiles.width : n);
  exec.parallel_for(items, grain, [&](int64_t b, int64_t e) { kernel(job, b, e); });
}

}  // namespace fk::cpu
