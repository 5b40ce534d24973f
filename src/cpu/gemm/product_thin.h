// This file computes products that move far more than they multiply: one row against a matrix, and
// few steps of K.
//
// Floor: reading B once, or writing C once. One row against columns that lie along K is a scalar
// product for each column, against rows of B a sum of those rows. Both read two streams of B at a
// time, each of them from end to end: with more, the processor's own prefetch falls behind, and
// with one a sum waits for the last. Few steps of K are outer products: their tiles go from
// registers to the result, without sums in memory.

// This part is compiled once per target.
#if defined(FK_CPU_GEMM_THIN_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_CPU_GEMM_THIN_PER_TARGET
#undef FK_CPU_GEMM_THIN_PER_TARGET
#else
#define FK_CPU_GEMM_THIN_PER_TARGET
#endif

#include <algorithm>
#include <cstdint>

#include "cpu/gemm/elements.h"
#include "cpu/gemm/plan.h"
#include "cpu/gemm/tiles.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace detail {

// A stream is prefetched this many bytes ahead of its use, which is memory's latency times its
// bandwidth.
constexpr int64_t kStreamAhead = 2048;

template <class T>
HWY_INLINE void prefetch_ahead(const T* p) {
  hwy::Prefetch(reinterpret_cast<const char*>(p) + kStreamAhead);
}

// Computes the scalar products of `a` with two columns. `a` is padded with zeros to whole vectors.
template <class T>
HWY_NOINLINE void dot_two(const float* a, const T* first, const T* second, int64_t depth,
                          float* first_out, float* second_out) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  constexpr int kSums = 4;
  hn::Vec<F32> sum[2][kSums];
  repeat<kSums>([&](auto i) FK_MATRIX_BODY { sum[0][i] = sum[1][i] = hn::Zero(d); });
  int64_t k = 0;
  for (; k + kSums * lanes <= depth; k += kSums * lanes) {
    repeat<kSums>([&](auto i) FK_MATRIX_BODY {
      const int64_t at = k + i * lanes;
      prefetch_ahead(first + at);
      prefetch_ahead(second + at);
      const auto left = hn::LoadU(d, a + at);
      sum[0][i] = hn::MulAdd(left, LoadF32(d, first + at), sum[0][i]);
      sum[1][i] = hn::MulAdd(left, LoadF32(d, second + at), sum[1][i]);
    });
  }
  for (; k + lanes <= depth; k += lanes) {
    const auto left = hn::LoadU(d, a + k);
    sum[0][0] = hn::MulAdd(left, LoadF32(d, first + k), sum[0][0]);
    sum[1][0] = hn::MulAdd(left, LoadF32(d, second + k), sum[1][0]);
  }
  if (k < depth) {
    const size_t n = static_cast<size_t>(depth - k);
    const auto left = hn::LoadU(d, a + k);
    sum[0][0] = hn::MulAdd(left, LoadNF32(d, first + k, n), sum[0][0]);
    sum[1][0] = hn::MulAdd(left, LoadNF32(d, second + k, n), sum[1][0]);
  }
  const auto total = [&](const hn::Vec<F32>* s) FK_MATRIX_BODY {
    return ReduceSum(d, hn::Add(hn::Add(s[0], s[1]), hn::Add(s[2], s[3])));
  };
  *first_out = total(sum[0]);
  *second_out = total(sum[1]);
}

// Multiplies one row with the columns [first, first + columns) of B, which lie along K.
template <class T>
void dot_row(const MatrixView& b, const float* a, int64_t depth, int64_t first, int64_t columns,
             float* sums) {
  const T* at = static_cast<const T*>(b.data) + first * b.column;
  const int64_t half = (columns + 1) / 2;
  for (int64_t c = 0; c < half; ++c) {
    const int64_t other = std::min(c + half, columns - 1);
    dot_two(a, at + c * b.column, at + other * b.column, depth, sums + c, sums + other);
  }
}

// Computes sums[c] = sum over k of a[k] b[k, c], for `depth` rows of B, which lie `stride` apart.
template <class T>
HWY_NOINLINE void sum_rows(const float* a, const T* b, int64_t stride, int64_t depth,
                           int64_t columns, float* sums) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  std::fill_n(sums, padded_columns(columns), 0.0f);
  for (int64_t k = 0; k < depth; k += 2) {
    const bool both = k + 1 < depth;
    const T* first = b + k * stride;
    const T* second = both ? first + stride : first;
    const auto left0 = hn::Set(d, a[k]), left1 = hn::Set(d, both ? a[k + 1] : 0.0f);
    // What both rows give is added up before it meets the sum, which is rounded half as often then.
    const auto add = [&](int64_t c, hn::Vec<F32> row0, hn::Vec<F32> row1) FK_MATRIX_BODY {
      auto v = hn::Mul(left0, row0);
      if (both) v = hn::MulAdd(left1, row1, v);
      hn::StoreU(hn::Add(hn::LoadU(d, sums + c), v), d, sums + c);
    };
    int64_t c = 0;
    for (; c + lanes <= columns; c += lanes) {
      prefetch_ahead(first + c);
      prefetch_ahead(second + c);
      add(c, LoadF32(d, first + c), LoadF32(d, second + c));
    }
    if (c < columns) {
      const size_t n = static_cast<size_t>(columns - c);
      add(c, LoadNF32(d, first + c, n), LoadNF32(d, second + c, n));
    }
  }
}

