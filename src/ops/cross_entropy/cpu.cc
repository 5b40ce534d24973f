// This file computes cross_entropy on the CPU, forward and backward.
//
// Floor: forward reads the logits once (the losses are as nothing beside them), backward reads them
// once and writes them once. The forward takes a row block by block: a block's maximum, then its
// exponentials while it is in the first-level cache, with the sum rescaled when the maximum grows.
// With label smoothing it reads the row again, for its mean. The backward needs one pass, since the
// forward hands it each row's logsumexp. Rows are independent; the losses are added up in row
// order, so that the number of threads does not show in the result.

#ifndef FK_OPS_CROSS_ENTROPY_CPU_JOBS_
#define FK_OPS_CROSS_ENTROPY_CPU_JOBS_

#include "core/access.h"
#include "core/exec.h"
#include "cpu/axis_plan.h"
#include "ops/cross_entropy/cross_entropy.h"

namespace fk::cpu {

struct CrossEntropyForward {
  const CrossEntropyFwd& a;
  float* losses;  // of all rows
};

}  // namespace fk::cpu

#endif  // FK_OPS_CROSS_ENTROPY_CPU_JOBS_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cross_entropy/cpu.cc"
#include "cpu/foreach_target.h"
#include "cpu/simd_axis.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

// Finishes row r once its statistics are known. `sum` is that of x - reference over the row, whose
// mean is taken: what all logits have in common would hide what sets them apart, were they added up
// as they are.
template <class T>
double MeanFrom(float reference, const T* x, int64_t stride, int64_t n) {
  T buffer[kBlock];
  const auto from = hn::Set(F32(), reference);
  double sum = 0;
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = std::min(kBlock, n - i);
    const T* p = Gather(x + i * stride, stride, count, buffer);
    sum += FoldSum(count, [&](int64_t c, auto k)
                              HWY_ATTR { return hn::Sub(Load(p + c, k, reference), from); });
  }
  return sum / n;
}

template <class T>
HWY_INLINE void FinishRow(const CrossEntropyForward& job, int64_t r, bool finite, double shift,
                          double log_sum) {
  const CrossEntropyFwd& a = job.a;
  const T* x = a.logits.ptr<const T>() + r * a.logits.stride(0);
  const int64_t target = load_index(a.targets, r * a.targets.stride(0));
  // A row that holds NaN or +inf, or nothing but -inf, is no distribution.
  if (!finite || std::isnan(log_sum)) {
    shift = 0;
    log_sum = kNaN;
  }
  double loss = 0;
  if (target != a.ignore_index) {
    const double s = a.label_smoothing;
    const float at_target = ToF32(x + target * a.logits.stride(1));
    const float reference = std::isfinite(at_target) ? at_target : 0.0f;
    // The large terms come first: near the maximum they cancel.
    loss = (shift - reference) + log_sum - (1 - s) * (at_target - reference);
    if (s > 0) loss -= s * MeanFrom(reference, x, a.logits.stride(1), a.logits.size(1));
  }
  job.losses[r] = static_cast<float>(loss);
  if (a.losses) a.losses.ptr<float>()[r * a.losses.stride(0)] = static_cast<float>(loss);
  if (a.shift) a.shift.ptr<float>()[r * a.shift.stride(0)] = static_cast<float>(shift);
  if (a.log_sum) a.log_sum.ptr<float>()[r * a.log_sum.stride(0)] = static_cast<float>(log_sum);
}

template <class T>
void ForwardShortRows(const CrossEntropyForward& job, int64_t begin, int64_t end) {
  const Tensor& logits = job.a.logits;
  const int64_t columns = logits.size(1);
  const auto x = [&](int64_t r) { return logits.ptr<const T>() + r * logits.stride(0); };
  ForShortRows(
      begin, end, columns, x, [](int64_t, int64_t, auto, auto) {},
      [&](int64_t r, const ShortRow& row)
          HWY_ATTR { FinishRow<T>(job, r, std::isfinite(row.max), row.shift, std::log(row.sum)); });
}

template <class T>
void ForwardRows(const CrossEntropyForward& job, int64_t begin, int64_t end) {
  const Tensor& logits = job.a.logits;
  const int64_t columns = logits.size(1), stride = logits.stride(1);
  for (int64_t r = begin; r < end; ++r) {
    const T* x = logits.ptr<const T>() + r * logits.stride(0);
    const LogSumExp row = RowLogSumExp(x, stride, columns);
    FinishRow<T>(job, r, std::isfinite(row.max), row.shift, row.log_sum());
  }
}

