// The backward of a norm, by rows: what the gradients of rms_norm and layer_norm are on the CPU,
// and what ops that wrote the norm of their output begin their own gradients with.
//
// A row is passed over twice (its two sums, then dx), the second time from cache. Two rows at a
// time share one load and one store of the sums for dweight and dbias.

#include "cpu/norm/backward.h"

#ifndef FK_CPU_NORM_BACKWARD_ONCE_
#define FK_CPU_NORM_BACKWARD_ONCE_

namespace fk::cpu {
namespace {

// So many rows of the backward share a load and store of the partial sums. Four are no faster:
// their pointers no longer fit the registers.
constexpr int kGroup = 2;

}  // namespace
}  // namespace fk::cpu

#endif  // FK_CPU_NORM_BACKWARD_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/norm/backward.cc"
#include "cpu/foreach_target.h"
#include "cpu/norm/rows_simd.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

// Returns what the deviations of a row are multiplied by. A single column deviates by nothing, and
// g - mean(g) is 0. It would not be quite 0 where the product in g is fused with the difference, so
// it is made 0 here.
float scale_of_layer(float rstd, int64_t columns) { return columns == 1 ? 0.0f * rstd : rstd; }

// Says how a group of rows is worked on: how many there are, whether all strides along a row are 1,
// and whether outputs go past the caches.
struct CachedGroup {
  static constexpr int kRows = kGroup;
  static constexpr bool kUnit = true, kStream = false;
};
struct StreamedGroup : CachedGroup {
  static constexpr bool kStream = true;
};
struct SingleRow {
  static constexpr int kRows = 1;
  static constexpr bool kUnit = false, kStream = false;
};

