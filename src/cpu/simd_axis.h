// This file computes sums, maxima and exponential sums over rows and over tiles of columns, for the
// CPU kernels that work along an axis. cpu/axis_plan.h describes the two layouts,
// cpu/foreach_target.h how a kernel file is laid out. A fold combines many values into one, as a
// sum or a maximum does.

// This part is compiled once per instruction set.
#if defined(FK_CPU_SIMD_AXIS_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_CPU_SIMD_AXIS_PER_TARGET
#undef FK_CPU_SIMD_AXIS_PER_TARGET
#else
#define FK_CPU_SIMD_AXIS_PER_TARGET
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cpu/axis_plan.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {

// Returns a pointer to n <= kBlock elements side by side: p itself if they already are, or
// `buffer`, after copying the elements `stride` apart to it.
template <class T>
HWY_INLINE const T* Gather(const T* p, int64_t stride, int64_t n, T* buffer) {
  if (HWY_LIKELY(stride == 1)) return p;
  for (int64_t i = 0; i < n; ++i) buffer[i] = p[i * stride];
  return buffer;
}

// Copies n elements from `buffer` to places `stride` elements apart.
template <class T>
HWY_INLINE void Scatter(const T* buffer, int64_t n, T* p, int64_t stride) {
  for (int64_t i = 0; i < n; ++i) p[i * stride] = buffer[i];
}

// Calls f(i, k) for the vectors that cover n elements, i being the index of a vector's first. For
// whole vectors k is the constant 0; for the last one, if it is not whole, k is the number of its
// elements. Load and Store below take the same k.
template <class F>
HWY_INLINE void ForEachVector(int64_t n, const F& f) {
  const int64_t lanes = hn::Lanes(F32());
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) f(i, std::integral_constant<int64_t, 0>());
  if (i < n) f(i, n - i);
}

// Loads a whole vector if k is the constant 0, else the first k lanes; the others are `fill`.
template <class T, class K>
HWY_INLINE hn::Vec<F32> Load(const T* p, K k, float fill = 0.0f) {
  if constexpr (std::is_same_v<K, int64_t>) {
    return LoadNF32(F32(), p, static_cast<size_t>(k), fill);
  } else {
    return LoadF32(F32(), p);
  }
}

// Loads as Load does, but a vector of 16 floats in two halves. From the third-level cache that is
// faster, above all where a row does not start at a cache line: then every whole vector crosses
// from one line into the next, but only every second half does.
template <class T, class K>
HWY_INLINE hn::Vec<F32> LoadHalves(const T* p, K k) {
#if HWY_TARGET == HWY_AVX3
  if constexpr (std::is_same_v<T, float> && !std::is_same_v<K, int64_t>) {
    const hn::Half<F32> dh;
    return hn::Combine(F32(), hn::LoadU(dh, p + hn::Lanes(dh)), hn::LoadU(dh, p));
  }
#endif
  return Load(p, k);
}

// Stores a whole vector if k is the constant 0, else the first k lanes.
template <class V, class T, class K>
HWY_INLINE void Store(V v, T* p, K k) {
  if constexpr (std::is_same_v<K, int64_t>) {
    StoreNF32(F32(), v, p, static_cast<size_t>(k));
  } else {
    StoreF32(F32(), v, p);
  }
}

// This is a good kAtOnce for WriteVectors where f is only a few instructions.
constexpr int kManyAtOnce = 8;

// Writes the vectors f(i, k) that cover n elements to out[i]. With `stream`, if `out` is aligned,
// they are stored past the caches, and hwy::FlushStream() must follow. Otherwise kAtOnce vectors
// are computed before the first of them is stored.
template <int kAtOnce = 1, class T, class F>
HWY_INLINE void WriteVectors(T* out, int64_t n, bool stream, const F& f) {
  const F32 d;
  if (stream && reinterpret_cast<uintptr_t>(out) % (hn::Lanes(d) * sizeof(T)) == 0) {
    ForEachVector(n, [&](int64_t i, auto k) HWY_ATTR {
      if constexpr (std::is_same_v<decltype(k), int64_t>) {
        Store(f(i, k), out + i, k);
      } else {
        StreamF32(F32(), f(i, k), out + i);
      }
    });
  } else {
    const int64_t lanes = hn::Lanes(d);
    int64_t done = 0;
    if constexpr (kAtOnce > 1) {
      constexpr std::integral_constant<int64_t, 0> kFull;
      for (; done + kAtOnce * lanes <= n; done += kAtOnce * lanes) {
        hn::Vec<F32> v[kAtOnce];
        for (int j = 0; j < kAtOnce; ++j) v[j] = f(done + j * lanes, kFull);
        for (int j = 0; j < kAtOnce; ++j) StoreF32(d, v[j], out + done + j * lanes);
      }
    }
    ForEachVector(n - done,
                  [&](int64_t i, auto k) HWY_ATTR { Store(f(done + i, k), out + done + i, k); });
  }
}