template <class T>
void BackwardRows(const CrossEntropyBwd& a, int64_t begin, int64_t end) {
  const F32 d;
  T x_buffer[kBlock], dx_buffer[kBlock];
  const int64_t columns = a.logits.size(1);
  const int64_t x_stride = a.logits.stride(1), dx_stride = a.dlogits.stride(1);
  const bool in_place = a.dlogits.data == a.logits.data;
  const bool stream =
      !in_place && pays_to_stream_beside_arithmetic(2 * a.logits.numel() * size_of(a.logits.dtype));
  const float s = static_cast<float>(a.label_smoothing);
  const float everywhere = s / columns;  // what is wanted of each column
  float g = 0;
  if (a.reduction != kNone) g = *a.dloss.ptr<const float>();
  if (a.reduction == kMean) g /= *a.count.ptr<const float>();
  for (int64_t r = begin; r < end; ++r) {
    const T* x = a.logits.ptr<const T>() + r * a.logits.stride(0);
    T* dx = a.dlogits.ptr<T>() + r * a.dlogits.stride(0);
    const int64_t target = load_index(a.targets, r * a.targets.stride(0));
    if (target == a.ignore_index) {
      const T zero{};
      for (int64_t i = 0; i < columns; ++i) dx[i * dx_stride] = zero;
      continue;
    }
    const float shift = a.shift.ptr<const float>()[r * a.shift.stride(0)];
    const float log_sum = a.log_sum.ptr<const float>()[r * a.log_sum.stride(0)];
    if (a.reduction == kNone) g = a.dlosses.ptr<const float>()[r * a.dlosses.stride(0)];
    const auto vshift = hn::Set(d, shift), vlog_sum = hn::Set(d, log_sum);
    const auto vg = hn::Set(d, g), offset = hn::Set(d, g * everywhere);
    // Read before dx, which may be the same memory, is written.
    const float at_target = ToF32(x + target * x_stride);
    for (int64_t i = 0; i < columns; i += kBlock) {
      const int64_t count = std::min(kBlock, columns - i);
      const T* in = Gather(x + i * x_stride, x_stride, count, x_buffer);
      T* out = dx_stride == 1 ? dx + i : dx_buffer;
      WriteVectors(out, count, stream && dx_stride == 1, [&](int64_t c, auto k) HWY_ATTR {
        const auto p = Exp(F32(), hn::Sub(hn::Sub(Load(in + c, k), vshift), vlog_sum));
        return hn::MulSub(p, vg, offset);
      });
      if (dx_stride != 1) Scatter(out, count, dx + i * dx_stride, dx_stride);
    }
    const float p = hn::GetLane(Exp(d, hn::Set(d, (at_target - shift) - log_sum)));
    FromF32(g * (p - (1 - s) - everywhere), dx + target * dx_stride);
  }
  if (stream) hwy::FlushStream();
}

}  // namespace

void cross_entropy_forward(const CrossEntropyForward& job, int64_t begin, int64_t end) {
  const Tensor& logits = job.a.logits;
  const bool short_rows = logits.stride(1) == 1 && IsShort(logits.size(1));
  ByDType(logits.dtype, [&](auto t) {
    using T = decltype(t);
    short_rows ? ForwardShortRows<T>(job, begin, end) : ForwardRows<T>(job, begin, end);
  });
}

void cross_entropy_backward(const CrossEntropyBwd& a, int64_t begin, int64_t end) {
  ByDType(a.logits.dtype, [&](auto t) { BackwardRows<decltype(t)>(a, begin, end); });
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace fk::cpu {

FK_CPU_EXPORT(cross_entropy_forward);
FK_CPU_EXPORT(cross_entropy_backward);

namespace {

// So many losses are kept on the stack, so that small calls need no workspace.
constexpr int64_t kFewRows = 1024;

}  // namespace

size_t workspace(const CrossEntropyFwd& a) {
  return a.logits.size(0) > kFewRows ? a.logits.size(0) * sizeof(float) : 0;
}

Status run(const CrossEntropyFwd& a, const Exec& exec) {
  float few[kFewRows];
  const int64_t rows = a.logits.size(0), columns = a.logits.size(1);
  const CrossEntropyForward job{a, rows > kFewRows ? exec.workspace<float>() : few};
  const auto kernel = FK_CPU_DISPATCH(cross_entropy_forward);
  exec.parallel_for(rows, grain_of(rows, columns),
                    [&](int64_t b, int64_t e) { kernel(job, b, e); });
  double total = 0;
  int64_t count = 0;
  for (int64_t r = 0; r < rows; ++r) {
    total += job.losses[r];
    count += load_index(a.targets, r * a.targets.stride(0)) != a.ignore_index;
  }
  if (a.count) *a.count.ptr<float>() = static_cast<float>(count);
  if (a.loss) {
    const double mean = total / static_cast<double>(count);
    *a.loss.ptr<float>() = static_cast<float>(a.reduction == kMean ? mean : total);
  }
  return {};
}

Status run(const CrossEntropyBwd& a, const Exec& exec) {
  if (!a.dlogits) return {};
  const int64_t rows = a.logits.size(0), columns = a.logits.size(1);
  const auto kernel = FK_CPU_DISPATCH(cross_entropy_backward);
  exec.parallel_for(rows, grain_of(rows, columns), [&](int64_t b, int64_t e) { kernel(a, b, e); });
  return {};
}

}  // namespace fk::cpu

#endif  // HWY_ONCE
