// This file computes matrix products of any float types and strides, on the register tiles of
// cpu/gemm/tiles.h.
//
// Floor: rows columns depth multiply-adds at two vectors a clock, and of small products the memory
// traffic of B. A block of B is brought into panels as wide as a tile; the sums of a block stay in
// the second-level cache while K is walked through, and then go through `finish`.

// This part is compiled once per target.
#if defined(FK_CPU_GEMM_PRODUCT_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_CPU_GEMM_PRODUCT_PER_TARGET
#undef FK_CPU_GEMM_PRODUCT_PER_TARGET
#else
#define FK_CPU_GEMM_PRODUCT_PER_TARGET
#endif

#include "cpu/gemm/multiply.h"
#include "cpu/gemm/pack.h"
#include "cpu/gemm/product_thin.h"
#include "cpu/gemm/tiles.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace detail {

// Returns how many columns a panel has: a tile's, and at least what packed rows are padded to.
HWY_INLINE int64_t tile_columns() {
  return std::max<int64_t>(16, kWideVectors * static_cast<int64_t>(hn::Lanes(F32())));
}

// Returns `depth` rows of B from row k on, of a panel that was packed: as they lie if they are
// float, or as floats in `out`.
HWY_INLINE MatrixB packed_panel(const Panels& panels, int64_t k, int64_t depth, int64_t column,
                                float* out) {
  const int64_t width = panels.width_of(column);
  if (panels.dtype == DType::kFloat32) {
    return {reinterpret_cast<const float*>(panels.at(column, k)), width};
  }
  const F32 d;
  const hn::Rebind<uint32_t, F32> du;
  const uint32_t* pairs = panels.at(column, k / 2);
  for (int64_t i = 0; i < depth; i += 2, pairs += width, out += 2 * width) {
    for (int64_t c = 0; c < width; c += hn::Lanes(d)) {
      const auto both = hn::LoadU(du, pairs + c);
      hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(both)), d, out + c);
      const auto upper = hn::And(both, hn::Set(du, 0xFFFF0000u));
      hn::StoreU(hn::BitCast(d, upper), d, out + width + c);
    }
  }
  return {out - (depth + 1) / 2 * 2 * width, width};
}

// Packs `depth` rows of B by `columns` <= panel_columns(), as rows of `width` floats.
HWY_INLINE void pack_panel(const MatrixView& b, int64_t depth, int64_t columns, float* out,
                           int64_t width, float* turned) {
  if (b.row != 1 || b.column == 1) return HWY_NAMESPACE::pack_rows(b, depth, columns, out, width);
  const int64_t depth_fours = (depth + 3) / 4 * 4, column_fours = (columns + 3) / 4 * 4;
  if (b.dtype == DType::kFloat32 && depth == depth_fours && columns == column_fours) {
    return HWY_NAMESPACE::transpose(static_cast<const float*>(b.data), b.column, columns, depth,
                                    out, width);
  }
  const int64_t stride = padded_columns(depth);
  HWY_NAMESPACE::pack_rows({b.data, b.dtype, b.column, b.row}, columns, depth, turned, stride);
  HWY_NAMESPACE::transpose(turned, stride, column_fours, depth_fours, out, width);
}

// Returns rows of A as a product reads them: they stay in place if they are floats side by side
// along K.
HWY_INLINE MatrixA left_operand(const MatrixView& a, int64_t rows, int64_t depth, float* packed) {
  if (a.dtype == DType::kFloat32 && a.column == 1) {
    return {static_cast<const float*>(a.data), a.row, 1};
  }
  if (a.row == 1 && a.column != 1) {
    const int64_t stride = padded_columns(rows);
    HWY_NAMESPACE::pack_rows({a.data, a.dtype, a.column, a.row}, depth, rows, packed, stride);
    return {packed, 1, stride};
  }
  const int64_t stride = padded_columns(depth);
  HWY_NAMESPACE::pack_rows(a, rows, depth, packed, stride);
  return {packed, stride, 1};
}

}  // namespace detail

