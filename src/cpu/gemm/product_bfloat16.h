// This file computes matrix products of bfloat16 numbers, on the pairs of
// cpu/gemm/tiles_bfloat16.h: what product.h is for float, where the processor multiplies such
// pairs. A is bfloat16; B may be float and is rounded, where the product allows that.
//
// Floor: half the multiply-adds of product.h, and half its memory. Blocks are of as many bytes,
// which is twice as much of K. Operands become pairs along K: rows that run along K are pairs as
// they lie, of others two rows are woven into one.

// This part is compiled once per target.
#if defined(FK_CPU_GEMM_BFLOAT16_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_CPU_GEMM_BFLOAT16_PER_TARGET
#undef FK_CPU_GEMM_BFLOAT16_PER_TARGET
#else
#define FK_CPU_GEMM_BFLOAT16_PER_TARGET
#endif

#include "cpu/gemm/multiply.h"
#include "cpu/gemm/pack.h"
#include "cpu/gemm/product_thin.h"
#include "cpu/gemm/tiles_bfloat16.h"

#if FK_CPU_BFLOAT16_TARGET

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace detail {

// A block takes so many pairs along K, and so many are summed at a stretch.
constexpr int64_t kPairBlock = kDepthBlock, kPairStretch = kSumDepth;
constexpr int64_t kPairPanel = kPanelColumns;

using PairTag = hn::ScalableTag<uint32_t>;
using HalfTag = hn::Rebind<uint16_t, PairTag>;

// Loads up to 16 numbers side by side, as the low halves of lanes; the rest is 0.
template <class T>
HWY_INLINE hn::Vec<PairTag> load_bits(const T* p, int64_t n) {
  const F32 d;
  if constexpr (sizeof(T) == 2) {
    const HalfTag half;
    const auto* bits = reinterpret_cast<const uint16_t*>(p);
    if (n >= 16) return hn::PromoteTo(PairTag(), hn::LoadU(half, bits));
    const auto mask = hn::FirstN(half, static_cast<size_t>(n));
    return hn::PromoteTo(PairTag(), hn::MaskedLoad(mask, half, bits));
  } else {
    const auto v = n >= 16 ? hn::LoadU(d, p) : LoadNF32(d, p, static_cast<size_t>(n));
    return hn::PromoteTo(PairTag(), float_to_bfloat16(d, v));
  }
}

// Writes a row of `count` numbers, which are `step` apart, as pairs: (count + 1) / 2 of them, then
// zeros.
template <class T>
HWY_INLINE void copy_as_pairs(const T* x, int64_t step, int64_t count, uint32_t* out,
                              int64_t pairs) {
  auto* to = reinterpret_cast<uint16_t*>(out);
  int64_t i = 0;
  if (step == 1) {
    const HalfTag half;
    for (; i < count; i += 16) {
      const auto bits =
          hn::DemoteTo(half, hn::BitCast(hn::ScalableTag<int32_t>(), load_bits(x + i, count - i)));
      if (i + 16 <= 2 * pairs) {
        hn::StoreU(bits, half, to + i);
      } else {
        hn::BlendedStore(bits, hn::FirstN(half, static_cast<size_t>(2 * pairs - i)), half, to + i);
      }
    }
  } else {
    for (; i < count; ++i) {
      bfloat16_t number;
      FromF32(ToF32(x + i * step), &number);
      to[i] = number.bits;
    }
  }
  for (; i < 2 * pairs; ++i) to[i] = 0;
}

// Weaves `rows` rows of numbers side by side two by two, which gives (rows + 1) / 2 rows of `width`
// pairs, of which the first `columns` are the numbers'.
template <class T>
HWY_INLINE void weave_rows(const T* x, int64_t stride, int64_t rows, int64_t columns, uint32_t* out,
                           int64_t width) {
  const PairTag d;
  for (int64_t r = 0; r < rows; r += 2, x += 2 * stride, out += width) {
    for (int64_t c = 0; c < columns; c += 16) {
      auto pairs = load_bits(x + c, columns - c);
      if (r + 1 < rows) {
        pairs = hn::Or(pairs, hn::ShiftLeft<16>(load_bits(x + stride + c, columns - c)));
      }
      hn::StoreU(pairs, d, out + c);
    }
  }
}

template <class T>
HWY_INLINE bool in_pairs(const T* x, int64_t stride) {
  return sizeof(T) == 2 && stride % 2 == 0 && reinterpret_cast<uintptr_t>(x) % 4 == 0;
}

// Packs `depth` rows of B by `columns` <= kPairPanel as pairs.
template <class T>
HWY_INLINE void pack_pairs_panel(const MatrixView& b, int64_t depth, int64_t columns, uint32_t* out,
                                 int64_t width, uint32_t* turned) {
  const T* x = static_cast<const T*>(b.data);
  if (b.column == 1) return weave_rows(x, b.row, depth, columns, out, width);
  const int64_t pairs = ((depth + 1) / 2 + 3) / 4 * 4, fours = (columns + 3) / 4 * 4;
  const float* from = reinterpret_cast<const float*>(turned);
  int64_t stride = padded_columns(pairs);
  if (b.row == 1 && in_pairs(x, b.column) && depth % 8 == 0 && columns == fours) {
    from = reinterpret_cast<const float*>(x);
    stride = b.column / 2;
  } else {
    for (int64_t c = 0; c < columns; ++c) {
      copy_as_pairs(x + c * b.column, b.row, depth, turned + c * stride, pairs);
    }
  }
  // Pairs are moved as floats are, bit by bit.
  HWY_NAMESPACE::transpose(from, stride, fours, pairs, reinterpret_cast<float*>(out), width);
}

HWY_INLINE PairsA left_pairs(const MatrixView& a, int64_t rows, int64_t depth, uint32_t* packed) {
  const auto* x = static_cast<const bfloat16_t*>(a.data);
  if (a.column == 1 && in_pairs(x, a.row) && depth % 2 == 0) {
    return {reinterpret_cast<const uint32_t*>(x), a.row / 2, 1};
  }
  if (a.row == 1 && a.column != 1) {
    const int64_t width = padded_columns(rows);
    weave_rows(x, a.column, depth, rows, packed, width);
    return {packed, 1, width};
  }
  const int64_t pairs = padded_columns((depth + 1) / 2);
  for (int64_t r = 0; r < rows; ++r) {
    copy_as_pairs(x + r * a.row, a.column, depth, packed + r * pairs, pairs);
  }
  return {packed, pairs, 1};
}

// Multiplies one row with a packed panel of kPairPanel columns, as detail::row_by_panel has it for
// floats.
FK_BFLOAT16_ATTR HWY_NOINLINE void row_by_panel_of_pairs(const uint32_t* a, const uint32_t* b,
                                                         int64_t pairs, float* sums, bool add) {
  constexpr int kVectors = kPairPanel / 16;
  __m512 sum[2][kVectors];
  repeat_pairs<kVectors>([&](auto v) FK_PAIRS_BODY {
    sum[0][v] = add ? _mm512_loadu_ps(sums + 16 * v) : _mm512_setzero_ps();
    sum[1][v] = _mm512_setzero_ps();
  });
  const auto step = [&](int64_t i, auto which) FK_PAIRS_BODY {
    const auto left = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int32_t>(a[i])));
    const uint32_t* const row = b + i * kPairPanel;
    repeat_pairs<kVectors>([&](auto v) FK_PAIRS_BODY {
      hwy::Prefetch(reinterpret_cast<const char*>(row + 16 * v) + 2 * kStreamAhead);
      const auto right = reinterpret_cast<__m512bh>(_mm512_loadu_si512(row + 16 * v));
      sum[which][v] = _mm512_dpbf16_ps(sum[which][v], left, right);
    });
  };
  int64_t i = 0;
  for (; i + 2 <= pairs; i += 2) {
    step(i, std::integral_constant<int, 0>());
    step(i + 1, std::integral_constant<int, 1>());
  }
  if (i < pairs) step(i, std::integral_constant<int, 0>());
  repeat_pairs<kVectors>([&](auto v) FK_PAIRS_BODY {
    _mm512_storeu_ps(sums + 16 * v, _mm512_add_ps(sum[0][v], sum[1][v]));
  });
}

}  // namespace detail

