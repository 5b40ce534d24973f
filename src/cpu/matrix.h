// Matrix products on vectors of float: C[M, N] (+)= A[M, K] B[K, N].
//
// Floor: one fused multiply-add per vector and step of K. A tile of C, kTileRows rows by two
// vectors, lives in registers while K runs: its multiply-adds are independent of each other and
// hide their latency, and each step costs one load per row of A (a broadcast) and two of B.
//
// Operands are float, in whatever memory the caller has: B and C have rows of whole vectors (see
// padded_columns), A may be stored either way round. Elements of B are read in order along a row,
// so a panel of B that is used for many rows of A should fit the first-level cache; cutting K and N
// into such pieces is up to the caller. matrix_pack.h brings tensors of any float type into this
// form.

// Once per target.
#if defined(FK_CPU_MATRIX_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_CPU_MATRIX_PER_TARGET
#undef FK_CPU_MATRIX_PER_TARGET
#else
#define FK_CPU_MATRIX_PER_TARGET
#endif

#include <cstdint>
#include <type_traits>

#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {

// A[m, k] = data[m * row + k * column].
struct MatrixA {
  const float* data;
  int64_t row, column;
};

// Rows of B or C, `stride` elements apart.
template <class T>
struct MatrixRows {
  T* data;
  int64_t stride;
};
using MatrixB = MatrixRows<const float>;
using MatrixC = MatrixRows<float>;

// What becomes of the values that C had.
enum class Keep { kNothing, kSum, kScaled };

namespace detail {

// 32 vector registers or 16.
constexpr int kTileRows = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4 ? 6 : 8;
constexpr int kTileVectors = 2;

#define FK_MATRIX_BODY HWY_ATTR __attribute__((always_inline))

// body(i) for i in [0, kCount), unrolled, so that arrays indexed by i can live in registers.
template <int kCount, class Body>
HWY_INLINE void repeat(const Body& body) {
  if constexpr (kCount > 0) {
    repeat<kCount - 1>(body);
    body(std::integral_constant<int, kCount - 1>());
  }
}

// A tile of C: kRows rows, kVectors vectors. `scale`: see multiply.
template <int kRows, int kVectors>
HWY_NOINLINE void multiply_tile(MatrixA a, MatrixB b, int64_t k_count, MatrixC c, Keep keep,
                                const float* scale) {
  const F32 d;
  using V = hn::Vec<F32>;
  const int64_t lanes = hn::Lanes(d);
  V sum[kRows][kVectors];
  if (keep == Keep::kNothing) {
    repeat<kRows>([&](auto r) FK_MATRIX_BODY {
      repeat<kVectors>([&](auto v) FK_MATRIX_BODY { sum[r][v] = hn::Zero(d); });
    });
  } else {
    repeat<kRows>([&](auto r) FK_MATRIX_BODY {
      repeat<kVectors>([&](auto v) FK_MATRIX_BODY {
        sum[r][v] = hn::LoadU(d, c.data + r * c.stride + v * lanes);
      });
    });
    if (keep == Keep::kScaled) {
      repeat<kVectors>([&](auto v) FK_MATRIX_BODY {
        const V factor = hn::LoadU(d, scale + v * lanes);
        repeat<kRows>([&](auto r) FK_MATRIX_BODY { sum[r][v] = hn::Mul(sum[r][v], factor); });
      });
    }
  }

  const float* rows[kRows];
  repeat<kRows>([&](auto r) FK_MATRIX_BODY { rows[r] = a.data + r * a.row; });
  const float* b_row = b.data;
  const int64_t end = k_count * a.column;
  for (int64_t k = 0; k < end; k += a.column) {
    V right[kVectors];
    repeat<kVectors>([&](auto v) FK_MATRIX_BODY { right[v] = hn::LoadU(d, b_row + v * lanes); });
    repeat<kRows>([&](auto r) FK_MATRIX_BODY {
      const V left = hn::Set(d, rows[r][k]);
      repeat<kVectors>([&](auto v)
                           FK_MATRIX_BODY { sum[r][v] = hn::MulAdd(left, right[v], sum[r][v]); });
    });
    b_row += b.stride;
  }
  repeat<kRows>([&](auto r) FK_MATRIX_BODY {
    repeat<kVectors>([&](auto v) FK_MATRIX_BODY {
      hn::StoreU(sum[r][v], d, c.data + r * c.stride + v * lanes);
    });
  });
}

template <int kRows, int kVectors>
HWY_INLINE void multiply_rows(int64_t& m, int64_t m_count, MatrixA a, MatrixB b, int64_t k_count,
                              MatrixC c, Keep keep, const float* scale) {
  for (; m + kRows <= m_count; m += kRows) {
    multiply_tile<kRows, kVectors>({a.data + m * a.row, a.row, a.column}, b, k_count,
                                   {c.data + m * c.stride, c.stride}, keep, scale);
  }
}

template <int kVectors>
void multiply_panel(int64_t m_count, int64_t k_count, MatrixA a, MatrixB b, MatrixC c, Keep keep,
                    const float* scale) {
  int64_t m = 0;
  multiply_rows<kTileRows, kVectors>(m, m_count, a, b, k_count, c, keep, scale);
  multiply_rows<4, kVectors>(m, m_count, a, b, k_count, c, keep, scale);
  multiply_rows<2, kVectors>(m, m_count, a, b, k_count, c, keep, scale);
  multiply_rows<1, kVectors>(m, m_count, a, b, k_count, c, keep, scale);
}

}  // namespace detail

// How many columns of C one pass over A makes: callers that choose a width choose multiples.
HWY_INLINE int64_t panel_width() {
  return detail::kTileVectors * static_cast<int64_t>(hn::Lanes(F32()));
}

// C = A B, C + A B, or scale[n] C + A B. n_count is a multiple of Lanes(F32()); m_count and k_count
// are any.
HWY_INLINE void multiply(int64_t m_count, int64_t n_count, int64_t k_count, MatrixA a, MatrixB b,
                         MatrixC c, Keep keep, const float* scale = nullptr) {
  const int64_t width = panel_width();
  int64_t n = 0;
  for (; n + width <= n_count; n += width) {
    detail::multiply_panel<detail::kTileVectors>(m_count, k_count, a, {b.data + n, b.stride},
                                                 {c.data + n, c.stride}, keep,
                                                 scale == nullptr ? nullptr : scale + n);
  }
  if (n < n_count) {
    detail::multiply_panel<1>(m_count, k_count, a, {b.data + n, b.stride}, {c.data + n, c.stride},
                              keep, scale == nullptr ? nullptr : scale + n);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_CPU_MATRIX_PER_TARGET