// Computes one block of a product.
template <class Finish>
void multiply_block(const Product& p, const ProductBlocks& blocks, const ProductScratch& scratch,
                    int64_t item, const Finish& finish) {
  const int64_t first_row = item / blocks.column_blocks * blocks.row_block;
  const int64_t first_column = item % blocks.column_blocks * blocks.column_block;
  const int64_t rows = std::min(blocks.row_block, p.rows - first_row);
  const int64_t columns = std::min(blocks.column_block, p.columns - first_column);
  const int64_t panel = p.panels != nullptr ? p.panels->panel : detail::tile_columns();
  const int64_t width = padded_columns(columns);
  const int64_t all = p.twin ? 2 * width : width;  // columns of sums: the twin's behind the others
  // Few rows wait for memory anyway, and can be summed in shorter stretches.
  const int64_t stretch = rows <= kFewRows ? kSumDepth / 4 : kSumDepth;
  // A row reads a panel of floats from end to end.
  const bool streams = p.rows == 1 && p.panels != nullptr && p.panels->dtype == DType::kFloat32;
  const int64_t depth_block = streams ? ProductScratch::kA : kDepthBlock;
  const auto width_of = [&](int64_t c) { return std::min(panel, width - c % width); };
  const auto next = [&](int64_t c) { return c + width_of(c); };
  const auto add_product = [&](const MatrixView& left, const MatrixView& right, bool add) HWY_ATTR {
    for (int64_t k = 0; k < p.depth; k += depth_block) {
      const int64_t depth = std::min(depth_block, p.depth - k);
      for (int64_t c = 0; c < all && p.panels == nullptr; c = next(c)) {
        const int64_t column = c % width;
        const MatrixView& from = c < width ? right : p.twin_b;
        detail::pack_panel(from.from(k, first_column + column), depth,
                           std::min(width_of(c), columns - column), scratch.b + c * kDepthBlock,
                           width_of(c), scratch.turned);
      }
      for (int64_t r = 0; r < rows; r += kRowsAtOnce) {
        const int64_t some = std::min(kRowsAtOnce, rows - r);
        const MatrixA a = detail::left_operand(left.from(first_row + r, k), some, depth, scratch.a);
        for (int64_t c = 0; c < all; c = next(c)) {
          MatrixB b{scratch.b + c * kDepthBlock, width_of(c)};
          if (p.panels != nullptr) {
            b = detail::packed_panel(*p.panels, k, depth, first_column + c, scratch.b);
          }
          if (streams) {
            detail::for_each_panel(width_of(c), [&](int64_t n, auto vectors) FK_MATRIX_BODY {
              detail::row_by_panel<vectors>(a.data, b.data + n, b.stride, depth,
                                            scratch.sums + c + n, k > 0);
            });
            continue;
          }
          for (int64_t i = 0; i < depth; i += stretch) {
            multiply(some, width_of(c), std::min(stretch, depth - i),
                     {a.data + i * a.column, a.row, a.column}, b.from(i),
                     {scratch.sums + r * all + c, all},
                     k + i == 0 && !add ? Keep::kNothing : Keep::kTotal);
          }
        }
      }
    }
  };
  if (p.depth == 0) std::fill_n(scratch.sums, rows * all, 0.0f);
  add_product(p.a, p.b, false);
  if (p.sum) add_product(p.sum_a, p.sum_b, true);
  finish(SumsBlock{scratch.sums, all, first_row, rows, first_column, columns,
                   p.twin ? scratch.sums + width : nullptr});
}

