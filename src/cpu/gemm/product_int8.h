// This file computes matrix products of quantized rows with packed int8 panels: what product.h is
// for float.
//
// Floor: a quarter of the multiply-adds of product.h and a quarter of its memory. Integer sums over
// all of K are exact, and become floats, by the scales of their row and column, once.

// This part is compiled once per target.
#if defined(FK_CPU_GEMM_INT8_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_CPU_GEMM_INT8_PER_TARGET
#undef FK_CPU_GEMM_INT8_PER_TARGET
#else
#define FK_CPU_GEMM_INT8_PER_TARGET
#endif

#include <cmath>
#include <limits>

#include "cpu/gemm/elements.h"
#include "cpu/gemm/multiply.h"
#include "cpu/gemm/tiles_int8.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace detail {

// A block takes so many quads along K: a panel of so many fits the second-level cache several
// times.
constexpr int64_t kQuadBlock = 512;

template <bool kVnni>
HWY_INLINE void sum_quads(const Product& p, int64_t first_row, int64_t rows, int64_t first_column,
                          int64_t columns, int32_t* sums, int64_t stride) {
  const Panels& panels = *p.panels;
  const QuadsA a{p.quantized.codes + first_row * p.quantized.stride, p.quantized.stride};
  if (panels.rows() == 0) std::fill_n(sums, rows * stride, 0);
  for (int64_t k = 0; k < panels.rows(); k += kQuadBlock) {
    const int64_t quads = std::min(kQuadBlock, panels.rows() - k);
    for (int64_t r = 0; r < rows; r += kRowsAtOnce) {
      for (int64_t c = 0; c < columns; c += panels.panel) {
        const int64_t width = panels.width_of(first_column + c);
        multiply_quads<kVnni>(
            std::min(kRowsAtOnce, rows - r), width, quads, {a.data + r * a.row + 4 * k, a.row},
            {panels.at(first_column + c, k), width}, {sums + r * stride + c, stride}, k > 0);
      }
    }
  }
}

}  // namespace detail

// Computes one block of a product, as multiply_block does it.
template <class Finish>
void multiply_block_of_quads(const Product& p, const ProductBlocks& blocks,
                             const ProductScratch& scratch, int64_t item, const Finish& finish) {
  const F32 d;
  const I32 di;
  const int64_t first_row = item / blocks.column_blocks * blocks.row_block;
  const int64_t first_column = item % blocks.column_blocks * blocks.column_block;
  const int64_t rows = std::min(blocks.row_block, p.rows - first_row);
  const int64_t columns = std::min(blocks.column_block, p.columns - first_column);
  const int64_t stride = padded_columns(columns);
  auto* const sums = reinterpret_cast<int32_t*>(scratch.sums);
  bool offset = false;
  if constexpr (kCanHaveVnni) offset = has_vnni();
  if (offset) {
    detail::sum_quads<kCanHaveVnni>(p, first_row, rows, first_column, columns, sums, stride);
  } else {
    detail::sum_quads<false>(p, first_row, rows, first_column, columns, sums, stride);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const auto scale = hn::Set(d, p.quantized.scales[first_row + r]);
    const auto minus = hn::Set(di, offset ? p.quantized.offsets[first_row + r] : 0);
    for_vectors(columns, [&](int64_t c, int64_t) HWY_ATTR {
      const auto sum = hn::Add(hn::LoadU(di, sums + r * stride + c), minus);
      const auto by = hn::Mul(scale, hn::LoadU(d, p.panels->scales + first_column + c));
      hn::StoreU(hn::Mul(hn::ConvertTo(d, sum), by), d, scratch.sums + r * stride + c);
    });
  }
  finish(SumsBlock{scratch.sums, stride, first_row, rows, first_column, columns});
}

// Writes a row of floats as codes. Rows are padded with zeros to whole vectors, and so are the
// codes.
HWY_INLINE void quantize_row(const float* x, int64_t columns, const QuantizedRows& out,
                             int64_t row) {
  const F32 d;
  const I32 di;
  const hn::Rebind<int16_t, F32> d16;
  const hn::Rebind<int8_t, F32> d8;
  const int64_t lanes = hn::Lanes(d);
  auto most = hn::Zero(d), odd = hn::Zero(d);
  for (int64_t c = 0; c < columns; c += lanes) {
    const auto v = hn::LoadU(d, x + c);
    most = hn::Max(most, hn::Abs(v));
    odd = hn::MulAdd(v, hn::Zero(d), odd);  // NaN where a number is not finite
  }
  const float largest = ReduceMax(d, most);
  const bool finite = ReduceSum(d, odd) == 0.0f;
  // Every code is 0 in a row of zeros, or of numbers so small that their scale vanishes.
  const float scale = largest / 127.0f;
  const bool zero = !finite || !(1.0f / scale <= std::numeric_limits<float>::max());
  const auto inverse = hn::Set(d, zero ? 0.0f : 1.0f / scale);
  auto total = hn::Zero(di);
  int8_t* const codes = out.codes + row * out.stride;
  for (int64_t c = 0; c < columns; c += lanes) {
    auto q = hn::Zero(di);
    if (!zero) {
      q = hn::NearestInt(hn::Mul(hn::LoadU(d, x + c), inverse));
      q = hn::Min(hn::Max(q, hn::Set(di, -127)), hn::Set(di, 127));
    }
    total = hn::Add(total, q);
    hn::StoreU(hn::DemoteTo(d8, hn::DemoteTo(d16, q)), d8, codes + c);
  }
  const int64_t written = (columns + lanes - 1) / lanes * lanes;
  for (int64_t c = written; c < out.stride; ++c) codes[c] = 0;
  alignas(64) int32_t parts[16];
  hn::Store(total, di, parts);
  int32_t sum = 0;
  for (int64_t i = 0; i < lanes; ++i) sum += parts[i];
  out.offsets[row] = -128 * sum;
  out.scales[row] = finite ? scale : std::numeric_limits<float>::quiet_NaN();
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_CPU_GEMM_INT8_PER_TARGET
