// This file computes softmax, log_softmax and logsumexp on the CPU.
//
// Floor: x read once, the output written once; the exponentials (about 12 vector instructions) cost
// as much as reading the third-level cache. The statistics of a row, its maximum and the sum of
// exp(x - maximum), are gathered block by block while a block is in the first-level cache; a second
// pass over the row writes the output. Softmax keeps the exponentials in between: a short row's on
// the stack, a long fp32 row's in the output itself. A long half precision row has no place for
// them and computes them twice. Rows and columns: see cpu/axis_plan.h.

#ifndef FK_OPS_SOFTMAX_CPU_JOBS_
#define FK_OPS_SOFTMAX_CPU_JOBS_

#include "core/exec.h"
#include "cpu/axis_plan.h"
#include "ops/softmax/softmax.h"

namespace fk::cpu {

enum class Form { kSoftmax, kLogSoftmax, kLogSumExp };

struct SoftmaxForward {
  Form form;
  const Tensor& x;
  const Tensor& out;  // y or lse
  Rows x_rows, out_rows;
  Tiles tiles;
  bool stream;  // the output goes past the caches
};

}  // namespace fk::cpu

#endif  // FK_OPS_SOFTMAX_CPU_JOBS_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/softmax/cpu/forward.cc"
#include "cpu/foreach_target.h"
#include "cpu/simd_axis.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

// fp32 rows up to this length keep their exponentials in the output.
constexpr int64_t kLongRow = 256 * kBlock;

// Computes the statistics of a row of kVectors vectors, in all lanes, and its exponentials.
template <int kVectors>
struct HeldRow {
  hn::Vec<F32> exps[kVectors], shift, sum;  // sum: NaN where the row is no distribution

  template <class T>
  HWY_INLINE explicit HeldRow(const T* x) {
    const F32 d;
    const int64_t lanes = hn::Lanes(d);
    for (int i = 0; i < kVectors; ++i) exps[i] = LoadF32(d, x + i * lanes);
    auto max = exps[0];
    for (int i = 1; i < kVectors; ++i) max = hn::Max(max, exps[i]);
    max = hn::MaxOfLanes(d, max);
    const auto infinite = hn::Eq(hn::Abs(max), hn::Set(d, kInfinity));
    shift = hn::IfThenZeroElse(infinite, max);
    for (int i = 0; i < kVectors; ++i) exps[i] = Exp(d, hn::Sub(exps[i], shift));
    sum = exps[0];
    for (int i = 1; i < kVectors; ++i) sum = hn::Add(sum, exps[i]);
    sum = hn::IfThenElse(infinite, hn::Set(d, kNaN), hn::SumOfLanes(d, sum));
  }
};

// Takes unit-stride rows of kColumns, which stay in registers, as far as there are so many, from
// the load to the output, or with log_softmax to the sum.
template <int kColumns, class T>
void ForwardHeldRows(const SoftmaxForward& job, int64_t begin, int64_t end) {
  const F32 d;
  constexpr int kVectors = kColumns / static_cast<int>(hn::MaxLanes(F32()));
  const int64_t lanes = hn::Lanes(d);
  const auto x = [&](int64_t r) { return job.x.ptr<const T>() + job.x_rows.offset(r); };
  const auto y = [&](int64_t r) { return job.out.ptr<T>() + job.out_rows.offset(r); };
  if (job.form == Form::kSoftmax) {
    for (int64_t r = begin; r < end; ++r) {
      const HeldRow<kVectors> row(x(r));
      T* out = y(r);
      const auto factor = hn::Div(hn::Set(d, 1.0f), row.sum);
      for (int i = 0; i < kVectors; ++i) StoreF32(d, hn::Mul(row.exps[i], factor), out + i * lanes);
    }
    return;
  }
  RowGroup group;
  for (int64_t first = begin; first < end; first += RowGroup::kRows) {
    const int64_t rows = std::min(RowGroup::kRows, end - first);
    for (int64_t r = 0; r < rows; ++r) {
      const HeldRow<kVectors> row(x(first + r));
      group.shift[r] = hn::GetLane(row.shift);
      group.sum[r] = hn::GetLane(row.sum);
    }
    group.TakeLogarithms(rows);
    for (int64_t r = 0; r < rows; ++r) {
      const T* in = x(first + r);
      T* out = y(first + r);
      const auto shift = hn::Set(d, group.shift[r]), log_sum = hn::Set(d, group.sum[r]);
      for (int i = 0; i < kVectors; ++i) {
        StoreF32(d, SubtractBoth()(LoadF32(d, in + i * lanes), shift, log_sum), out + i * lanes);
      }
    }
  }
}