namespace detail {

// Multiplies kRows rows of A with kColumns columns of B, whose elements are contiguous along K.
template <int kRows, int kColumns, class T>
HWY_NOINLINE void dot_tile(const float* a, int64_t a_row, const T* b, int64_t b_column,
                           int64_t depth, float* out, int64_t out_row) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  hn::Vec<F32> sum[kRows][kColumns];
  repeat<kRows>([&](auto r) FK_MATRIX_BODY {
    repeat<kColumns>([&](auto c) FK_MATRIX_BODY { sum[r][c] = hn::Zero(d); });
  });
  int64_t k = 0;
  for (; k + lanes <= depth; k += lanes) {
    hn::Vec<F32> left[kRows];
    repeat<kRows>([&](auto r) FK_MATRIX_BODY { left[r] = hn::LoadU(d, a + r * a_row + k); });
    repeat<kColumns>([&](auto c) FK_MATRIX_BODY {
      const auto right = LoadF32(d, b + c * b_column + k);
      repeat<kRows>([&](auto r)
                        FK_MATRIX_BODY { sum[r][c] = hn::MulAdd(left[r], right, sum[r][c]); });
    });
  }
  if (k < depth) {  // rows of A are padded with zeros
    const size_t rest = static_cast<size_t>(depth - k);
    repeat<kColumns>([&](auto c) FK_MATRIX_BODY {
      const auto right = LoadNF32(d, b + c * b_column + k, rest);
      repeat<kRows>([&](auto r) FK_MATRIX_BODY {
        sum[r][c] = hn::MulAdd(hn::LoadU(d, a + r * a_row + k), right, sum[r][c]);
      });
    });
  }
  repeat<kRows>([&](auto r) FK_MATRIX_BODY {
    repeat<kColumns>([&](auto c)
                         FK_MATRIX_BODY { out[r * out_row + c] = ReduceSum(d, sum[r][c]); });
  });
}

template <class T>
void dot_rows(const Product& p, const MatrixView& right, const float* a, int64_t stride,
              int64_t first, int64_t columns, float* sums) {
  if (p.rows == 1) return dot_row<T>(right, a, p.depth, first, columns, sums);
  const T* b = static_cast<const T*>(right.data) + first * right.column;
  const auto rows_of_tile = [&](auto tile_rows, auto tile_columns, int64_t r, int64_t c) {
    dot_tile<tile_rows, tile_columns>(a + r * stride, stride, b + c * right.column, right.column,
                                      p.depth, sums + r * kFewColumns + c, kFewColumns);
  };
  using std::integral_constant;
  for (int64_t r = 0; r < p.rows;) {
    const int64_t left = p.rows - r;
    int64_t c = 0;
    if (left >= 4) {
      for (; c + 3 <= columns; c += 3) {
        rows_of_tile(integral_constant<int, 4>(), integral_constant<int, 3>(), r, c);
      }
      for (; c < columns; ++c) {
        rows_of_tile(integral_constant<int, 4>(), integral_constant<int, 1>(), r, c);
      }
      r += 4;
    } else {
      for (; c + 8 <= columns; c += 8) {
        rows_of_tile(integral_constant<int, 1>(), integral_constant<int, 8>(), r, c);
      }
      for (; c < columns; ++c) {
        rows_of_tile(integral_constant<int, 1>(), integral_constant<int, 1>(), r, c);
      }
      r += 1;
    }
  }
}

}  // namespace detail

// Computes kFewColumns columns of a product of few rows, whose A lies in `a` as floats without
// gaps.
template <class Finish>
void multiply_few_rows(const Product& p, const float* a, int64_t item, const Finish& finish) {
  const int64_t first = item * kFewColumns, columns = std::min(kFewColumns, p.columns - first);
  const int64_t stride = padded_columns(p.depth);
  alignas(64) float sums[2][kFewRows * kFewColumns];
  for (int i = 0; i < (p.twin ? 2 : 1); ++i) {
    const MatrixView& b = i == 0 ? p.b : p.twin_b;
    switch (b.dtype) {
      case DType::kFloat16:
        detail::dot_rows<float16_t>(p, b, a, stride, first, columns, sums[i]);
        break;
      case DType::kBFloat16:
        detail::dot_rows<bfloat16_t>(p, b, a, stride, first, columns, sums[i]);
        break;
      default:
        detail::dot_rows<float>(p, b, a, stride, first, columns, sums[i]);
    }
  }
  finish(SumsBlock{sums[0], kFewColumns, 0, p.rows, first, columns, p.twin ? sums[1] : nullptr});
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_CPU_GEMM_PRODUCT_PER_TARGET
