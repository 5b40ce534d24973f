// This file computes the gradients of softmax, log_softmax and logsumexp on the CPU.
//
// Floor: each input read once, dx written once. softmax and log_softmax need a sum over the row
// first and read the row a second time from cache; logsumexp needs one pass, since the forward
// hands it lse. Rows and columns: see cpu/axis_plan.h.

#ifndef FK_OPS_SOFTMAX_CPU_BACKWARD_JOBS_
#define FK_OPS_SOFTMAX_CPU_BACKWARD_JOBS_

#include "core/exec.h"
#include "cpu/axis_plan.h"
#include "ops/softmax/softmax.h"

namespace fk::cpu {

struct SoftmaxBackward {
  bool log;  // of log_softmax
  const Tensor& dy;
  const Tensor& y;
  const Tensor& dx;
  Rows dy_rows, y_rows, dx_rows;
  Tiles tiles;
  bool stream;
  bool far;  // no cache holds the tensors
};

struct LogSumExpBackward {
  const Tensor& dlse;
  const Tensor& x;
  const Tensor& lse;
  const Tensor& dx;
  Rows dlse_rows, x_rows, lse_rows, dx_rows;
  Tiles tiles;
  bool stream;
};

}  // namespace fk::cpu

#endif  // FK_OPS_SOFTMAX_CPU_BACKWARD_JOBS_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/softmax/cpu/backward.cc"
#include "cpu/foreach_target.h"
#include "cpu/simd_axis.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

// The gradients take a sum over the row of Term(dy, y), then dx = Gradient(dy, y, sum).
struct SoftmaxGradient {
  static constexpr int kAtOnce = kManyAtOnce;
  template <class V>
  static HWY_INLINE V Term(V dy, V y) {
    return hn::Mul(dy, y);
  }
  template <class V>
  static HWY_INLINE V Gradient(V dy, V y, V dot) {
    return hn::Mul(y, hn::Sub(dy, dot));
  }
};
struct LogSoftmaxGradient {
  static constexpr int kAtOnce = 1;
  template <class V>
  static HWY_INLINE V Term(V dy, V) {
    return dy;
  }
  template <class V>
  static HWY_INLINE V Gradient(V dy, V y, V sum) {
    return hn::NegMulAdd(Exp(F32(), y), sum, dy);
  }
};

// The second pass reads rows up to this size forwards, as the hardware fetches ahead, longer ones
// from their end, which the caches still hold: with AVX-512 (Zen 4) that pays where the first level
// does not hold the row, elsewhere where the second does not.
constexpr int64_t kForwardsBytes = int64_t{HWY_TARGET <= HWY_AVX3 ? 32 : 256} << 10;

// Brings the next row as far as the second-level cache while the second pass stores this one.
template <class T>
HWY_INLINE void FetchNextRow(const T* dy, const T* y, int64_t n) {
  __builtin_prefetch(dy + n, 0, 2);
  __builtin_prefetch(y + n, 0, 2);
}

template <class G, class T>
void BackwardRows(const SoftmaxBackward& job, int64_t begin, int64_t end) {
  const F32 d;
  T dy_buffer[kBlock], y_buffer[kBlock], dx_buffer[kBlock];
  const int64_t n = job.y.size(-1);
  const int64_t dy_stride = job.dy.stride(-1), y_stride = job.y.stride(-1);
  const int64_t dx_stride = job.dx.stride(-1);
  const bool far = job.far;  // not to be read again after every store
  const bool forwards = !far && 2 * n * static_cast<int64_t>(sizeof(T)) < kForwardsBytes;
  const int64_t first = forwards ? 0 : (n - 1) / kBlock * kBlock;
  const int64_t step = forwards ? kBlock : -kBlock;
  for (int64_t r = begin; r < end; ++r) {
    const T* dy = job.dy.ptr<const T>() + job.dy_rows.offset(r);
    const T* y = job.y.ptr<const T>() + job.y_rows.offset(r);
    T* dx = job.dx.ptr<T>() + job.dx_rows.offset(r);
    double sum = 0;
    for (int64_t i = 0; i < n; i += kBlock) {
      const int64_t count = std::min(kBlock, n - i);
      const T* dyb = Gather(dy + i * dy_stride, dy_stride, count, dy_buffer);
      const T* yb = Gather(y + i * y_stride, y_stride, count, y_buffer);
      sum += FoldSum(count, [&](int64_t c, auto k)
                                HWY_ATTR { return G::Term(Load(dyb + c, k), Load(yb + c, k)); });
    }
    const auto vsum = hn::Set(d, static_cast<float>(sum));
    for (int64_t i = first; i >= 0 && i < n; i += step) {
      const int64_t count = std::min(kBlock, n - i);
      const T* dyb = Gather(dy + i * dy_stride, dy_stride, count, dy_buffer);
      const T* yb = Gather(y + i * y_stride, y_stride, count, y_buffer);
      T* dxb = dx_stride == 1 ? dx + i : dx_buffer;
      WriteVectors<G::kAtOnce>(dxb, count, job.stream && dx_stride == 1,
                               [=](int64_t c, auto k) HWY_ATTR {
                                 if (far) FetchNextRow(dyb + c, yb + c, n);
                                 return G::Gradient(Load(dyb + c, k), Load(yb + c, k), vsum);
                               });
      if (dx_stride != 1) Scatter(dxb, count, dx + i * dx_stride, dx_stride);
    }
  }
}

