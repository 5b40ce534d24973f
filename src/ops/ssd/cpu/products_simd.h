// The large products of ssd's kernels, on float operands. Where activations are bfloat16 and the
// processor multiplies pairs of such numbers (cpu/gemm/tiles_bfloat16.h), operands are rounded to
// pairs first.

#include "ops/ssd/cpu/plan.h"

// Once per target.
#if defined(FK_SSD_CPU_PRODUCTS_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_SSD_CPU_PRODUCTS_PER_TARGET
#undef FK_SSD_CPU_PRODUCTS_PER_TARGET
#else
#define FK_SSD_CPU_PRODUCTS_PER_TARGET
#endif

#include "cpu/gemm/tiles.h"
#include "cpu/gemm/tiles_bfloat16.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

// Multiplies each row by its factor.
HWY_INLINE void scale_rows(const float* in, const float* factors, int64_t rows, int64_t width,
                           float* out) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t r = 0; r < rows; ++r, in += width, out += width) {
    const auto factor = hn::Set(d, factors[r]);
    for (int64_t c = 0; c < width; c += lanes) {
      hn::StoreU(hn::Mul(hn::LoadU(d, in + c), factor), d, out + c);
    }
  }
}

#if FK_CPU_BFLOAT16_TARGET

// Rounds rows of floats to pairs of neighbours down the columns: [(rows + 1) / 2, columns]. A last
// row without a partner is paired with zeros. `columns` is a multiple of 16.
FK_BFLOAT16_ATTR inline void pair_down(const float* in, int64_t stride, int64_t rows,
                                       int64_t columns, uint32_t* out) {
  alignas(64) static constexpr uint16_t kWoven[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i woven = _mm512_load_si512(kWoven);
  for (int64_t r = 0; r < rows; r += 2, in += 2 * stride, out += columns) {
    const bool has_partner = r + 1 < rows;
    for (int64_t c = 0; c < columns; c += 16) {
      const __m512 second = has_partner ? _mm512_loadu_ps(in + stride + c) : _mm512_setzero_ps();
      const __m512bh both = _mm512_cvtne2ps_pbh(second, _mm512_loadu_ps(in + c));
      _mm512_storeu_si512(out + c,
                          _mm512_permutexvar_epi16(woven, reinterpret_cast<__m512i>(both)));
    }
  }
}

// Rounds rows of floats to pairs of neighbours along them, `columns` / 2 in a row. `columns` is a
// multiple of 16.
FK_BFLOAT16_ATTR inline void pair_along(const float* in, int64_t stride, int64_t rows,
                                        int64_t columns, uint32_t* out) {
  for (int64_t r = 0; r < rows; ++r, in += stride, out += columns / 2) {
    int64_t c = 0;
    for (; c + 32 <= columns; c += 32) {
      const __m512bh both =
          _mm512_cvtne2ps_pbh(_mm512_loadu_ps(in + c + 16), _mm512_loadu_ps(in + c));
      _mm512_storeu_si512(out + c / 2, reinterpret_cast<__m512i>(both));
    }
    if (c < columns) {
      const __m256bh last = _mm512_cvtneps_pbh(_mm512_loadu_ps(in + c));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + c / 2), reinterpret_cast<__m256i>(last));
    }
  }
}

// The product of cpu/gemm/tiles.h, of operands rounded to bfloat16.
inline void multiply_rounded(uint32_t* pairs, int64_t m_count, int64_t n_count, int64_t k_count,
                             const MatrixA& a, MatrixB b, MatrixC c, Keep keep,
                             const float* scale) {
  const int64_t k_pairs = (k_count + 1) / 2;
  PairsA left{pairs, 0, 1};
  uint32_t* right = pairs;
  if (a.column == 1) {
    const int64_t columns = padded_columns(k_count);
    pair_along(a.data, a.row, m_count, columns, pairs);
    left.row = columns / 2;
    right += m_count * columns / 2;
  } else {
    const int64_t columns = padded_columns(m_count);
    pair_down(a.data, a.column, k_count, columns, pairs);
    left = {pairs, 1, columns};
    right += k_pairs * columns;
  }
  pair_down(b.data, b.stride, k_count, n_count, right);
  if (keep == Keep::kScaled) scale_rows(c.data, scale, m_count, c.stride, c.data);
  multiply_pairs(m_count, n_count, k_pairs, left, {right, n_count}, c, keep != Keep::kNothing);
  if (keep == Keep::kNothing && scale != nullptr) {
    scale_rows(c.data, scale, m_count, c.stride, c.data);
  }
}

#endif  // FK_CPU_BFLOAT16_TARGET

// Computes the product of cpu/gemm/tiles.h with sums over 64 of K at a stretch: errors grow with
// the square root of what is summed at a time. `part` has room for another C without gaps. Without
// Keep::kScaled there is no scale.
HWY_INLINE void multiply_in_parts(float* part, int64_t m_count, int64_t n_count, int64_t k_count,
                                  const MatrixA& a, MatrixB b, MatrixC c, Keep keep,
                                  const float* scale = nullptr) {
  constexpr int64_t kStretch = 64;
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  multiply(m_count, n_count, std::min(kStretch, k_count), a, b, c, keep, scale);
  for (int64_t k = kStretch; k < k_count; k += kStretch) {
    multiply(m_count, n_count, std::min(kStretch, k_count - k),
             MatrixA{a.data + k * a.column, a.row, a.column}, b.from(k), MatrixC{part, n_count},
             Keep::kNothing);
    for (int64_t r = 0; r < m_count; ++r) {
      float* to = c.data + r * c.stride;
      const float* more = part + r * n_count;
      for (int64_t i = 0; i < n_count; i += lanes) {
        hn::StoreU(hn::Add(hn::LoadU(d, to + i), hn::LoadU(d, more + i)), d, to + i);
      }
    }
  }
}

// Computes the product of cpu/gemm/tiles.h, for operands whose rows are padded with zeros; in pairs
// where the plan says so. `room` is ChunkScratch's.
HWY_INLINE void product(const ssd::Plan& plan, uint32_t* room, int64_t m_count, int64_t n_count,
                        int64_t k_count, const MatrixA& a, MatrixB b, MatrixC c, Keep keep,
                        const float* scale = nullptr) {
#if FK_CPU_BFLOAT16_TARGET
  if (plan.in_pairs) {
    return multiply_rounded(room, m_count, n_count, k_count, a, b, c, keep, scale);
  }
#endif
  (void)plan;
  const bool scale_after = keep == Keep::kNothing && scale != nullptr;
  multiply_in_parts(reinterpret_cast<float*>(room), m_count, n_count, k_count, a, b, c, keep,
                    scale_after ? nullptr : scale);
  if (scale_after) scale_rows(c.data, scale, m_count, c.stride, c.data);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_SSD_CPU_PRODUCTS_PER_TARGET