HWY_INLINE bool takes_pairs(const Product& p) {
  const auto takes = [&](const MatrixView& b) {
    return b.dtype == DType::kBFloat16 || (b.dtype == DType::kFloat32 && p.rounds_b);
  };
  if (!multiplies_bfloat16() || p.a.dtype != DType::kBFloat16) return false;
  if (p.panels != nullptr) return p.panels->dtype == DType::kBFloat16;
  return takes(p.b) && (!p.twin || takes(p.twin_b)) &&
         (!p.sum || (p.sum_a.dtype == DType::kBFloat16 && takes(p.sum_b)));
}

// Computes one block of a product, as multiply_block does it.
template <class Finish>
void multiply_block_of_pairs(const Product& p, const ProductBlocks& blocks,
                             const ProductScratch& scratch, int64_t item, const Finish& finish) {
  using detail::kPairBlock, detail::kPairPanel, detail::kPairStretch;
  const int64_t first_row = item / blocks.column_blocks * blocks.row_block;
  const int64_t first_column = item % blocks.column_blocks * blocks.column_block;
  const int64_t rows = std::min(blocks.row_block, p.rows - first_row);
  const int64_t columns = std::min(blocks.column_block, p.columns - first_column);
  const int64_t panel = p.panels != nullptr ? p.panels->panel : kPairPanel;
  const int64_t width = padded_columns(columns), all = p.twin ? 2 * width : width;
  const auto width_of = [&](int64_t c) { return std::min(panel, width - c % width); };
  const auto next = [&](int64_t c) { return c + width_of(c); };
  auto* const packed_b = reinterpret_cast<uint32_t*>(scratch.b);
  auto* const turned = reinterpret_cast<uint32_t*>(scratch.turned);
  // A row reads a panel from end to end.
  const bool streams = p.rows == 1 && p.panels != nullptr;
  const int64_t pair_block = streams ? ProductScratch::kA : kPairBlock;
  const auto add_product = [&](const MatrixView& left, const MatrixView& right, bool add) HWY_ATTR {
    for (int64_t k = 0; k < p.depth; k += 2 * pair_block) {
      const int64_t depth = std::min(2 * pair_block, p.depth - k), pairs = (depth + 1) / 2;
      for (int64_t c = 0; c < all && p.panels == nullptr; c = next(c)) {
        const int64_t column = c % width;
        const MatrixView b = (c < width ? right : p.twin_b).from(k, first_column + column);
        const int64_t some = std::min(width_of(c), columns - column);
        uint32_t* const to = packed_b + c * kPairBlock;
        if (b.dtype == DType::kFloat32) {
          detail::pack_pairs_panel<float>(b, depth, some, to, width_of(c), turned);
        } else {
          detail::pack_pairs_panel<bfloat16_t>(b, depth, some, to, width_of(c), turned);
        }
      }
      for (int64_t r = 0; r < rows; r += kRowsAtOnce) {
        const int64_t some = std::min(kRowsAtOnce, rows - r);
        const PairsA a = detail::left_pairs(left.from(first_row + r, k), some, depth,
                                            reinterpret_cast<uint32_t*>(scratch.a));
        for (int64_t c = 0; c < all; c = next(c)) {
          PairsB b{packed_b + c * kPairBlock, width_of(c)};
          if (p.panels != nullptr) b.data = p.panels->at(first_column + c, k / 2);
          if (streams && width_of(c) == kPairPanel) {
            detail::row_by_panel_of_pairs(a.data, b.data, pairs, scratch.sums + c, k > 0);
            continue;
          }
          for (int64_t i = 0; i < pairs; i += kPairStretch) {
            multiply_pairs(some, width_of(c), std::min(kPairStretch, pairs - i),
                           {a.data + i * a.column, a.row, a.column}, b.from(i),
                           {scratch.sums + r * all + c, all}, add || k + i > 0);
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

// Returns whether a product of few rows is computed with pairs: both operands run along K, as the
// instruction takes them.
HWY_INLINE bool few_rows_take_pairs(const Product& p) {
  return takes_pairs(p) && p.b.dtype == DType::kBFloat16 && p.b.row == 1 &&
         (!p.twin || p.twin_b.dtype == DType::kBFloat16);
}

// Packs rows of A without gaps for multiply_few_rows_of_pairs: padded_columns(depth) numbers each.
HWY_INLINE void pack_few_rows_of_pairs(const Product& p, uint16_t* out) {
  const int64_t width = padded_columns(p.depth);
  for (int64_t r = 0; r < p.rows; ++r) {
    detail::copy_as_pairs(static_cast<const bfloat16_t*>(p.a.data) + r * p.a.row, p.a.column,
                          p.depth, reinterpret_cast<uint32_t*>(out + r * width), width / 2);
  }
}

namespace detail {

// Multiplies kRows rows of A with kColumns columns of B, both of numbers side by side along K.
template <int kRows, int kColumns>
FK_BFLOAT16_ATTR HWY_NOINLINE void dot_pairs_tile(const uint16_t* a, int64_t a_row,
                                                  const uint16_t* b, int64_t b_column,
                                                  int64_t depth, float* out, int64_t out_row) {
  __m512 sum[kRows][kColumns];
  repeat_pairs<kRows>([&](auto r) FK_PAIRS_BODY {
    repeat_pairs<kColumns>([&](auto c) FK_PAIRS_BODY { sum[r][c] = _mm512_setzero_ps(); });
  });
  for (int64_t k = 0; k < depth; k += 32) {
    const int64_t left = depth - k;
    const __mmask32 mask = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
    __m512bh rows[kRows];
    repeat_pairs<kRows>([&](auto r) FK_PAIRS_BODY {
      rows[r] = reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(mask, a + r * a_row + k));
    });
    repeat_pairs<kColumns>([&](auto c) FK_PAIRS_BODY {
      const auto column =
          reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(mask, b + c * b_column + k));
      repeat_pairs<kRows>(
          [&](auto r) FK_PAIRS_BODY { sum[r][c] = _mm512_dpbf16_ps(sum[r][c], rows[r], column); });
    });
  }
  repeat_pairs<kRows>([&](auto r) FK_PAIRS_BODY {
    repeat_pairs<kColumns>(
        [&](auto c) FK_PAIRS_BODY { out[r * out_row + c] = _mm512_reduce_add_ps(sum[r][c]); });
  });
}

// Computes the scalar products of a row with two columns, which are read as detail::dot_two reads
// them.
FK_BFLOAT16_ATTR HWY_NOINLINE void dot_pairs_two(const uint16_t* a, const uint16_t* first,
                                                 const uint16_t* second, int64_t depth,
                                                 float* first_out, float* second_out) {
  constexpr int kSums = 4;
  __m512 sum[2][kSums];
  repeat_pairs<kSums>([&](auto i) FK_PAIRS_BODY { sum[0][i] = sum[1][i] = _mm512_setzero_ps(); });
  const auto add = [&](int i, int64_t k, __mmask32 mask) FK_PAIRS_BODY {
    const auto load = [&](const uint16_t* p) FK_PAIRS_BODY {
      return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(mask, p + k));
    };
    const __m512bh left = load(a);
    sum[0][i] = _mm512_dpbf16_ps(sum[0][i], left, load(first));
    sum[1][i] = _mm512_dpbf16_ps(sum[1][i], left, load(second));
  };
  int64_t k = 0;
  for (; k + 32 * kSums <= depth; k += 32 * kSums) {
    repeat_pairs<kSums>([&](auto i) FK_PAIRS_BODY {
      prefetch_ahead(first + k + 32 * i);
      prefetch_ahead(second + k + 32 * i);
      add(i, k + 32 * i, ~__mmask32{0});
    });
  }
  for (; k < depth; k += 32) {
    const int64_t left = depth - k;
    add(0, k, left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1);
  }
  const auto total = [&](const __m512* s) FK_PAIRS_BODY {
    return _mm512_reduce_add_ps(
        _mm512_add_ps(_mm512_add_ps(s[0], s[1]), _mm512_add_ps(s[2], s[3])));
  };
  *first_out = total(sum[0]);
  *second_out = total(sum[1]);
}

// Multiplies one row with the columns [first, first + columns) of B, in two streams.
HWY_INLINE void dot_pairs_row(const MatrixView& b, const uint16_t* a, int64_t depth, int64_t first,
                              int64_t columns, float* sums) {
  const auto* at = static_cast<const uint16_t*>(b.data) + first * b.column;
  const int64_t half = (columns + 1) / 2;
  for (int64_t c = 0; c < half; ++c) {
    const int64_t other = std::min(c + half, columns - 1);
    dot_pairs_two(a, at + c * b.column, at + other * b.column, depth, sums + c, sums + other);
  }
}

// Multiplies every row with kColumns columns at a time from column c on; moves c on. Columns are
// read from memory once, and from the first-level cache for every tile of rows after the first.
template <int kFirstRows, int kColumns>
HWY_INLINE void dot_pairs_columns(const Product& p, const MatrixView& right, const uint16_t* a,
                                  int64_t first, int64_t columns, int64_t& c, float* sums) {
  const int64_t stride = padded_columns(p.depth);
  for (; c + kColumns <= columns; c += kColumns) {
    const auto* b = static_cast<const uint16_t*>(right.data) + (first + c) * right.column;
    int64_t r = 0;
    const auto rows = [&](auto count) HWY_ATTR {
      for (; r + count <= p.rows; r += count) {
        dot_pairs_tile<count, kColumns>(a + r * stride, stride, b, right.column, p.depth,
                                        sums + r * kFewColumns + c, kFewColumns);
      }
    };
    rows(std::integral_constant<int, kFirstRows>());
    rows(std::integral_constant < int, kFirstRows == 1 ? 1 : 2 > ());
    rows(std::integral_constant<int, 1>());
  }
}

}  // namespace detail

// Computes kFewColumns columns of a product of few rows, whose A lies in `a` as
// pack_few_rows_of_pairs leaves it.
template <class Finish>
void multiply_few_rows_of_pairs(const Product& p, const uint16_t* a, int64_t item,
                                const Finish& finish) {
  const int64_t first = item * kFewColumns, columns = std::min(kFewColumns, p.columns - first);
  alignas(64) float sums[2][kFewRows * kFewColumns];
  for (int i = 0; i < (p.twin ? 2 : 1); ++i) {
    const MatrixView& b = i == 0 ? p.b : p.twin_b;
    int64_t c = 0;
    if (p.rows == 1) {
      detail::dot_pairs_row(b, a, p.depth, first, columns, sums[i]);
      continue;
    }
    detail::dot_pairs_columns<4, 4>(p, b, a, first, columns, c, sums[i]);
    detail::dot_pairs_columns<1, 1>(p, b, a, first, columns, c, sums[i]);
  }
  finish(SumsBlock{sums[0], kFewColumns, 0, p.rows, first, columns, p.twin ? sums[1] : nullptr});
}

// Returns whether a product of few steps of K is computed with pairs: rows of numbers side by side
// become pairs by weaving two of them.
HWY_INLINE bool few_steps_take_pairs(const Product& p) {
  return takes_pairs(p) && p.b.dtype == DType::kBFloat16 && p.depth > 2 && p.a.row == 1 &&
         p.b.column == 1;
}

// Packs both operands of such a product, [(depth + 1) / 2, padded_columns(rows or columns)] pairs.
HWY_INLINE void pack_few_steps_of_pairs(const Product& p, uint32_t* a, uint32_t* b) {
  detail::weave_rows(static_cast<const bfloat16_t*>(p.a.data), p.a.column, p.depth, p.rows, a,
                     padded_columns(p.rows));
  detail::weave_rows(static_cast<const bfloat16_t*>(p.b.data), p.b.row, p.depth, p.columns, b,
                     padded_columns(p.columns));
}

// Does what multiply_few_steps does. A tile's sums pass through the first-level cache.
template <class T>
void multiply_few_steps_of_pairs(const Product& p, const uint32_t* a, const uint32_t* b,
                                 int64_t begin, int64_t end, T* c, int64_t c_row) {
  constexpr int64_t kRows = detail::tile_rows(detail::kPairPanel / 16);
  const int64_t a_step = padded_columns(p.rows), b_step = padded_columns(p.columns);
  const int64_t pairs = (p.depth + 1) / 2;
  alignas(64) float sums[kRows * detail::kPairPanel];
  for (int64_t r = begin; r < end; r += kRows) {
    const int64_t rows = std::min(kRows, end - r);
    for (int64_t i = 0; i < p.columns; i += detail::kPairPanel) {
      const int64_t columns = std::min(detail::kPairPanel, p.columns - i);
      multiply_pairs(rows, padded_columns(columns), pairs, {a + r, 1, a_step}, {b + i, b_step},
                     {sums, detail::kPairPanel}, false);
      for (int64_t j = 0; j < rows; ++j) {
        const F32 d;
        for_vectors(columns, [&](int64_t at, int64_t n) HWY_ATTR {
          store_vector(c + (r + j) * c_row + i + at, n,
                       hn::Load(d, sums + j * detail::kPairPanel + at));
        });
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_CPU_BFLOAT16_TARGET

#endif  // FK_CPU_GEMM_BFLOAT16_PER_TARGET