// Takes unit-stride rows of kColumns, which stay in registers between the sum and the output, as
// far as there are so many.
template <class G, int kColumns, class T>
void BackwardHeldRows(const SoftmaxBackward& job, int64_t begin, int64_t end) {
  const F32 d;
  constexpr int kVectors = kColumns / static_cast<int>(hn::MaxLanes(F32()));
  const int64_t lanes = hn::Lanes(d);
  for (int64_t r = begin; r < end; ++r) {
    const T* dy = job.dy.ptr<const T>() + job.dy_rows.offset(r);
    const T* y = job.y.ptr<const T>() + job.y_rows.offset(r);
    T* dx = job.dx.ptr<T>() + job.dx_rows.offset(r);
    hn::Vec<F32> dys[kVectors], ys[kVectors];
    auto sum = hn::Zero(d);
    for (int i = 0; i < kVectors; ++i) {
      dys[i] = LoadF32(d, dy + i * lanes);
      ys[i] = LoadF32(d, y + i * lanes);
      sum = hn::Add(sum, G::Term(dys[i], ys[i]));
    }
    sum = hn::SumOfLanes(d, sum);
    for (int i = 0; i < kVectors; ++i) {
      StoreF32(d, G::Gradient(dys[i], ys[i], sum), dx + i * lanes);
    }
  }
}

template <class G, class T>
void BackwardColumns(const SoftmaxBackward& job, int64_t begin, int64_t end) {
  alignas(64) double sum[kTile];
  alignas(64) float rounded[kTile];
  const int64_t n = job.y.size(-1);
  const int64_t dy_stride = job.dy.stride(-1), y_stride = job.y.stride(-1);
  const int64_t dx_stride = job.dx.stride(-1);
  for (int64_t i = begin; i < end; ++i) {
    const auto [row, width] = job.tiles[i];
    const T* dy = job.dy.ptr<const T>() + job.dy_rows.offset(row);
    const T* y = job.y.ptr<const T>() + job.y_rows.offset(row);
    T* dx = job.dx.ptr<T>() + job.dx_rows.offset(row);
    SumColumns(sum, width, 0, n, [&](int64_t j, int64_t c, auto k) HWY_ATTR {
      return G::Term(Load(dy + j * dy_stride + c, k), Load(y + j * y_stride + c, k));
    });
    std::copy_n(sum, width, rounded);
    for (int64_t j = 0; j < n; ++j) {
      ForEachVector(width, [&](int64_t c, auto k) HWY_ATTR {
        const auto vdy = Load(dy + j * dy_stride + c, k), vy = Load(y + j * y_stride + c, k);
        Store(G::Gradient(vdy, vy, Load(rounded + c, k)), dx + j * dx_stride + c, k);
      });
    }
  }
}

// Computes dx = exp(x - lse) * dlse. Where lse = -inf there is no mass to share, and every exp(x)
// is 0.
struct ShiftAndFactor {
  float shift, factor;
};
ShiftAndFactor LogSumExpGradient(float lse, float dlse) {
  return lse == -kInfinity ? ShiftAndFactor{0, 0} : ShiftAndFactor{lse, dlse};
}

template <class T>
void LogSumExpBackwardRows(const LogSumExpBackward& job, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const auto [shift, factor] =
        LogSumExpGradient(job.lse.ptr<const float>()[job.lse_rows.offset(r)],
                          job.dlse.ptr<const float>()[job.dlse_rows.offset(r)]);
    MapRow(ExpTimes(), shift, factor, job.x.ptr<const T>() + job.x_rows.offset(r), job.x.stride(-1),
           job.dx.ptr<T>() + job.dx_rows.offset(r), job.dx.stride(-1), job.x.size(-1), job.stream);
  }
}

