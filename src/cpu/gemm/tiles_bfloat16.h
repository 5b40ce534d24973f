// This file computes matrix products of bfloat16 numbers with sums in float, C[M, N] (+)= A[M, K]
// B[K, N], where the processor has an instruction for them (AVX512-BF16).
//
// Floor: half the multiply-adds of cpu/gemm/tiles.h, since each instruction multiplies two
// neighbours along K and adds both products to one float. So operands are matrices of such pairs,
// 32 bits each: A has K / 2 of them in a row, B has K / 2 rows. A row of bfloat16 numbers in memory
// already is a row of pairs along it; pair_rows makes pairs down the columns. Tiles are those of
// cpu/gemm/tiles.h. The instruction treats subnormal numbers as 0.

// This part is compiled once per instruction set (see cpu/foreach_target.h).
#if defined(FK_CPU_GEMM_TILES_BFLOAT16_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_CPU_GEMM_TILES_BFLOAT16_PER_TARGET
#undef FK_CPU_GEMM_TILES_BFLOAT16_PER_TARGET
#else
#define FK_CPU_GEMM_TILES_BFLOAT16_PER_TARGET
#endif

#include <cstdint>

#include "cpu/gemm/bfloat16.h"
#include "cpu/gemm/tiles.h"

// Kernels compiled for this target have the products inside, and may use them only if
// multiplies_bfloat16().
#undef FK_CPU_BFLOAT16_TARGET
#if HWY_TARGET == HWY_AVX3
#define FK_CPU_BFLOAT16_TARGET 1
#else
#define FK_CPU_BFLOAT16_TARGET 0
#endif

#if FK_CPU_BFLOAT16_TARGET

#undef FK_BFLOAT16_ATTR
#define FK_BFLOAT16_ATTR __attribute__((target(HWY_TARGET_STR ",avx512bf16")))

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {

// Describes the left operand, in pairs: the pair of columns k and k + 1 (k even) of row m is data[m
// * row + k / 2 * column].
struct PairsA {
  const uint32_t* data;
  int64_t row, column;
};
using PairsB = MatrixRows<const uint32_t>;

namespace detail {

#undef FK_PAIRS_BODY
#define FK_PAIRS_BODY FK_BFLOAT16_ATTR __attribute__((always_inline))

// Does the same as `repeat` of cpu/simd.h, for bodies with these instructions in them.
template <int kCount, class Body>
FK_PAIRS_BODY inline void repeat_pairs(const Body& body) {
  if constexpr (kCount > 0) {
    repeat_pairs<kCount - 1>(body);
    body(std::integral_constant<int, kCount - 1>());
  }
}

// Computes a tile of C; k_count is in pairs. With kAhead it prefetches a line in each step of K.
template <int kRows, int kVectors, bool kAhead>
FK_BFLOAT16_ATTR HWY_NOINLINE void multiply_pairs_tile(const uint32_t* a, int64_t a_row,
                                                       int64_t a_column, PairsB b, int64_t k_count,
                                                       MatrixC c, bool add, Lines ahead) {
  constexpr int kLanes = 16;
  __m512 sum[kRows][kVectors];
  const auto for_each_sum = [&](const auto& body) FK_PAIRS_BODY {
    repeat_pairs<kRows>([&](auto r) FK_PAIRS_BODY {
      repeat_pairs<kVectors>(
          [&](auto v) FK_PAIRS_BODY { body(sum[r][v], c.data + r * c.stride + v * kLanes); });
    });
  };
  if (add) {
    for_each_sum([](__m512& x, float* p) FK_PAIRS_BODY { x = _mm512_loadu_ps(p); });
  } else {
    for_each_sum([](__m512& x, float*) FK_PAIRS_BODY { x = _mm512_setzero_ps(); });
  }
  for (int64_t k = 0; k < k_count; ++k) {
    __m512bh right[kVectors];
    repeat_pairs<kVectors>([&](auto v) FK_PAIRS_BODY {
      right[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b.data + v * kLanes));
    });
    repeat_pairs<kRows>([&](auto r) FK_PAIRS_BODY {
      const auto left =
          reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int32_t>(a[r * a_row])));
      repeat_pairs<kVectors>(
          [&](auto v) FK_PAIRS_BODY { sum[r][v] = _mm512_dpbf16_ps(sum[r][v], left, right[v]); });
    });
    a += a_column;
    b.data += b.stride;
    if constexpr (kAhead) {
      __builtin_prefetch(ahead.data, 0, 2);
      ahead.data += ahead.stride;
    }
  }
  for_each_sum([](__m512& x, float* p) FK_PAIRS_BODY { _mm512_storeu_ps(p, x); });
}

