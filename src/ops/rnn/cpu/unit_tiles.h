// Register tiles for products with packed weights: a few rows of the state times a panel, one or
// two vectors of columns wide, which is read in order from its first step of K to the last.
//
// Floor: of many rows, two multiply-adds a clock: a tile keeps up to 24 sums in registers and loads
// two vectors of weights for every 12 rows, so that it runs as fast from the second-level cache as
// from the first. Of one row, the bytes of the panel from the second-level cache. Sums that were
// few would wait for each other: they are kept several times, for every few steps of K apart.

// Once per target.
#if defined(FK_OPS_RNN_UNIT_TILES_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_OPS_RNN_UNIT_TILES_PER_TARGET
#undef FK_OPS_RNN_UNIT_TILES_PER_TARGET
#else
#define FK_OPS_RNN_UNIT_TILES_PER_TARGET
#endif

#include <algorithm>
#include <cstdint>

#include "cpu/gemm/tiles.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace detail {

// Vectors of a panel, and rows of the highest tile.
constexpr int kPanelVectors = 2;
constexpr int kMostTileRows = kManyRegisters ? 12 : 6;

// Computes one tile of C, to which C's own values are added in the end if `adds`.
template <int kRows, int kVectors>
HWY_NOINLINE void unit_tile(const float* a, int64_t a_row, const float* b, int64_t depth, float* c,
                            int64_t c_row, bool adds) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  constexpr int kSums = kRows * kVectors, kParts = kSums < 8 ? 8 / kSums : 1;
  hn::Vec<F32> sum[kParts][kRows][kVectors];
  const auto each = [](const auto& body) FK_MATRIX_BODY {
    repeat<kRows>([&](auto r) FK_MATRIX_BODY {
      repeat<kVectors>([&](auto v) FK_MATRIX_BODY { body(r, v); });
    });
  };
  repeat<kParts>([&](auto part) FK_MATRIX_BODY {
    each([&](auto r, auto v) FK_MATRIX_BODY { sum[part][r][v] = hn::Zero(d); });
  });
  const auto add_step = [&](auto part, int64_t k) FK_MATRIX_BODY {
    hn::Vec<F32> right[kVectors];
    repeat<kVectors>(
        [&](auto v) FK_MATRIX_BODY { right[v] = hn::LoadU(d, b + (k * kVectors + v) * lanes); });
    repeat<kRows>([&](auto r) FK_MATRIX_BODY {
      const auto left = hn::Set(d, a[r * a_row + k]);
      repeat<kVectors>([&](auto v) FK_MATRIX_BODY {
        sum[part][r][v] = hn::MulAdd(left, right[v], sum[part][r][v]);
      });
    });
  };
  int64_t k = 0;
  for (; k + kParts <= depth; k += kParts) {
    repeat<kParts>([&](auto part) FK_MATRIX_BODY { add_step(part, k + part); });
  }
  for (; k < depth; ++k) add_step(std::integral_constant<int, 0>(), k);
  repeat<kParts>([&](auto part) FK_MATRIX_BODY {
    if constexpr (part > 0) {
      each([&](auto r, auto v)
               FK_MATRIX_BODY { sum[0][r][v] = hn::Add(sum[0][r][v], sum[part][r][v]); });
    }
  });
  each([&](auto r, auto v) FK_MATRIX_BODY {
    float* const to = c + r * c_row + v * lanes;
    hn::StoreU(adds ? hn::Add(hn::LoadU(d, to), sum[0][r][v]) : sum[0][r][v], d, to);
  });
}

// All rows of a panel, with tiles as high as fit.
template <int kVectors>
void multiply_panel_rows(int64_t rows, const float* a, int64_t a_row, const float* b, int64_t depth,
                         float* c, int64_t c_row, bool adds) {
  int64_t r = 0;
  const auto tiles = [&](auto tile_rows, int64_t end) HWY_ATTR {
    for (; r + tile_rows <= end; r += tile_rows) {
      unit_tile<tile_rows, kVectors>(a + r * a_row, a_row, b, depth, c + r * c_row, c_row, adds);
    }
  };
  // Where a tile of 6 would leave 2 rows, two tiles of 4 are faster.
  const int64_t whole = kMostTileRows == 6 && rows % 6 == 2 && rows > 2 ? rows - 8 : rows;
  tiles(std::integral_constant<int, kMostTileRows>(), whole);
  if constexpr (kMostTileRows > 8) tiles(std::integral_constant<int, 8>(), rows);
  tiles(std::integral_constant<int, 4>(), rows);
  tiles(std::integral_constant<int, 2>(), rows);
  tiles(std::integral_constant<int, 1>(), rows);
}

}  // namespace detail

// C[rows, vectors] = A[rows, depth] times `vectors` vectors of columns, which lie at `packed` as
// panels one after another: in each, `depth` rows without gaps, `packed_depth` apart from the next
// panel's. Errors grow with the square root of what is summed at a stretch: K is walked in pieces.
HWY_INLINE void multiply_panels(int64_t rows, const float* a, int64_t a_row, const float* packed,
                                int64_t depth, int64_t packed_depth, int64_t vectors, float* c,
                                int64_t c_row) {
  constexpr int64_t kStretch = 512;
  const int64_t lanes = hn::Lanes(F32());
  const auto panel = [&](auto width, int64_t first) HWY_ATTR {
    const float* const b = packed + first * packed_depth * lanes;
    for (int64_t k = 0; k == 0 || k < depth; k += kStretch) {
      detail::multiply_panel_rows<width>(rows, a + k, a_row, b + k * width * lanes,
                                         std::min(kStretch, depth - k), c + first * lanes, c_row,
                                         k > 0);
    }
  };
  int64_t v = 0;
  for (; v + detail::kPanelVectors <= vectors; v += detail::kPanelVectors) {
    panel(std::integral_constant<int, detail::kPanelVectors>(), v);
  }
  if (v < vectors) panel(std::integral_constant<int, 1>(), v);
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_OPS_RNN_UNIT_TILES_PER_TARGET