// Combines the vectors f(i, k) that cover n elements into one vector; in the last one, lanes past
// the end must be neutral. Four independent chains hide the latency of `combine` and keep sums
// short.
template <class Combine, class F>
HWY_INLINE hn::Vec<F32> Fold(hn::Vec<F32> neutral, int64_t n, const Combine& combine, const F& f) {
  constexpr std::integral_constant<int64_t, 0> kFull;
  const int64_t lanes = hn::Lanes(F32());
  auto a = neutral, b = neutral, c = neutral, e = neutral;
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    a = combine(a, f(i, kFull));
    b = combine(b, f(i + lanes, kFull));
    c = combine(c, f(i + 2 * lanes, kFull));
    e = combine(e, f(i + 3 * lanes, kFull));
  }
  for (; i + lanes <= n; i += lanes) a = combine(a, f(i, kFull));
  if (i < n) b = combine(b, f(i, n - i));
  return combine(combine(a, b), combine(c, e));
}

// Does a fold across columns: acc[c] = combine(acc[c], f(j, c, k)) for all steps j of the axis in
// [begin, end) and all columns c < width.
template <class Combine, class F>
HWY_INLINE void FoldColumns(float* acc, int64_t width, int64_t begin, int64_t end,
                            const Combine& combine, const F& f) {
  int64_t j = begin;
  for (; j + 4 <= end; j += 4) {
    ForEachVector(width, [&](int64_t c, auto k) HWY_ATTR {
      const auto pair0 = combine(f(j, c, k), f(j + 1, c, k));
      const auto pair1 = combine(f(j + 2, c, k), f(j + 3, c, k));
      Store(combine(Load(acc + c, k), combine(pair0, pair1)), acc + c, k);
    });
  }
  for (; j < end; ++j) {
    ForEachVector(width, [&](int64_t c, auto k) HWY_ATTR {
      Store(combine(Load(acc + c, k), f(j, c, k)), acc + c, k);
    });
  }
}

// Computes sum[c], the sum of f(j, c, k) over the steps j in [begin, end), for all columns c <
// width. Blocks of steps are summed in float, and the blocks in double, to stay accurate.
template <class F>
HWY_INLINE void SumColumns(double* sum, int64_t width, int64_t begin, int64_t end, const F& f) {
  constexpr int64_t kSteps = 64;
  const auto add = [](auto x, auto y) HWY_ATTR { return hn::Add(x, y); };
  alignas(64) float block[kTile];
  std::fill_n(sum, width, 0.0);
  for (int64_t j = begin; j < end; j += kSteps) {
    std::fill_n(block, width, 0.0f);
    FoldColumns(block, width, j, std::min(end, j + kSteps), add, f);
    for (int64_t c = 0; c < width; ++c) sum[c] += block[c];
  }
}

// Returns the sum of the vectors f(i, k) that cover n elements; lanes past the end must be 0.
template <class F>
HWY_INLINE float FoldSum(int64_t n, const F& f) {
  const F32 d;
  const auto add = [](auto x, auto y) HWY_ATTR { return hn::Add(x, y); };
  return ReduceSum(d, Fold(hn::Zero(d), n, add, f));
}

// Returns the largest of n elements side by side. If one is NaN, the result may or may not be.
template <class T>
HWY_INLINE float BlockMax(const T* p, int64_t n) {
  const F32 d;
  const auto max = [](auto x, auto y) HWY_ATTR { return hn::Max(x, y); };
  const auto load = [p](int64_t i, auto k) HWY_ATTR { return Load(p + i, k, -kInfinity); };
  return ReduceMax(d, Fold(hn::Set(d, -kInfinity), n, max, load));
}

// Returns the sum of n elements side by side.
template <class T>
HWY_INLINE float BlockSum(const T* p, int64_t n) {
  return FoldSum(n, [p](int64_t i, auto k) HWY_ATTR { return LoadHalves(p + i, k); });
}