// Computes tiles of kRows rows from row m on, as long as there are that many rows left; moves m on.
template <int kRows, int kVectors>
HWY_INLINE void multiply_pairs_rows(int64_t& m, int64_t m_count, const PairsA& a, PairsB b,
                                    int64_t k_count, MatrixC c, bool add, RowsAhead* ahead) {
  for (; m + kRows <= m_count; m += kRows) {
    const uint32_t* mine = a.data + m * a.row;
    const MatrixC to{c.data + m * c.stride, c.stride};
    constexpr bool kAhead = looks_ahead(kRows);
    if (kAhead && ahead != nullptr && !ahead->empty()) {
      multiply_pairs_tile<kRows, kVectors, kAhead>(mine, a.row, a.column, b, k_count, to, add,
                                                   ahead->next(k_count));
    } else {
      multiply_pairs_tile<kRows, kVectors, false>(mine, a.row, a.column, b, k_count, to, add, {});
    }
  }
}

// Computes all rows of a panel of kVectors vectors of columns.
template <int kVectors>
void multiply_pairs_panel(int64_t m_count, int64_t k_count, const PairsA& a, PairsB b, MatrixC c,
                          bool add, RowsAhead* ahead) {
  int64_t m = 0;
  multiply_pairs_rows<tile_rows(kVectors), kVectors>(m, m_count, a, b, k_count, c, add, ahead);
  multiply_pairs_rows<4, kVectors>(m, m_count, a, b, k_count, c, add, ahead);
  multiply_pairs_rows<2, kVectors>(m, m_count, a, b, k_count, c, add, ahead);
  multiply_pairs_rows<1, kVectors>(m, m_count, a, b, k_count, c, add, ahead);
}

}  // namespace detail

// Computes C = A B, or C + A B if `add`, with k_count pairs along K. n_count is a multiple of 16.
// `ahead`, which may be null, are rows to prefetch meanwhile.
HWY_INLINE void multiply_pairs(int64_t m_count, int64_t n_count, int64_t k_count, const PairsA& a,
                               PairsB b, MatrixC c, bool add, RowsAhead* ahead = nullptr) {
  int64_t n = 0;
  const auto panels = [&](auto vectors) HWY_ATTR {
    for (; n + vectors * 16 <= n_count; n += vectors * 16) {
      detail::multiply_pairs_panel<vectors>(m_count, k_count, a, {b.data + n, b.stride},
                                            {c.data + n, c.stride}, add, ahead);
    }
  };
  panels(std::integral_constant<int, 4>());
  panels(std::integral_constant<int, 2>());
  panels(std::integral_constant<int, 1>());
}

// Copies rows of `columns` numbers, `stride` apart, to rows of width / 2 pairs without gaps.
// `width` is a multiple of 16; the columns beyond `columns` become 0.
HWY_INLINE void copy_pairs(const uint16_t* x, int64_t stride, int64_t rows, int64_t columns,
                           uint32_t* out, int64_t width) {
  const hn::ScalableTag<uint16_t> d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t r = 0; r < rows; ++r, x += stride, out += width / 2) {
    auto* y = reinterpret_cast<uint16_t*>(out);
    int64_t c = 0;
    for (; c + lanes <= columns; c += lanes) hn::StoreU(hn::LoadU(d, x + c), d, y + c);
    if (c < width) {
      const auto tail = hn::MaskedLoad(hn::FirstN(d, static_cast<size_t>(columns - c)), d, x + c);
      hn::BlendedStore(tail, hn::FirstN(d, static_cast<size_t>(width - c)), d, y + c);
    }
  }
}

// Turns numbers [rows, width], as copy_pairs leaves them, into pairs down the columns, [(rows + 1)
// / 2, width]. A last row without a partner is paired with zeros.
HWY_INLINE void pair_rows(const uint32_t* x, int64_t rows, int64_t width, uint32_t* out) {
  const hn::ScalableTag<uint32_t> d;
  const hn::Rebind<uint16_t, decltype(d)> half;
  const auto* numbers = reinterpret_cast<const uint16_t*>(x);
  for (int64_t r = 0; r < rows; r += 2, out += width) {
    const uint16_t* first = numbers + r * width;
    for (int64_t c = 0; c < width; c += hn::Lanes(d)) {
      auto pairs = hn::PromoteTo(d, hn::LoadU(half, first + c));
      if (r + 1 < rows) {
        const auto second = hn::PromoteTo(d, hn::LoadU(half, first + width + c));
        pairs = hn::Or(pairs, hn::ShiftLeft<16>(second));
      }
      hn::StoreU(pairs, d, out + c);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_CPU_BFLOAT16_TARGET

#endif  // FK_CPU_GEMM_TILES_BFLOAT16_PER_TARGET