template <class T>
void ForwardShortRows(const SoftmaxForward& job, int64_t begin, int64_t end) {
  const F32 d;
  const int64_t n = job.x.size(-1);
  if (job.form != Form::kLogSumExp && !job.stream) {
    if (n == 64) return ForwardHeldRows<64, T>(job, begin, end);
    if (n == 32) return ForwardHeldRows<32, T>(job, begin, end);
    if (n == 16) return ForwardHeldRows<16, T>(job, begin, end);
  }
  const auto x = [&](int64_t r) { return job.x.ptr<const T>() + job.x_rows.offset(r); };
  const auto y = [&](int64_t r) { return job.out.ptr<T>() + job.out_rows.offset(r); };
  if (job.form == Form::kSoftmax) {
    alignas(64) float exps[2][kBlock];  // of the row at hand and of the last one
    ForShortRows(
        begin, end, n, x,
        [&](int64_t r, int64_t i, auto k, auto e) HWY_ATTR { Store(e, exps[r % 2] + i, k); },
        [&](int64_t r, const ShortRow& row) HWY_ATTR {
          const auto factor = hn::Set(d, std::isinf(row.max) ? kNaN : 1 / row.sum);
          WriteVectors<kManyAtOnce>(y(r), n, job.stream, [&](int64_t i, auto k) HWY_ATTR {
            return hn::Mul(Load(exps[r % 2] + i, k), factor);
          });
        });
    return;
  }
  ForShortRows(
      begin, end, n, x, [](int64_t, int64_t, auto, auto) {},
      [&](int64_t r, const ShortRow& row) HWY_ATTR {
        const float log_sum = std::log(row.sum);
        if (job.form == Form::kLogSumExp) {
          job.out.ptr<float>()[job.out_rows.offset(r)] = row.shift + log_sum;
        } else {
          MapRow(SubtractBoth(), row.shift, std::isinf(row.max) ? kNaN : log_sum, x(r), 1, y(r), 1,
                 n, job.stream);
        }
      });
}

// A long row's exponentials, relative to the largest entry so far, go to y; a second pass brings
// them to the final maximum and divides by the sum.
HWY_INLINE void LongRowSoftmax(const float* x, float* y, int64_t n) {
  const F32 d;
  float shifts[kLongRow / kBlock];
  const LogSumExp row = RowLogSumExp(x, 1, n, [&](int64_t i, float shift) {
    shifts[i / kBlock] = shift;
    float* out = y + i;
    return [out](int64_t c, auto k, auto e) HWY_ATTR { Store(e, out + c, k); };
  });
  for (int64_t i = (n - 1) / kBlock * kBlock; i >= 0; i -= kBlock) {
    const double change = std::exp(static_cast<double>(shifts[i / kBlock]) - row.shift);
    const auto factor =
        hn::Set(d, std::isinf(row.max) ? kNaN : static_cast<float>(change / row.sum));
    WriteVectors<kManyAtOnce>(y + i, std::min(kBlock, n - i), false,
                              [&](int64_t c, auto k)
                                  HWY_ATTR { return hn::Mul(Load(y + i + c, k), factor); });
  }
}

template <class T>
void ForwardRows(const SoftmaxForward& job, int64_t begin, int64_t end) {
  const int64_t n = job.x.size(-1), x_stride = job.x.stride(-1);
  for (int64_t r = begin; r < end; ++r) {
    const T* x = job.x.ptr<const T>() + job.x_rows.offset(r);
    const int64_t out = job.out_rows.offset(r);
    if (job.form == Form::kLogSumExp) {
      const LogSumExp row = RowLogSumExp(x, x_stride, n);
      job.out.ptr<float>()[out] = row.shift + row.log_sum();
      continue;
    }
    T* y = job.out.ptr<T>() + out;
    const int64_t y_stride = job.out.stride(-1);
    if constexpr (std::is_same_v<T, float>) {
      if (job.form == Form::kSoftmax && n <= kLongRow && x_stride == 1 && y_stride == 1) {
        LongRowSoftmax(x, y, n);
        continue;
      }
    }
    const LogSumExp row = RowLogSumExp(x, x_stride, n);
    const bool finite = std::isfinite(row.max);  // otherwise the row is no distribution
    if (job.form == Form::kSoftmax) {
      const float factor = finite ? static_cast<float>(1 / row.sum) : kNaN;
      MapRow(ExpTimes(), row.shift, factor, x, x_stride, y, y_stride, n, job.stream);
    } else {
      const float log_sum = finite ? row.log_sum() : kNaN;
      MapRow(SubtractBoth(), row.shift, log_sum, x, x_stride, y, y_stride, n, job.stream);
    }
  }
}

