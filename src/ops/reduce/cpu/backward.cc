// This file computes the gradients of sum and max on the CPU.
//
// Floor: dx written once; max also reads x, first to count the entries that share the gradient,
// then from cache. Rows and columns: see cpu/axis_plan.h.

#ifndef FK_OPS_REDUCE_CPU_BACKWARD_JOBS_
#define FK_OPS_REDUCE_CPU_BACKWARD_JOBS_

#include "core/exec.h"
#include "cpu/axis_plan.h"
#include "ops/reduce/reduce.h"

namespace fk::cpu {

struct SumBackward {
  const Tensor& dy;
  const Tensor& dx;
  Rows dy_rows, dx_rows;
  Tiles tiles;
};

struct MaxBackward {
  const Tensor& dy;
  const Tensor& x;
  const Tensor& y;
  const Tensor& dx;
  Rows dy_rows, x_rows, y_rows, dx_rows;
  Tiles tiles;
};

}  // namespace fk::cpu

#endif  // FK_OPS_REDUCE_CPU_BACKWARD_JOBS_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/reduce/cpu/backward.cc"
#include "cpu/foreach_target.h"
#include "cpu/simd_axis.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

// Sets out[0...n) to value, as the bits that it is stored in.
template <class T>
HWY_INLINE void Fill(T* out, int64_t n, T value) {
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
  const hn::ScalableTag<Bits> d;
  const int64_t lanes = hn::Lanes(d);
  if (n < lanes) {
    for (int64_t i = 0; i < n; ++i) out[i] = value;
    return;
  }
  Bits bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const auto v = hn::Set(d, bits);
  Bits* to = reinterpret_cast<Bits*>(out);
  for (int64_t i = 0; i + lanes <= n; i += lanes) hn::StoreU(v, d, to + i);
  hn::StoreU(v, d, to + n - lanes);  // some of them again, if n is no multiple
}

template <class T>
void SumBackwardRows(const SumBackward& job, int64_t begin, int64_t end) {
  const int64_t n = job.dx.size(-1), stride = job.dx.stride(-1);
  for (int64_t r = begin; r < end; ++r) {
    const T* dy = job.dy.ptr<const T>() + job.dy_rows.offset(r);
    T* dx = job.dx.ptr<T>() + job.dx_rows.offset(r);
    if (stride == 1) {
      Fill(dx, n, *dy);
    } else {
      for (int64_t i = 0; i < n; ++i) dx[i * stride] = *dy;
    }
  }
}

template <class T>
void SumBackwardColumns(const SumBackward& job, int64_t begin, int64_t end) {
  T buffer[kTile];
  const int64_t n = job.dx.size(-1), stride = job.dx.stride(-1);
  for (int64_t i = begin; i < end; ++i) {
    const auto [row, width] = job.tiles[i];
    T* dx = job.dx.ptr<T>() + job.dx_rows.offset(row);
    const T* dy = Gather(job.dy.ptr<const T>() + job.dy_rows.offset(row), job.dy_rows.last_stride,
                         width, buffer);
    for (int64_t j = 0; j < n; ++j) std::copy_n(dy, width, dx + j * stride);
  }
}

// Marks where x is the largest entry. If the largest is NaN, that is where x is NaN.
template <class V>
HWY_INLINE auto IsLargest(V x, V y) {
  return hn::Or(hn::Eq(x, y), hn::And(hn::IsNaN(x), hn::IsNaN(y)));
}

template <class T>
void MaxBackwardRows(const MaxBackward& job, int64_t begin, int64_t end) {
  const F32 d;
  const auto one = hn::Set(d, 1.0f);
  T x_buffer[kBlock], dx_buffer[kBlock];
  const int64_t n = job.x.size(-1), x_stride = job.x.stride(-1), dx_stride = job.dx.stride(-1);
  for (int64_t r = begin; r < end; ++r) {
    const T* x = job.x.ptr<const T>() + job.x_rows.offset(r);
    T* dx = job.dx.ptr<T>() + job.dx_rows.offset(r);
    const auto y = hn::Set(d, ToF32(job.y.ptr<const T>() + job.y_rows.offset(r)));
    double count = 0;
    for (int64_t i = 0; i < n; i += kBlock) {
      const int64_t length = std::min(kBlock, n - i);
      const T* in = Gather(x + i * x_stride, x_stride, length, x_buffer);
      count += FoldSum(length, [&](int64_t c, auto k) HWY_ATTR {
        const auto mask = IsLargest(Load(in + c, k), y);
        if constexpr (std::is_same_v<decltype(k), int64_t>) {
          return hn::IfThenElseZero(hn::And(mask, hn::FirstN(F32(), k)), one);
        } else {
          return hn::IfThenElseZero(mask, one);
        }
      });
    }
    const float dy = ToF32(job.dy.ptr<const T>() + job.dy_rows.offset(r));
    const auto share = hn::Set(d, static_cast<float>(dy / count));
    for (int64_t i = 0; i < n; i += kBlock) {
      const int64_t length = std::min(kBlock, n - i);
      const T* in = Gather(x + i * x_stride, x_stride, length, x_buffer);
      T* out = dx_stride == 1 ? dx + i : dx_buffer;
      WriteVectors<kManyAtOnce>(out, length, false, [&](int64_t c, auto k) HWY_ATTR {
        return hn::IfThenElseZero(IsLargest(Load(in + c, k), y), share);
      });
      if (dx_stride != 1) Scatter(out, length, dx + i * dx_stride, dx_stride);
    }
  }
}