// Multiplies one row with kVectors vectors of columns of a packed panel, whose rows of `width` are
// read as one stream: sums[c] (+)= sum over k of a[k] b[k, c]. It is summed over 32 of K before it
// meets the sums of the rest.
template <int kVectors>
HWY_NOINLINE void row_by_panel(const float* a, const float* b, int64_t width, int64_t depth,
                               float* sums, bool add) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  constexpr int64_t kStretch = 32;
  hn::Vec<F32> total[kVectors];
  repeat<kVectors>([&](auto v) FK_MATRIX_BODY {
    total[v] = add ? hn::LoadU(d, sums + v * lanes) : hn::Zero(d);
  });
  for (int64_t k = 0; k < depth; k += kStretch) {
    const int64_t some = std::min(kStretch, depth - k);
    hn::Vec<F32> sum[2][kVectors];
    repeat<kVectors>([&](auto v) FK_MATRIX_BODY { sum[0][v] = sum[1][v] = hn::Zero(d); });
    const auto step = [&](int64_t i, auto which) FK_MATRIX_BODY {
      const auto left = hn::Set(d, a[k + i]);
      const float* const row = b + (k + i) * width;
      repeat<kVectors>([&](auto v) FK_MATRIX_BODY {
        hwy::Prefetch(reinterpret_cast<const char*>(row + v * lanes) + 2 * kStreamAhead);
        sum[which][v] = hn::MulAdd(left, hn::LoadU(d, row + v * lanes), sum[which][v]);
      });
    };
    int64_t i = 0;
    for (; i + 2 <= some; i += 2) {
      step(i, std::integral_constant<int, 0>());
      step(i + 1, std::integral_constant<int, 1>());
    }
    if (i < some) step(i, std::integral_constant<int, 0>());
    repeat<kVectors>([&](auto v) FK_MATRIX_BODY {
      total[v] = hn::Add(total[v], hn::Add(sum[0][v], sum[1][v]));
    });
  }
  repeat<kVectors>([&](auto v) FK_MATRIX_BODY { hn::StoreU(total[v], d, sums + v * lanes); });
}

// Computes a tile of outer products: kRows rows by kVectors vectors of C, of which the last holds n
// columns. a[k, r] is at a[k * a_step + r], b[k, c] at b[k * b_step + c].
template <int kRows, int kVectors, class T>
HWY_INLINE void outer_tile(const float* a, int64_t a_step, const float* b, int64_t b_step,
                           int64_t depth, T* c, int64_t c_row, int64_t n) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  hn::Vec<F32> sum[kRows][kVectors];
  repeat<kRows>([&](auto r) FK_MATRIX_BODY {
    repeat<kVectors>([&](auto v) FK_MATRIX_BODY { sum[r][v] = hn::Zero(d); });
  });
  for (int64_t k = 0; k < depth; ++k, a += a_step, b += b_step) {
    hn::Vec<F32> right[kVectors];
    repeat<kVectors>([&](auto v) FK_MATRIX_BODY { right[v] = hn::LoadU(d, b + v * lanes); });
    repeat<kRows>([&](auto r) FK_MATRIX_BODY {
      const auto left = hn::Set(d, a[r]);
      repeat<kVectors>([&](auto v)
                           FK_MATRIX_BODY { sum[r][v] = hn::MulAdd(left, right[v], sum[r][v]); });
    });
  }
  repeat<kRows>([&](auto r) FK_MATRIX_BODY {
    repeat<kVectors>([&](auto v) FK_MATRIX_BODY {
      store_vector(c + r * c_row + v * lanes, v == kVectors - 1 ? n : lanes, sum[r][v]);
    });
  });
}

template <int kRows, class T>
HWY_NOINLINE void outer_rows(const float* a, int64_t a_step, const float* b, int64_t b_step,
                             int64_t depth, int64_t columns, T* c, int64_t c_row) {
  const int64_t lanes = hn::Lanes(F32());
  constexpr int kVectors = kWideVectors;
  int64_t i = 0;
  for (; i + kVectors * lanes <= columns; i += kVectors * lanes) {
    outer_tile<kRows, kVectors>(a, a_step, b + i, b_step, depth, c + i, c_row, lanes);
  }
  for (; i < columns; i += lanes) {
    const int64_t n = std::min(lanes, columns - i);
    outer_tile<kRows, 1>(a, a_step, b + i, b_step, depth, c + i, c_row, n);
  }
}

}  // namespace detail

// Computes the rows [begin, end) of a product of few steps of K, into memory of T whose rows lie
// c_row apart. `a` is A turned, [depth, padded_columns(rows)], and `b` B, [depth,
// padded_columns(columns)].
template <class T>
void multiply_few_steps(const Product& p, const float* a, const float* b, int64_t begin,
                        int64_t end, T* c, int64_t c_row) {
  constexpr int64_t kRows = 4;
  constexpr int64_t kKept = (16 << 10) / sizeof(float);  // of B, in the first-level cache
  const int64_t a_step = padded_columns(p.rows), b_step = padded_columns(p.columns);
  const int64_t some =
      std::max<int64_t>(kPanelColumns, kKept / p.depth / kPanelColumns * kPanelColumns);
  for (int64_t first = 0; first < p.columns; first += some) {
    const int64_t columns = std::min(some, p.columns - first);
    int64_t r = begin;
    for (; r + kRows <= end; r += kRows) {
      detail::outer_rows<kRows>(a + r, a_step, b + first, b_step, p.depth, columns,
                                c + r * c_row + first, c_row);
    }
    for (; r < end; ++r) {
      detail::outer_rows<1>(a + r, a_step, b + first, b_step, p.depth, columns,
                            c + r * c_row + first, c_row);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_CPU_GEMM_THIN_PER_TARGET