// Returns the sum of a row of n elements `stride` apart. It sums short blocks in float and adds
// these sums in double, lane by lane, because the error grows with the square root of how many
// numbers are added up in float: with AVX-512, these are 16 in each lane.
template <class T>
HWY_INLINE double RowSum(const T* x, int64_t stride, int64_t n) {
  const F32 d;
  const hn::Half<F32> dh;
  const hn::Repartition<double, F32> dd;
  constexpr int64_t kShort = kBlock / 4;
  const auto add = [](auto a, auto b) HWY_ATTR { return hn::Add(a, b); };
  T buffer[kShort];
  auto low = hn::Zero(dd), high = hn::Zero(dd);
  for (int64_t i = 0; i < n; i += kShort) {
    const int64_t count = std::min(kShort, n - i);
    const T* p = Gather(x + i * stride, stride, count, buffer);
    const auto sum = Fold(hn::Zero(d), count, add,
                          [p](int64_t c, auto k) HWY_ATTR { return LoadHalves(p + c, k); });
    low = hn::Add(low, hn::PromoteTo(dd, hn::LowerHalf(dh, sum)));
    high = hn::Add(high, hn::PromoteTo(dd, hn::UpperHalf(dh, sum)));
  }
  return hn::GetLane(hn::SumOfLanes(dd, hn::Add(low, high)));
}

// Returns the largest of n elements side by side, or NaN if one of them is. Computing the sum as
// well shows cheaply that there is no NaN. Only if the sum is NaN, because of a NaN or of
// infinities of both signs, the elements are looked at again.
template <class T>
HWY_INLINE float BlockMaxNaN(const T* p, int64_t n) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  const auto lowest = hn::Set(d, -kInfinity);
  auto max0 = lowest, max1 = lowest, sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  constexpr std::integral_constant<int64_t, 0> kFull;
  const auto take_part = [&](const T* from, int64_t count) HWY_ATTR {
    const auto a = LoadNF32(d, from, count, -kInfinity);
    max1 = hn::Max(max1, a);
    sum1 = hn::Add(sum1, hn::IfThenElseZero(hn::FirstN(d, count), a));
  };
  // Loads that cross from one cache line into the next take up to half as long again. So a long row
  // begins with a part of a vector that ends where a whole vector may begin.
  const auto past = reinterpret_cast<uintptr_t>(p) / sizeof(T) % lanes;
  int64_t i = past == 0 || n < 16 * lanes ? 0 : lanes - static_cast<int64_t>(past);
  if (i > 0) take_part(p, i);
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    const auto a = LoadHalves(p + i, kFull), b = LoadHalves(p + i + lanes, kFull);
    const auto c = LoadHalves(p + i + 2 * lanes, kFull), e = LoadHalves(p + i + 3 * lanes, kFull);
    max0 = hn::Max(max0, hn::Max(a, b));
    max1 = hn::Max(max1, hn::Max(c, e));
    sum0 = hn::Add(sum0, hn::Add(a, b));
    sum1 = hn::Add(sum1, hn::Add(c, e));
  }
  for (; i + lanes <= n; i += lanes) {
    const auto a = LoadF32(d, p + i);
    max0 = hn::Max(max0, a);
    sum0 = hn::Add(sum0, a);
  }
  if (i < n) take_part(p + i, n - i);
  if (HWY_LIKELY(hn::AllFalse(d, hn::IsNaN(hn::Add(sum0, sum1))))) {
    return ReduceMax(d, hn::Max(max0, max1));
  }
  const auto nan_or_larger = [](auto x, auto y) HWY_ATTR { return MaxNaN(x, y); };
  const auto load = [p](int64_t j, auto k) HWY_ATTR { return Load(p + j, k, -kInfinity); };
  const auto max = Fold(lowest, n, nan_or_larger, load);
  return hn::AllFalse(d, hn::IsNaN(max)) ? ReduceMax(d, max) : kNaN;
}

// Returns the sum of exp(x - shift) over n elements and passes each vector of exponentials to
// keep(i, k, exp). While these keep the arithmetic units busy, it also finds the largest of the n
// elements at `next`, whose exponentials will be wanted next, and prefetches the n elements at
// `after`, an address that need not be valid.
template <class T, class Keep>
HWY_INLINE float SumExp(const T* x, int64_t n, float shift, const T* next, const T* after,
                        float* next_max, const Keep& keep) {
  const F32 d;
  const auto s = hn::Set(d, shift);
  auto max = hn::Set(d, -kInfinity);
  const float sum = FoldSum(n, [&](int64_t i, auto k) HWY_ATTR {
    max = hn::Max(max, Load(next + i, k, -kInfinity));
    hwy::Prefetch(after + i);
    const auto e = Exp(F32(), hn::Sub(Load(x + i, k, -kInfinity), s));
    keep(i, k, e);
    return e;
  });
  *next_max = ReduceMax(d, max);
  return sum;
}

