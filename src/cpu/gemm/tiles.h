// This file computes matrix products on vectors of float: C[M, N] (+)= A[M, K] B[K, N].
//
// Floor: one fused multiply-add per vector and step of K. A tile of C, a few rows by two or four
// vectors, lives in registers while K runs: its multiply-adds are independent of each other and
// hide their latency, and each step costs one load per row of A (a broadcast) and a few of B.
//
// Operands are float, in memory that the caller provides: B and C have rows of whole vectors (see
// padded_columns), A may be stored by rows or by columns. Elements of B are read in order along a
// row, so a panel of B that is used for many rows of A should fit the first-level cache; the caller
// cuts K and N into such pieces. pack.h brings tensors of any float type into this form.

// This part is compiled once per instruction set (see cpu/foreach_target.h).
#if defined(FK_CPU_GEMM_TILES_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_CPU_GEMM_TILES_PER_TARGET
#undef FK_CPU_GEMM_TILES_PER_TARGET
#else
#define FK_CPU_GEMM_TILES_PER_TARGET
#endif

#include <cstdint>
#include <type_traits>

#include "cpu/gemm/view.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {

// Describes the left operand: A[m, k] = data[m * row + k * column].
struct MatrixA {
  const float* data;
  int64_t row, column;
};

// Describes the right operand B or the result C, whose rows are `stride` elements apart.
template <class T>
struct MatrixRows {
  T* data;
  int64_t stride;

  MatrixRows from(int64_t row) const { return {data + row * stride, stride}; }
};
using MatrixB = MatrixRows<const float>;
using MatrixC = MatrixRows<float>;

// Says what becomes of the values that C had: they are overwritten, added to, scaled and added to,
// or added in the end to a sum that began at 0 (which rounds less than a long sum does).
enum class Keep { kNothing, kSum, kScaled, kTotal };
// Says whether results are stored into the caches or past them (see cpu/cache.h). kStream needs a C
// whose rows are `streamable`.
enum class Store { kCached, kStream };