template <class T>
void MaxBackwardColumns(const MaxBackward& job, int64_t begin, int64_t end) {
  alignas(64) double count[kTile];
  alignas(64) float y[kTile], share[kTile];
  const auto one = hn::Set(F32(), 1.0f);
  const int64_t n = job.x.size(-1), x_stride = job.x.stride(-1), dx_stride = job.dx.stride(-1);
  for (int64_t i = begin; i < end; ++i) {
    const auto [row, width] = job.tiles[i];
    const T* x = job.x.ptr<const T>() + job.x_rows.offset(row);
    T* dx = job.dx.ptr<T>() + job.dx_rows.offset(row);
    const T* ty = job.y.ptr<const T>() + job.y_rows.offset(row);
    const T* tdy = job.dy.ptr<const T>() + job.dy_rows.offset(row);
    for (int64_t c = 0; c < width; ++c) y[c] = ToF32(ty + c * job.y_rows.last_stride);
    SumColumns(count, width, 0, n, [&](int64_t j, int64_t c, auto k) HWY_ATTR {
      return hn::IfThenElseZero(IsLargest(Load(x + j * x_stride + c, k), Load(y + c, k)), one);
    });
    for (int64_t c = 0; c < width; ++c) {
      share[c] = static_cast<float>(ToF32(tdy + c * job.dy_rows.last_stride) / count[c]);
    }
    for (int64_t j = 0; j < n; ++j) {
      ForEachVector(width, [&](int64_t c, auto k) HWY_ATTR {
        const auto mask = IsLargest(Load(x + j * x_stride + c, k), Load(y + c, k));
        Store(hn::IfThenElseZero(mask, Load(share + c, k)), dx + j * dx_stride + c, k);
      });
    }
  }
}

}  // namespace

void sum_backward(const SumBackward& job, int64_t begin, int64_t end) {
  ByDType(job.dx.dtype, [&](auto t) {
    using T = decltype(t);
    job.tiles.count > 0 ? SumBackwardColumns<T>(job, begin, end)
                        : SumBackwardRows<T>(job, begin, end);
  });
}

void max_backward(const MaxBackward& job, int64_t begin, int64_t end) {
  ByDType(job.x.dtype, [&](auto t) {
    using T = decltype(t);
    job.tiles.count > 0 ? MaxBackwardColumns<T>(job, begin, end)
                        : MaxBackwardRows<T>(job, begin, end);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace fk::cpu {

FK_CPU_EXPORT(sum_backward);
FK_CPU_EXPORT(max_backward);

Status run(const SumBwd& a, const Exec& exec) {
  if (!a.dx) return {};
  SumBackward job{a.dy, a.dx, rows_of(a.dy, 0), rows_of(a.dx), {}};
  if (in_columns(a.dx, job.dx_rows)) {
    job.tiles =
        tiles_of(job.dx_rows.count, evenly_spaced_rows({&job.dy_rows, &job.dx_rows}), kTile);
  }
  parallel(job, FK_CPU_DISPATCH(sum_backward), job.dx_rows.count, a.dx.size(-1), exec);
  return {};
}

Status run(const MaxBwd& a, const Exec& exec) {
  if (!a.dx) return {};
  MaxBackward job{a.dy,          a.x, a.y, a.dx, rows_of(a.dy, 0), rows_of(a.x), rows_of(a.y, 0),
                  rows_of(a.dx), {}};
  if (in_columns(a.x, job.x_rows) && in_columns(a.dx, job.dx_rows)) {
    const int64_t inner =
        evenly_spaced_rows({&job.dy_rows, &job.x_rows, &job.y_rows, &job.dx_rows});
    job.tiles = cached_tiles_of(job.x_rows.count, inner, a.x.size(-1));
  }
  parallel(job, FK_CPU_DISPATCH(max_backward), job.dx_rows.count, a.dx.size(-1), exec);
  return {};
}

}  // namespace fk::cpu

#endif  // HWY_ONCE