template <class T>
void ForwardColumns(const SoftmaxForward& job, int64_t begin, int64_t end) {
  alignas(64) float max[kTile], shift[kTile], last[kTile];
  alignas(64) double sum[kTile];
  const int64_t n = job.x.size(-1), x_stride = job.x.stride(-1);
  const auto larger = [](auto a, auto b) HWY_ATTR { return hn::Max(a, b); };
  for (int64_t i = begin; i < end; ++i) {
    const auto [row, width] = job.tiles[i];
    const T* x = job.x.ptr<const T>() + job.x_rows.offset(row);
    std::fill_n(max, width, -kInfinity);
    FoldColumns(max, width, 0, n, larger, [&](int64_t j, int64_t c, auto k) HWY_ATTR {
      return Load(x + j * x_stride + c, k);
    });
    for (int64_t c = 0; c < width; ++c) shift[c] = std::isinf(max[c]) ? 0 : max[c];
    SumColumns(sum, width, 0, n, [&](int64_t j, int64_t c, auto k) HWY_ATTR {
      return Exp(F32(), hn::Sub(Load(x + j * x_stride + c, k), Load(shift + c, k)));
    });
    const int64_t out = job.out_rows.offset(row);
    if (job.form == Form::kLogSumExp) {
      for (int64_t c = 0; c < width; ++c) {
        job.out.ptr<float>()[out + c * job.out_rows.last_stride] = shift[c] + log_of(sum[c]);
      }
      continue;
    }
    T* y = job.out.ptr<T>() + out;
    const int64_t y_stride = job.out.stride(-1);
    if (job.form == Form::kSoftmax) {
      for (int64_t c = 0; c < width; ++c) {
        last[c] = std::isinf(max[c]) ? kNaN : static_cast<float>(1 / sum[c]);
      }
      MapColumns(ExpTimes(), shift, last, x, x_stride, y, y_stride, n, width);
    } else {
      for (int64_t c = 0; c < width; ++c) {
        last[c] = std::isinf(max[c]) ? kNaN : log_of(sum[c]);
      }
      MapColumns(SubtractBoth(), shift, last, x, x_stride, y, y_stride, n, width);
    }
  }
}

}  // namespace

void softmax_forward(const SoftmaxForward& job, int64_t begin, int64_t end) {
  ByDType(job.x.dtype, [&](auto t) {
    using T = decltype(t);
    const bool unit =
        job.x.stride(-1) == 1 && (job.form == Form::kLogSumExp || job.out.stride(-1) == 1);
    if (job.tiles.count > 0) {
      ForwardColumns<T>(job, begin, end);
    } else if (unit && IsShort(job.x.size(-1))) {
      ForwardShortRows<T>(job, begin, end);
    } else {
      ForwardRows<T>(job, begin, end);
    }
  });
  if (job.stream) hwy::FlushStream();
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace fk::cpu {

FK_CPU_EXPORT(softmax_forward);

namespace {

Status forward(Form form, const Tensor& x, const Tensor& out, const Exec& exec) {
  if (!out) return {};
  const bool reduces = form == Form::kLogSumExp;
  SoftmaxForward job{form,
                     x,
                     out,
                     rows_of(x),
                     rows_of(out, reduces ? 0 : 1),
                     {},
                     pays_to_stream(2 * x.numel() * size_of(x.dtype))};
  if (in_columns(x, job.x_rows) && (reduces || in_columns(out, job.out_rows))) {
    const int64_t inner = evenly_spaced_rows({&job.x_rows, &job.out_rows});
    job.tiles = cached_tiles_of(job.x_rows.count, inner, x.size(-1));
  }
  parallel(job, FK_CPU_DISPATCH(softmax_forward), job.x_rows.count, x.size(-1), exec);
  return {};
}

}  // namespace

Status run(const SoftmaxFwd& a, const Exec& exec) {
  return forward(Form::kSoftmax, a.x, a.y, exec);
}

Status run(const LogSoftmaxFwd& a, const Exec& exec) {
  return forward(Form::kLogSoftmax, a.x, a.y, exec);
}

Status run(const LogSumExpFwd& a, const Exec& exec) {
  return forward(Form::kLogSumExp, a.x, a.lse, exec);
}

}  // namespace fk::cpu

#endif  // HWY_ONCE