// This is a `keep` for SumExp where only the sum is wanted.
constexpr auto kKeepNothing = [](int64_t, auto, auto) {};

// Holds the state of an online logsumexp: logsumexp(x) = shift + log(sum).
struct LogSumExp {
  float max = -kInfinity;
  float shift = 0;  // the maximum, or 0 where that is not finite
  double sum = 0;   // of exp(x - shift)

  // Raises the maximum to block_max, if that is larger, and rescales the sum.
  HWY_INLINE void Raise(float block_max) {
    if (!(block_max > max)) return;
    if (max != -kInfinity) sum *= std::exp(static_cast<double>(max) - block_max);
    max = block_max;
    shift = max == kInfinity ? 0 : max;
  }

  float log_sum() const { return log_of(sum); }
};

// Returns the logsumexp of a row of n elements `stride` apart, block by block. keep_of(i, shift)
// returns the `keep` of SumExp for the block that begins at element i; a later block may have a
// larger shift.
template <class T, class KeepOf>
HWY_INLINE LogSumExp RowLogSumExp(const T* x, int64_t stride, int64_t n, const KeepOf& keep_of) {
  T buffer[kBlock];
  LogSumExp row;
  float block_max = 0;
  bool known = false;
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = std::min(kBlock, n - i);
    const T* p = Gather(x + i * stride, stride, count, buffer);
    row.Raise(known ? block_max : BlockMax(p, count));
    known = stride == 1 && n - i >= 2 * kBlock;
    // Beyond the end of this row, what is prefetched is usually the next row.
    row.sum += SumExp(p, count, row.shift, known ? p + kBlock : p, p + 2 * kBlock, &block_max,
                      keep_of(i, row.shift));
  }
  return row;
}

template <class T>
HWY_INLINE LogSumExp RowLogSumExp(const T* x, int64_t stride, int64_t n) {
  return RowLogSumExp(x, stride, n, [](int64_t, float) { return kKeepNothing; });
}

// Returns log(x) to 1 ulp, for normal numbers above 0 only.
HWY_INLINE hn::Vec<F32> Log(hn::Vec<F32> x) {
  const F32 d;
  const hn::RebindToSigned<F32> di;
  // x = 2^n (1 + t) with 1 + t from sqrt(1/2) to sqrt(2), whose bits begin with 0x3f3504f3.
  const auto root = hn::Set(di, 0x3f3504f3), one = hn::Set(di, 0x3f800000);
  const auto bits = hn::Add(hn::BitCast(di, x), hn::Sub(one, root));
  const auto n = hn::ConvertTo(d, hn::Sub(hn::ShiftRight<23>(bits), hn::Set(di, 127)));
  const auto fraction = hn::And(bits, hn::Set(di, 0x7fffff));
  const auto t = hn::Sub(hn::BitCast(d, hn::Add(fraction, root)), hn::Set(d, 1.0f));
  // log(1 + t) = t - t^2 / 2 + t^3 p(t). ln 2 is added in two parts, so that n times the first is
  // exact.
  auto p = hn::Set(d, -0.0790274377f);
  p = hn::MulAdd(p, t, hn::Set(d, 0.126223198f));
  p = hn::MulAdd(p, t, hn::Set(d, -0.129981838f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.142144959f));
  p = hn::MulAdd(p, t, hn::Set(d, -0.166412815f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.200010451f));
  p = hn::MulAdd(p, t, hn::Set(d, -0.250003064f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.333333307f));
  const auto square = hn::Mul(t, t);
  auto y = hn::MulAdd(p, hn::Mul(square, t), hn::Mul(n, hn::Set(d, -2.12194440e-4f)));
  y = hn::Add(hn::NegMulAdd(square, hn::Set(d, 0.5f), y), t);
  return hn::MulAdd(n, hn::Set(d, 0.693359375f), y);
}

// Returns whether rows of n elements are short enough to be one block.
inline bool IsShort(int64_t n) { return n <= kBlock; }

// Holds what ForShortRows knows of a row when it is finished.
struct ShortRow {
  float max;
  float shift;  // the maximum, or 0 where that is not finite
  float sum;    // of exp(x - shift)
};

