// This file computes matrix products of bytes with sums in int32, C[M, N] (+)= A[M, K] B[K, N], on
// the byte products of cpu/gemm/bytes.h.
//
// Floor: with VNNI one instruction for each vector of C and four steps of K, without it four. So
// operands are matrices of quads, four neighbours along K: a row of A is a row of quads as it lies,
// B has K / 4 rows of cells (cpu/gemm/panels.h). A is signed. B is codes from 1 to 255 that stand
// for numbers 128 less. With VNNI they are multiplied as they are, so that C is too large by 128
// times the sum of the row of A; without, as signed numbers, and C is right.

// This part is compiled once per instruction set (see cpu/foreach_target.h).
#if defined(FK_CPU_GEMM_TILES_INT8_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_CPU_GEMM_TILES_INT8_PER_TARGET
#undef FK_CPU_GEMM_TILES_INT8_PER_TARGET
#else
#define FK_CPU_GEMM_TILES_INT8_PER_TARGET
#endif

#include <cstdint>

#include "cpu/gemm/bytes.h"
#include "cpu/gemm/tiles.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {

// Describes the left operand: the quad of columns 4k to 4k + 3 of row m begins at data[m * row + 4
// * k].
struct QuadsA {
  const int8_t* data;
  int64_t row;
};
using QuadsB = MatrixRows<const uint32_t>;
using QuadsC = MatrixRows<int32_t>;

namespace detail {

// Says how many rows a tile has. Without VNNI each vector of B takes two registers, and its
// products one more.
template <bool kVnni>
constexpr int quad_rows(int vectors) {
  return kVnni || kManyRegisters ? tile_rows(vectors) : 4;
}

// Computes a tile of C; k_count is in quads.
template <bool kVnni, int kRows, int kVectors>
HWY_NOINLINE void multiply_quads_tile(const int8_t* a, int64_t a_row, QuadsB b, int64_t k_count,
                                      QuadsC c, bool add) {
  const I32 d;
  const Bytes bytes;
  const int64_t lanes = hn::Lanes(d);
  hn::Vec<I32> sum[kRows][kVectors];
  repeat<kRows>([&](auto r) FK_MATRIX_BODY {
    repeat<kVectors>([&](auto v) FK_MATRIX_BODY {
      sum[r][v] = hn::Zero(d);
      if (add) sum[r][v] = hn::LoadU(d, c.data + r * c.stride + v * lanes);
    });
  });
  for (int64_t k = 0; k < k_count; ++k) {
    hn::Vec<Bytes> right[kVectors];
    repeat<kVectors>([&](auto v) FK_MATRIX_BODY {
      right[v] = hn::LoadU(bytes, reinterpret_cast<const uint8_t*>(b.data + v * lanes));
      if constexpr (!kVnni) right[v] = hn::Xor(right[v], hn::Set(bytes, 0x80));
    });
    repeat<kRows>([&](auto r) FK_MATRIX_BODY {
      const auto left = hn::Set(d, load_quad(a + r * a_row));
      repeat<kVectors>([&](auto v) FK_MATRIX_BODY {
        if constexpr (kVnni) {
          sum[r][v] = add_by_vnni(sum[r][v], right[v], left);
        } else {
          const auto size =
              hn::BitCast(bytes, hn::Abs(hn::BitCast(hn::ScalableTag<int8_t>(), right[v])));
          const auto pairs = multiply_pairs(size, take_sign(hn::BitCast(bytes, left), right[v]));
          sum[r][v] = hn::Add(sum[r][v], add_pairs(pairs));
        }
      });
    });
    a += 4;
    b.data += b.stride;
  }
  repeat<kRows>([&](auto r) FK_MATRIX_BODY {
    repeat<kVectors>([&](auto v) FK_MATRIX_BODY {
      hn::StoreU(sum[r][v], d, c.data + r * c.stride + v * lanes);
    });
  });
}

// Computes tiles of kRows rows from row m on, as long as there are that many rows left; moves m on.
template <bool kVnni, int kRows, int kVectors>
HWY_INLINE void multiply_quads_rows(int64_t& m, int64_t m_count, const QuadsA& a, QuadsB b,
                                    int64_t k_count, QuadsC c, bool add) {
  for (; m + kRows <= m_count; m += kRows) {
    multiply_quads_tile<kVnni, kRows, kVectors>(a.data + m * a.row, a.row, b, k_count, c.from(m),
                                                add);
  }
}

}  // namespace detail

// Computes C = A B, or C + A B if `add`, with k_count quads along K. n_count is a multiple of
// Lanes(I32()).
template <bool kVnni>
void multiply_quads(int64_t m_count, int64_t n_count, int64_t k_count, const QuadsA& a, QuadsB b,
                    QuadsC c, bool add) {
  detail::for_each_panel(n_count, [&](int64_t n, auto vectors) FK_MATRIX_BODY {
    constexpr int kVectors = vectors;
    const QuadsB right{b.data + n, b.stride};
    const QuadsC to{c.data + n, c.stride};
    int64_t m = 0;
    detail::multiply_quads_rows<kVnni, detail::quad_rows<kVnni>(kVectors), kVectors>(
        m, m_count, a, right, k_count, to, add);
    if constexpr (detail::quad_rows<kVnni>(kVectors) > 4) {
      detail::multiply_quads_rows<kVnni, 4, kVectors>(m, m_count, a, right, k_count, to, add);
    }
    detail::multiply_quads_rows<kVnni, 2, kVectors>(m, m_count, a, right, k_count, to, add);
    detail::multiply_quads_rows<kVnni, 1, kVectors>(m, m_count, a, right, k_count, to, add);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_CPU_GEMM_TILES_INT8_PER_TARGET