template <class T>
void LogSumExpBackwardColumns(const LogSumExpBackward& job, int64_t begin, int64_t end) {
  alignas(64) float shift[kTile], factor[kTile];
  for (int64_t i = begin; i < end; ++i) {
    const auto [row, width] = job.tiles[i];
    const float* lse = job.lse.ptr<const float>() + job.lse_rows.offset(row);
    const float* dlse = job.dlse.ptr<const float>() + job.dlse_rows.offset(row);
    for (int64_t c = 0; c < width; ++c) {
      const auto column =
          LogSumExpGradient(lse[c * job.lse_rows.last_stride], dlse[c * job.dlse_rows.last_stride]);
      shift[c] = column.shift;
      factor[c] = column.factor;
    }
    MapColumns(ExpTimes(), shift, factor, job.x.ptr<const T>() + job.x_rows.offset(row),
               job.x.stride(-1), job.dx.ptr<T>() + job.dx_rows.offset(row), job.dx.stride(-1),
               job.x.size(-1), width);
  }
}

template <class G>
void Backward(const SoftmaxBackward& job, int64_t begin, int64_t end) {
  const bool held =
      job.dy.stride(-1) == 1 && job.y.stride(-1) == 1 && job.dx.stride(-1) == 1 && !job.stream;
  const int64_t n = job.y.size(-1);
  ByDType(job.y.dtype, [&](auto t) {
    using T = decltype(t);
    if (job.tiles.count > 0) {
      BackwardColumns<G, T>(job, begin, end);
    } else if (held && n == 64) {
      BackwardHeldRows<G, 64, T>(job, begin, end);
    } else if (held && n == 32) {
      BackwardHeldRows<G, 32, T>(job, begin, end);
    } else if (held && n == 16) {
      BackwardHeldRows<G, 16, T>(job, begin, end);
    } else {
      BackwardRows<G, T>(job, begin, end);
    }
  });
  if (job.stream) hwy::FlushStream();
}

}  // namespace

void softmax_backward(const SoftmaxBackward& job, int64_t begin, int64_t end) {
  job.log ? Backward<LogSoftmaxGradient>(job, begin, end)
          : Backward<SoftmaxGradient>(job, begin, end);
}

void logsumexp_backward(const LogSumExpBackward& job, int64_t begin, int64_t end) {
  ByDType(job.x.dtype, [&](auto t) {
    using T = decltype(t);
    job.tiles.count > 0 ? LogSumExpBackwardColumns<T>(job, begin, end)
                        : LogSumExpBackwardRows<T>(job, begin, end);
  });
  if (job.stream) hwy::FlushStream();
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace fk::cpu {

FK_CPU_EXPORT(softmax_backward);
FK_CPU_EXPORT(logsumexp_backward);

namespace {

Status backward(bool log, const Tensor& dy, const Tensor& y, const Tensor& dx, const Exec& exec) {
  if (!dx) return {};
  constexpr int64_t kCacheBytes = int64_t{32} << 20;
  const int64_t bytes = 3 * y.numel() * size_of(y.dtype);
  SoftmaxBackward job{log,
                      dy,
                      y,
                      dx,
                      rows_of(dy),
                      rows_of(y),
                      rows_of(dx),
                      {},
                      pays_to_stream_beside_arithmetic(bytes),
                      bytes > kCacheBytes};
  if (in_columns(dy, job.dy_rows) && in_columns(y, job.y_rows) && in_columns(dx, job.dx_rows)) {
    const int64_t inner = evenly_spaced_rows({&job.dy_rows, &job.y_rows, &job.dx_rows});
    job.tiles = cached_tiles_of(job.y_rows.count, inner, y.size(-1));
  }
  parallel(job, FK_CPU_DISPATCH(softmax_backward), job.y_rows.count, y.size(-1), exec);
  return {};
}

}  // namespace

Status run(const SoftmaxBwd& a, const Exec& exec) {
  return backward(/*log=*/false, a.dy, a.y, a.dx, exec);
}

Status run(const LogSoftmaxBwd& a, const Exec& exec) {
  return backward(/*log=*/true, a.dy, a.y, a.dx, exec);
}

Status run(const LogSumExpBwd& a, const Exec& exec) {
  if (!a.dx) return {};
  LogSumExpBackward job{a.dlse,
                        a.x,
                        a.lse,
                        a.dx,
                        rows_of(a.dlse, 0),
                        rows_of(a.x),
                        rows_of(a.lse, 0),
                        rows_of(a.dx),
                        {},
                        pays_to_stream_beside_arithmetic(2 * a.x.numel() * size_of(a.x.dtype))};
  if (in_columns(a.x, job.x_rows) && in_columns(a.dx, job.dx_rows)) {
    const int64_t inner =
        evenly_spaced_rows({&job.dlse_rows, &job.x_rows, &job.lse_rows, &job.dx_rows});
    job.tiles = cached_tiles_of(job.x_rows.count, inner, a.x.size(-1));
  }
  parallel(job, FK_CPU_DISPATCH(logsumexp_backward), job.x_rows.count, a.x.size(-1), exec);
  return {};
}

}  // namespace fk::cpu

#endif  // HWY_ONCE
