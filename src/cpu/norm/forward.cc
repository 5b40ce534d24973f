// The forward of a norm, by rows: what rms_norm and layer_norm are on the CPU, and what ops that
// write the norm of their output do to its rows while they are in a cache.
//
// A row is passed over twice or, for layer_norm, three times (sum, squared deviations, output), all
// but the first pass from cache.

#include "cpu/norm/forward.h"

#ifndef FK_CPU_NORM_FORWARD_ONCE_
#define FK_CPU_NORM_FORWARD_ONCE_

#include <cmath>

#endif  // FK_CPU_NORM_FORWARD_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/norm/forward.cc"
#include "cpu/foreach_target.h"
#include "cpu/norm/rows_simd.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

template <class T, bool kLayer>
void forward_rows(const NormForward& job, int64_t begin, int64_t end) {
  const F32 d;
  const int64_t columns = job.columns, block = job.block, summed_block = summed_block_of(block);
  const float per_column = 1.0f / static_cast<float>(columns);
  ParameterInput<T, false> weight(job.weight), bias(job.bias);
  const auto weight_offset = hn::Set(d, job.weight_offset);
  Input<T, false> x, residual;
  Output<T, false> y, sum, none;

  for (int64_t r = begin; r < end; ++r) {
    x.bind(job.x.row<const T>(r), job.x.column_stride);
    residual.bind(job.residual.row<const T>(r), job.residual.column_stride);
    y.bind(job.y.row<T>(r), job.y.column_stride);
    sum.bind(job.sum.row<T>(r), job.sum.column_stride);
    // `sum` keeps x + residual. If that is not wanted, y keeps it until it is overwritten. If y is
    // not wanted either, or what is stored leaves the caches, it is computed again.
    Output<T, false>& kept = job.stream ? none : sum.p != nullptr ? sum : y;

    Means means(columns, summed_block);
    for (int64_t j = 0; j < columns; j += summed_block) {
      const int64_t n = std::min(summed_block, columns - j);
      const T* xs = x.block(j, n);
      if (residual.p == nullptr) {
        means.add(accumulate(n, [=](int64_t i, auto lanes, Sums& acc) FK_BODY {
          const V v = load(xs + i, lanes);
          acc.a = kLayer ? hn::Add(acc.a, v) : hn::MulAdd(v, v, acc.a);
        }));
        continue;
      }
      const T* residuals = residual.block(j, n);
      T* out = kept.block(j);
      means.add(accumulate(n, [=](int64_t i, auto lanes, Sums& acc) FK_BODY {
        const V s = hn::Add(load(xs + i, lanes), load(residuals + i, lanes));
        const V v = round_and_store(s, out == nullptr ? nullptr : out + i, lanes);
        acc.a = kLayer ? hn::Add(acc.a, v) : hn::MulAdd(v, v, acc.a);
      }));
      kept.finish(j, n);
    }
    if (residual.p != nullptr && kept.p != nullptr) {
      x.bind(kept.p, kept.stride);
      residual.p = nullptr;
    }

    // The mean is found twice: as a float, then what rounding made it miss, from the deviations.
    float mean = 0.0f, missed = 0.0f;
    float variance = means.a(per_column);
    if constexpr (kLayer) {
      mean = variance;
      const auto center = hn::Set(d, mean);
      Means squares(columns, summed_block);
      for (int64_t j = 0; j < columns; j += summed_block) {
        const int64_t n = std::min(summed_block, columns - j);
        const T* xs = x.block(j, n);
        const T* residuals = residual.block(j, n);
        squares.add(accumulate(n, [=](int64_t i, auto lanes, Sums& acc) FK_BODY {
          V v = load(xs + i, lanes);
          if (residuals != nullptr) v = RoundF32<T>(d, hn::Add(v, load(residuals + i, lanes)));
          const V deviation = keep(hn::Sub(v, center), lanes);
          acc.a = hn::MulAdd(deviation, deviation, acc.a);
          acc.b = hn::Add(acc.b, deviation);
        }));
      }
      missed = squares.b(per_column);
      // In this order a NaN stays one.
      variance = std::max(squares.a(per_column) - missed * missed, 0.0f);
    }
    const float rstd = 1.0f / std::sqrt(variance + job.eps);
    // A row with an infinity has an infinite mean, from which nothing deviates by a number.
    if (job.mean.data != nullptr)
      *job.mean.row<float>(r) = std::isnan(missed) ? mean : mean + missed;
    if (job.rstd.data != nullptr) *job.rstd.row<float>(r) = rstd;
    if (y.p == nullptr) continue;

    const auto center = hn::Set(d, mean);
    const auto scale = hn::Set(d, rstd);
    const auto shift = hn::Set(d, missed * rstd);
    for (int64_t j = 0; j < columns; j += block) {
      const int64_t n = std::min(block, columns - j);
      const T* xs = x.block(j, n);
      T* out = y.block(j);
      const auto weights = weight.block(j, n);
      const auto biases = bias.block(j, n);
      const auto finish = [=](V v, int64_t i, auto lanes) FK_BODY {
        v = kLayer ? hn::MulSub(hn::Sub(v, center), scale, shift) : hn::Mul(v, scale);
        if (weights) {
          V w = weights.load(i, lanes);
          if constexpr (!kLayer) w = hn::Add(w, weight_offset);
          v = hn::Mul(v, w);
        }
        if constexpr (kLayer) {
          if (biases) v = hn::Add(v, biases.load(i, lanes));
        }
        return v;
      };
      if (!job.stream) {
        for_columns(n, [=](int64_t i, auto lanes) FK_BODY {
          store(finish(load(xs + i, lanes), i, lanes), out + i, lanes);
        });
      } else {
        const T* residuals = residual.block(j, n);
        T* sums_out = sum.block(j);
        // The row is near by now: meanwhile memory can bring the next one.
        const int64_t after = std::min(r + 1, end - 1);
        const T* next_x = job.x.row<const T>(after);
        const T* next_residual = job.residual.row<const T>(after);
        for_columns(n, [=](int64_t i, auto lanes) FK_BODY {
          V v = load(xs + i, lanes);
          __builtin_prefetch(next_x + j + i, 0, 2);
          if (residuals != nullptr) {
            __builtin_prefetch(next_residual + j + i, 0, 2);
            v = RoundF32<T>(d, hn::Add(v, load(residuals + i, lanes)));
            if (sums_out != nullptr) stream(v, sums_out + i, lanes);
          }
          stream(finish(v, i, lanes), out + i, lanes);
        });
      }
      y.finish(j, n);
    }
  }
  if (job.stream) hwy::FlushStream();
}

using NormForwardRows = void (*)(const NormForward&, int64_t, int64_t);

template <bool kLayer>
HWY_INLINE NormForwardRows forward_for(DType t) {
  return t == DType::kFloat32   ? &forward_rows<float, kLayer>
         : t == DType::kFloat16 ? &forward_rows<float16_t, kLayer>
                                : &forward_rows<bfloat16_t, kLayer>;
}

NormForwardRows norm_forward_of(DType t, bool layer) {
  return layer ? forward_for<true>(t) : forward_for<false>(t);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {

FK_CPU_EXPORT(norm_forward_of);

NormForwardRows norm_forward(DType dtype, bool layer) {
  return FK_CPU_DISPATCH(norm_forward_of)(dtype, layer);
}

}  // namespace fk::cpu
#endif