// For each row r in [begin, end), which is n elements at row(r), passes its exponentials to keep(r,
// i, k, exp) and then calls finish(r, ShortRow). The passes over a row wait for one another (the
// sum for the maximum, the output for the sum), so the maximum of the next row is found, and the
// row before is finished, in between. There is at least one row.
template <class RowOf, class Keep, class Finish>
HWY_INLINE void ForShortRows(int64_t begin, int64_t end, int64_t n, const RowOf& row,
                             const Keep& keep, const Finish& finish) {
  ShortRow last{};
  float max = BlockMax(row(begin), n);
  for (int64_t r = begin; r < end; ++r) {
    ShortRow now{max, std::isinf(max) ? 0 : max, 0};
    const auto *x = row(r), *next = r + 1 < end ? row(r + 1) : x;
    now.sum = SumExp(x, n, now.shift, next, next + (next - x), &max,
                     [&](int64_t i, auto k, auto e) HWY_ATTR { keep(r, i, k, e); });
    if (r > begin) finish(r - 1, last);
    last = now;
  }
  finish(end - 1, last);
}

// Holds the shifts and sums of up to kRows rows, so that the logarithms of all sums are taken at
// once.
struct RowGroup {
  static constexpr int64_t kRows = 16;

  float shift[kRows];            // the maximum, or 0 where that is not finite
  alignas(64) float sum[kRows];  // of exp(x - shift)

  // Replaces the sums of the first `rows` rows by their logarithms.
  HWY_INLINE void TakeLogarithms(int64_t rows) {
    const F32 d;
    alignas(64) float logs[kRows];
    std::fill(sum + rows, sum + kRows, 1.0f);
    for (int64_t r = 0; r < rows; r += hn::Lanes(d)) {
      hn::Store(Log(hn::Load(d, sum + r)), d, logs + r);
    }
    // The sum of a row with a finite maximum is at least 1. The others need the exact logarithm of
    // 0, infinity or NaN.
    for (int64_t r = 0; r < rows; ++r) {
      sum[r] = sum[r] >= 1 && sum[r] < kInfinity ? logs[r] : std::log(sum[r]);
    }
  }
};

// These two say what the second pass of softmax (ExpTimes) and of log_softmax (SubtractBoth)
// computes from an entry and two numbers of its row. kAtOnce is for WriteVectors.
struct ExpTimes {
  static constexpr int kAtOnce = 1;
  template <class V>
  HWY_INLINE V operator()(V x, V shift, V factor) const {
    return hn::Mul(Exp(F32(), hn::Sub(x, shift)), factor);
  }
};
struct SubtractBoth {
  static constexpr int kAtOnce = kManyAtOnce;
  template <class V>
  HWY_INLINE V operator()(V x, V shift, V log_sum) const {
    return hn::Sub(hn::Sub(x, shift), log_sum);
  }
};

// Writes y = f(x, p, q) along a row of n elements; with `stream`, past the caches if y's stride is
// 1.
template <class F, class T>
HWY_INLINE void MapRow(const F& f, float p, float q, const T* x, int64_t x_stride, T* y,
                       int64_t y_stride, int64_t n, bool stream) {
  const F32 d;
  T x_buffer[kBlock], y_buffer[kBlock];
  const auto vp = hn::Set(d, p), vq = hn::Set(d, q);
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = std::min(kBlock, n - i);
    const T* in = Gather(x + i * x_stride, x_stride, count, x_buffer);
    T* out = y_stride == 1 ? y + i : y_buffer;
    WriteVectors<F::kAtOnce>(out, count, stream && y_stride == 1, [&](int64_t c, auto k) HWY_ATTR {
      return f(Load(in + c, k), vp, vq);
    });
    if (y_stride != 1) Scatter(out, count, y + i * y_stride, y_stride);
  }
}

// Writes y = f(x, p[c], q[c]) in a tile of `width` columns c, for n steps along the axis.
template <class F, class T>
HWY_INLINE void MapColumns(const F& f, const float* p, const float* q, const T* x, int64_t x_stride,
                           T* y, int64_t y_stride, int64_t n, int64_t width) {
  for (int64_t j = 0; j < n; ++j) {
    ForEachVector(width, [&](int64_t c, auto k) HWY_ATTR {
      const auto v = f(Load(x + j * x_stride + c, k), Load(p + c, k), Load(q + c, k));
      Store(v, y + j * y_stride + c, k);
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_CPU_SIMD_AXIS_PER_TARGET