// dx = rstd (g - mean(g) - xhat mean(g xhat)) + dsum, with g = dy w and xhat = (x - mean) rstd; the
// root-mean-square norm has neither mean. `first`: nothing is in the partial sums yet.
template <class T, bool kLayer, class Group>
HWY_NOINLINE void backward_group(const NormBackward& job, int64_t r, float* dweight, float* dbias,
                                 bool first) {
  constexpr int kRows = Group::kRows;
  constexpr bool kUnit = Group::kUnit;
  const F32 d;
  const int64_t columns = job.columns, block = job.block, summed_block = summed_block_of(block);
  const float per_column = 1.0f / static_cast<float>(columns);
  ParameterInput<T, kUnit> weight(job.weight);
  const auto weight_offset = hn::Set(d, job.weight_offset);

  Input<T, kUnit> dy[kRows], x[kRows], dsum[kRows];
  Output<T, kUnit> dx[kRows];
  const T *gs[kRows], *xs[kRows], *dsums[kRows];
  float rstd[kRows];
  // dx = (g - shift - xhat slope) scale: what cancels is taken off before it is scaled.
  V center[kRows], scale[kRows], shift[kRows], slope[kRows];
  unrolled<kRows>([&](auto k) FK_BODY {
    dy[k].bind(job.dy.row<const T>(r + k), job.dy.column_stride);
    x[k].bind(job.x.row<const T>(r + k), job.x.column_stride);
    dsum[k].bind(job.dsum.row<const T>(r + k), job.dsum.column_stride);
    dx[k].bind(job.dx.row<T>(r + k), job.dx.column_stride);
    rstd[k] = *job.rstd.row<const float>(r + k);
    scale[k] = hn::Set(d, kLayer ? scale_of_layer(rstd[k], columns) : rstd[k]);
    center[k] = kLayer ? hn::Set(d, *job.mean.row<const float>(r + k)) : hn::Zero(d);
  });

  if (job.dx.data != nullptr) {
    const Means none(columns, summed_block);
    Means means[] = {none, none};
    static_assert(kRows <= 2);
    for (int64_t j = 0; j < columns; j += summed_block) {
      const int64_t n = std::min(summed_block, columns - j);
      unrolled<kRows>([&](auto k) FK_BODY {
        gs[k] = dy[k].block(j, n);
        xs[k] = x[k].block(j, n);
      });
      const auto weights = weight.block(j, n);
      const auto add = [&](int64_t i, auto lanes, auto k, V w, Sums& acc) FK_BODY {
        const V g = hn::Mul(load(gs[k] + i, lanes), w);
        V centered = load(xs[k] + i, lanes);
        if constexpr (kLayer) {
          centered = hn::Sub(centered, center[k]);
          acc.b = hn::Add(acc.b, g);
        }
        acc.a = hn::MulAdd(g, centered, acc.a);
      };
      const auto weight_at = [&](int64_t i, auto lanes) FK_BODY {
        if (!weights) return hn::Set(d, 1.0f);
        const V w = weights.load(i, lanes);
        return kLayer ? w : hn::Add(w, weight_offset);
      };
      if constexpr (kRows == 1) {
        const std::integral_constant<int, 0> k;
        means[0].add(accumulate(n, [&](int64_t i, auto lanes, Sums& acc)
                                       FK_BODY { add(i, lanes, k, weight_at(i, lanes), acc); }));
      } else {  // the rows' sums are independent of each other
        Sums sums[kRows];
        for_columns(n, [&](int64_t i, auto lanes) FK_BODY {
          const V w = weight_at(i, lanes);
          unrolled<kRows>([&](auto k) FK_BODY { add(i, lanes, k, w, sums[k]); });
        });
        unrolled<kRows>([&](auto k) FK_BODY { means[k].add(sums[k]); });
      }
    }
    unrolled<kRows>([&](auto k) FK_BODY {
      slope[k] = hn::Set(d, means[k].a(per_column) * rstd[k]);
      shift[k] = hn::Set(d, means[k].b(per_column));
    });
  }

  for (int64_t j = 0; j < columns; j += block) {
    const int64_t n = std::min(block, columns - j);
    T* out[kRows];
    unrolled<kRows>([&](auto k) FK_BODY {
      gs[k] = dy[k].block(j, n);
      xs[k] = x[k].block(j, n);
      dsums[k] = dsum[k].block(j, n);
      out[k] = dx[k].block(j);
    });
    const auto weights = weight.block(j, n);
    for_columns(n, [&](int64_t i, auto lanes) FK_BODY {
      V dw = hn::Zero(d), db = hn::Zero(d);
      V w = hn::Set(d, 1.0f);
      if (weights) {
        w = weights.load(i, lanes);
        if constexpr (!kLayer) w = hn::Add(w, weight_offset);
      }
      unrolled<kRows>([&](auto k) FK_BODY {
        const V g = load(gs[k] + i, lanes);
        V xhat = load(xs[k] + i, lanes);
        if constexpr (kLayer) xhat = hn::Sub(xhat, center[k]);
        xhat = hn::Mul(xhat, scale[k]);
        dw = hn::MulAdd(g, xhat, dw);
        if constexpr (kLayer) db = hn::Add(db, g);
        if (out[0] == nullptr) return;
        V v = hn::Mul(g, w);
        if constexpr (kLayer) v = hn::Sub(v, shift[k]);
        v = hn::Mul(hn::NegMulAdd(xhat, slope[k], v), scale[k]);
        if (dsums[0] != nullptr) v = hn::Add(v, load(dsums[k] + i, lanes));
        if constexpr (Group::kStream) {
          // These rows are near by now: meanwhile memory can bring the next ones.
          __builtin_prefetch(gs[k] + i + kRows * job.dy.row_stride, 0, 2);
          __builtin_prefetch(xs[k] + i + kRows * job.x.row_stride, 0, 2);
          if (dsums[0] != nullptr) {
            __builtin_prefetch(dsums[k] + i + kRows * job.dsum.row_stride, 0, 2);
          }
          stream(v, out[k] + i, lanes);
        } else {
          store(v, out[k] + i, lanes);
        }
      });
      if (dweight != nullptr) {
        float* p = dweight + j + i;  // padded: a whole vector fits
        StoreF32(d, first ? dw : hn::Add(dw, LoadF32(d, p)), p);
      }
      if (kLayer && dbias != nullptr) {
        float* p = dbias + j + i;
        StoreF32(d, first ? db : hn::Add(db, LoadF32(d, p)), p);
      }
    });
    for (int k = 0; k < kRows; ++k) dx[k].finish(j, n);
  }
}

template <class T, bool kLayer>
void backward_rows(const NormBackward& job, int64_t begin, int64_t end, const NormSums& sums) {
  int64_t r = begin;
  const auto starts = [&] { return sums.first && r == begin; };
  if (job.unit) {
    for (; r + kGroup <= end; r += kGroup) {
      if (job.stream) {
        backward_group<T, kLayer, StreamedGroup>(job, r, sums.weight, sums.bias, starts());
      } else {
        backward_group<T, kLayer, CachedGroup>(job, r, sums.weight, sums.bias, starts());
      }
    }
  }
  for (; r < end; ++r) {
    backward_group<T, kLayer, SingleRow>(job, r, sums.weight, sums.bias, starts());
  }
  if (job.stream) hwy::FlushStream();
}

template <bool kLayer>
HWY_INLINE NormBackwardRows backward_for(DType t) {
  return t == DType::kFloat32   ? &backward_rows<float, kLayer>
         : t == DType::kFloat16 ? &backward_rows<float16_t, kLayer>
                                : &backward_rows<bfloat16_t, kLayer>;
}

NormBackwardRows norm_backward_of(DType t, bool layer) {
  return layer ? backward_for<true>(t) : backward_for<false>(t);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {

FK_CPU_EXPORT(norm_backward_of);

NormBackwardRows norm_backward(DType dtype, bool layer) {
  return FK_CPU_DISPATCH(norm_backward_of)(dtype, layer);
}

}  // namespace fk::cpu
#endif