namespace detail {

// Is true where there are 32 vector registers, not 16.
constexpr bool kManyRegisters = HWY_TARGET != HWY_AVX2 && HWY_TARGET != HWY_SSE4;
constexpr int kTileVectors = 2;
// A tile is this many vectors wide where there are columns enough.
constexpr int kWideVectors = kManyRegisters ? 4 : 2;

// Returns how many rows a tile of `vectors` vectors has: it keeps 24 sums, 16, or 12.
constexpr int tile_rows(int vectors) { return vectors == 4 || !kManyRegisters ? 6 : 8; }
// Returns whether a tile of `rows` rows also prefetches rows ahead: most tiles of a product have
// that many.
constexpr bool looks_ahead(int rows) { return rows >= 4; }

// Computes a tile of C of kRows rows and kVectors vectors. With kAhead it prefetches a line at
// `ahead` in each step of K; `scale` is as in `multiply`. The members of A come as separate
// numbers, and the callers pass MatrixA by reference: a copy would be written to the stack in
// pieces and read back whole, and that read would wait for the stores before it to reach the cache.
template <int kRows, int kVectors, bool kAhead, Store kStore>
HWY_NOINLINE void multiply_tile(const float* a, int64_t a_row, int64_t a_column, MatrixB b,
                                int64_t k_count, MatrixC c, Keep keep, const float* scale,
                                Lines ahead) {
  const F32 d;
  using V = hn::Vec<F32>;
  const int64_t lanes = hn::Lanes(d);
  V sum[kRows][kVectors];
  const auto scale_rows = [&]() FK_MATRIX_BODY {
    repeat<kRows>([&](auto r) FK_MATRIX_BODY {
      const V factor = hn::Set(d, scale[r]);
      repeat<kVectors>([&](auto v) FK_MATRIX_BODY { sum[r][v] = hn::Mul(sum[r][v], factor); });
    });
  };
  if (keep == Keep::kNothing || keep == Keep::kTotal) {
    repeat<kRows>([&](auto r) FK_MATRIX_BODY {
      repeat<kVectors>([&](auto v) FK_MATRIX_BODY { sum[r][v] = hn::Zero(d); });
    });
  } else {
    repeat<kRows>([&](auto r) FK_MATRIX_BODY {
      repeat<kVectors>([&](auto v) FK_MATRIX_BODY {
        sum[r][v] = hn::LoadU(d, c.data + r * c.stride + v * lanes);
      });
    });
    if (keep == Keep::kScaled) scale_rows();
  }

  const float* rows[kRows];
  repeat<kRows>([&](auto r) FK_MATRIX_BODY { rows[r] = a + r * a_row; });
  const float* b_row = b.data;
  const int64_t end = k_count * a_column;
  for (int64_t k = 0; k < end; k += a_column) {
    V right[kVectors];
    repeat<kVectors>([&](auto v) FK_MATRIX_BODY { right[v] = hn::LoadU(d, b_row + v * lanes); });
    repeat<kRows>([&](auto r) FK_MATRIX_BODY {
      const V left = hn::Set(d, rows[r][k]);
      repeat<kVectors>([&](auto v)
                           FK_MATRIX_BODY { sum[r][v] = hn::MulAdd(left, right[v], sum[r][v]); });
    });
    b_row += b.stride;
    if constexpr (kAhead) {
      __builtin_prefetch(ahead.data, 0, 2);
      ahead.data += ahead.stride;
    }
  }
  if (keep == Keep::kNothing && scale != nullptr) scale_rows();
  if (keep == Keep::kTotal) {
    repeat<kRows>([&](auto r) FK_MATRIX_BODY {
      repeat<kVectors>([&](auto v) FK_MATRIX_BODY {
        sum[r][v] = hn::Add(hn::LoadU(d, c.data + r * c.stride + v * lanes), sum[r][v]);
      });
    });
  }
  repeat<kRows>([&](auto r) FK_MATRIX_BODY {
    repeat<kVectors>([&](auto v) FK_MATRIX_BODY {
      float* to = c.data + r * c.stride + v * lanes;
      if constexpr (kStore == Store::kStream) {
        hn::Stream(sum[r][v], d, to);
      } else {
        hn::StoreU(sum[r][v], d, to);
      }
    });
  });
}

// Computes one tile, and prefetches rows ahead if there are any left. `first` is where the tile's
// rows of A begin.
template <int kRows, int kVectors, Store kStore = Store::kCached>
HWY_INLINE void multiply_next_tile(const float* first, const MatrixA& a, MatrixB b, int64_t k_count,
                                   MatrixC c, Keep keep, const float* scale, RowsAhead* ahead) {
  constexpr bool kAhead = looks_ahead(kRows);
  if (kAhead && ahead != nullptr && !ahead->empty()) {
    multiply_tile<kRows, kVectors, kAhead, kStore>(first, a.row, a.column, b, k_count, c, keep,
                                                   scale, ahead->next(k_count));
  } else {
    multiply_tile<kRows, kVectors, false, kStore>(first, a.row, a.column, b, k_count, c, keep,
                                                  scale, {});
  }
}

// Computes tiles of kRows rows from row m on, as long as there are that many rows left; moves m on.
template <int kRows, int kVectors>
HWY_INLINE void multiply_rows(int64_t& m, int64_t m_count, const MatrixA& a, MatrixB b,
                              int64_t k_count, MatrixC c, Keep keep, const float* scale,
                              RowsAhead* ahead) {
  for (; m + kRows <= m_count; m += kRows) {
    multiply_next_tile<kRows, kVectors>(a.data + m * a.row, a, b, k_count,
                                        {c.data + m * c.stride, c.stride}, keep,
                                        scale == nullptr ? nullptr : scale + m, ahead);
  }
}

// Computes all rows of a panel of kVectors vectors of columns, with tiles as high as fit.
template <int kVectors>
void multiply_panel(int64_t m_count, int64_t k_count, const MatrixA& a, MatrixB b, MatrixC c,
                    Keep keep, const float* scale, RowsAhead* ahead) {
  int64_t m = 0;
  // Where 8 rows would be left, two tiles of 4 are faster than one of 6 and one of 2.
  constexpr int kRows = tile_rows(kVectors);
  const int64_t whole = kRows == 6 && m_count % 6 == 2 && m_count > 2 ? m_count - 8 : m_count;
  multiply_rows<kRows, kVectors>(m, whole, a, b, k_count, c, keep, scale, ahead);
  multiply_rows<4, kVectors>(m, m_count, a, b, k_count, c, keep, scale, ahead);
  multiply_rows<2, kVectors>(m, m_count, a, b, k_count, c, keep, scale, ahead);
  multiply_rows<1, kVectors>(m, m_count, a, b, k_count, c, keep, scale, ahead);
}

// Cuts the columns into panels, the widest first, and calls body(n, vectors) for each: n is its
// first column, and `vectors` its width as a compile-time constant.
template <class Body>
HWY_INLINE void for_each_panel(int64_t n_count, const Body& body) {
  const int64_t lanes = hn::Lanes(F32());
  int64_t n = 0;
  const auto panels = [&](auto vectors) FK_MATRIX_BODY {
    for (; n + vectors * lanes <= n_count; n += vectors * lanes) body(n, vectors);
  };
  panels(std::integral_constant<int, kWideVectors>());
  panels(std::integral_constant<int, kTileVectors>());
  panels(std::integral_constant<int, 1>());
}

// Computes a product of kRows rows, the height of one tile. Under a mask, each call has few rows
// and seldom as many as the last; here the number is tested once per call and not once per panel,
// where the processor would mispredict it again and again.
template <int kRows, Store kStore>
void multiply_strip(int64_t n_count, int64_t k_count, const MatrixA& a, MatrixB b, MatrixC c,
                    Keep keep, const float* scale, RowsAhead* ahead) {
  for_each_panel(n_count, [&](int64_t n, auto vectors) FK_MATRIX_BODY {
    multiply_next_tile<kRows, vectors, kStore>(a.data, a, {b.data + n, b.stride}, k_count,
                                               {c.data + n, c.stride}, keep, scale, ahead);
  });
}

}  // namespace detail

