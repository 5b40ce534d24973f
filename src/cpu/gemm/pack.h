// Packs tensors of any float type and any strides into float matrices for cpu/gemm/tiles.h, and
// unpacks them again.
//
// A packed matrix has rows without gaps, padded with zeros to whole vectors. Floor: memory traffic.
// Packing pays because rows of a tensor may lie a power of two apart, and then few of them fit the
// first-level cache at once.

// This part is compiled once per instruction set (see cpu/foreach_target.h).
#if defined(FK_CPU_GEMM_PACK_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_CPU_GEMM_PACK_PER_TARGET
#undef FK_CPU_GEMM_PACK_PER_TARGET
#else
#define FK_CPU_GEMM_PACK_PER_TARGET
#endif

#include <algorithm>
#include <cstdint>

#include "cpu/gemm/view.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace detail {

// Does what pack_rows below says; `row` and `column` are the strides of x.
template <class T>
void pack_rows(const T* x, int64_t row, int64_t column, int64_t rows, int64_t columns, float* out,
               int64_t width) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t r = 0; r < rows; ++r, x += row, out += width) {
    int64_t c = 0;
    if (column == 1) {
      for (; c + lanes <= columns; c += lanes) hn::StoreU(LoadF32(d, x + c), d, out + c);
      if (c < columns) {
        hn::StoreU(LoadNF32(d, x + c, static_cast<size_t>(columns - c)), d, out + c);
        c += lanes;
      }
    } else {
      for (; c < columns; ++c) out[c] = ToF32(x + c * column);
    }
    for (; c < width; ++c) out[c] = 0;
  }
}

// Does what unpack_rows below says; `row` and `column` are the strides of y.
template <class T>
void unpack_rows(const float* in, int64_t width, int64_t rows, int64_t columns,
                 const float* factors, T* y, int64_t row, int64_t column) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t r = 0; r < rows; ++r, in += width, y += row) {
    const auto factor = hn::Set(d, factors == nullptr ? 1.0f : factors[r]);
    int64_t c = 0;
    if (column == 1) {
      for (; c + lanes <= columns; c += lanes) {
        StoreF32(d, hn::Mul(hn::LoadU(d, in + c), factor), y + c);
      }
    }
    for (; c < columns; c += lanes) {  // rows are padded: a whole vector can be read
      const auto v = hn::Mul(hn::LoadU(d, in + c), factor);
      const size_t n = static_cast<size_t>(std::min(lanes, columns - c));
      if (column == 1) {
        StoreNF32(d, v, y + c, n);
      } else {
        StoreStridedF32(d, v, y + c * column, column, n);
      }
    }
  }
}

}  // namespace detail

// Packs `rows` rows of x, `columns` wide, into rows of `width` = padded_columns(columns) floats.
HWY_INLINE void pack_rows(const MatrixView& x, int64_t rows, int64_t columns, float* out,
                          int64_t width) {
  switch (x.dtype) {
    case DType::kFloat16:
      return detail::pack_rows(static_cast<const float16_t*>(x.data), x.row, x.column, rows,
                               columns, out, width);
    case DType::kBFloat16:
      return detail::pack_rows(static_cast<const bfloat16_t*>(x.data), x.row, x.column, rows,
                               columns, out, width);
    default:
      return detail::pack_rows(static_cast<const float*>(x.data), x.row, x.column, rows, columns,
                               out, width);
  }
}

// Unpacks `rows` rows of `width` floats into y, rounding to its dtype. factors[r], unless `factors`
// is null, is what row r is multiplied by.
HWY_INLINE void unpack_rows(const float* in, int64_t width, int64_t rows, int64_t columns,
                            const float* factors, const MatrixView& y) {
  switch (y.dtype) {
    case DType::kFloat16:
      return detail::unpack_rows(in, width, rows, columns, factors, static_cast<float16_t*>(y.data),
                                 y.row, y.column);
    case DType::kBFloat16:
      return detail::unpack_rows(in, width, rows, columns, factors,
                                 static_cast<bfloat16_t*>(y.data), y.row, y.column);
    default:
      return detail::unpack_rows(in, width, rows, columns, factors, static_cast<float*>(y.data),
                                 y.row, y.column);
  }
}

namespace detail {

// Returns a vector of four numbers from rows[0] + offset, four from rows[1] + offset, and so on.
template <class D>
HWY_INLINE hn::Vec<D> load_fours(D d, const float* const* rows, int64_t offset) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    return hn::LoadU(d, rows[0] + offset);
  } else {
    const hn::Half<D> half;
    return hn::Combine(d, load_fours(half, rows + hn::MaxLanes(half) / 4, offset),
                       load_fours(half, rows, offset));
  }
}

// Does what transpose and transpose_scaled below say.
template <bool kScaled>
void transpose(const float* in, int64_t in_stride, int64_t rows, int64_t columns, float* out,
               int64_t out_stride, float scale) {
  const F32 d;
  const hn::Repartition<double, F32> pairs;
  constexpr int64_t kFours = hn::MaxLanes(F32()) / 4;
  for (int64_t r = 0; r < rows; r += 4 * kFours) {
    const float* x[kFours];
    for (int64_t i = 0; i < kFours; ++i) x[i] = in + std::min(r + 4 * i, rows - 4) * in_stride;
    const auto load = [&](int64_t offset) HWY_ATTR {
      const auto v = load_fours(d, x, offset);
      if constexpr (kScaled) return hn::Mul(v, hn::Set(d, scale));
      return v;
    };
    float* y = out + r;
    for (int64_t c = 0; c < columns; c += 4, y += 4 * out_stride) {
      const auto x0 = load(0), x1 = load(in_stride), x2 = load(2 * in_stride);
      const auto x3 = load(3 * in_stride);
      const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, x0, x1));
      const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, x2, x3));
      const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, x0, x1));
      const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, x2, x3));
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23)), d, y);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23)), d, y + out_stride);
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23)), d, y + 2 * out_stride);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23)), d, y + 3 * out_stride);
      for (int64_t i = 0; i < kFours; ++i) x[i] += 4;
    }
  }
}

}  // namespace detail

// Writes out[c, r] = in[r, c] for a multiple of four rows and of four columns. `out` gets whole
// vectors, so its rows need room: after the last four values of r, these are repeated. The shuffles
// stay inside 128 bits, which is where every instruction set is fast.
HWY_INLINE void transpose(const float* in, int64_t in_stride, int64_t rows, int64_t columns,
                          float* out, int64_t out_stride) {
  detail::transpose<false>(in, in_stride, rows, columns, out, out_stride, 1.0f);
}
// Does the same and multiplies all numbers by `scale`.
HWY_INLINE void transpose_scaled(const float* in, int64_t in_stride, int64_t rows, int64_t columns,
                                 float* out, int64_t out_stride, float scale) {
  detail::transpose<true>(in, in_stride, rows, columns, out, out_stride, scale);
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_CPU_GEMM_PACK_PER_TARGET