// Most of a large product is made of tiles that have this many rows.
constexpr int64_t kTileRows = detail::tile_rows(detail::kWideVectors);

// Returns the width of a panel in columns. Callers that choose how many columns of C to compute at
// a time should choose a multiple of it.
HWY_INLINE int64_t panel_width() {
  return detail::kTileVectors * static_cast<int64_t>(hn::Lanes(F32()));
}

// Computes C = A B (Keep::kNothing), C + A B (kSum, kTotal), or scale[m] C + A B (kScaled, which
// needs `scale`); with kNothing and a scale it is scale[m] (A B). n_count is a multiple of
// Lanes(F32()); m_count and k_count may be anything. `ahead`, which may be null, are rows to
// prefetch meanwhile. Only products of kTileRows or 4 rows heed kStore; others go into the caches.
template <Store kStore = Store::kCached>
HWY_INLINE void multiply(int64_t m_count, int64_t n_count, int64_t k_count, const MatrixA& a,
                         MatrixB b, MatrixC c, Keep keep, const float* scale = nullptr,
                         RowsAhead* ahead = nullptr) {
  if (m_count == kTileRows) {
    return detail::multiply_strip<kTileRows, kStore>(n_count, k_count, a, b, c, keep, scale, ahead);
  }
  if (m_count == 4) {
    return detail::multiply_strip<4, kStore>(n_count, k_count, a, b, c, keep, scale, ahead);
  }
  detail::for_each_panel(n_count, [&](int64_t n, auto vectors) FK_MATRIX_BODY {
    detail::multiply_panel<vectors>(m_count, k_count, a, {b.data + n, b.stride},
                                    {c.data + n, c.stride}, keep, scale, ahead);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_CPU_GEMM_TILES_PER_TARGET
