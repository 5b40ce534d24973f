// softmax, log_softmax and logsumexp on the CPU, forward and backward.
//
// Floor: each input read once, each output written once; the exponentials (about 10 vector
// instructions) cost as much as memory from the second-level cache. The statistics of a row, its
// maximum and the sum of exp(x - maximum), are gathered block by block while a block is in the
// first-level cache; a second pass over the row then writes the output. A short row's exponentials are
// kept on the stack in between, a long row's are computed again, which is cheaper than to store and
// load them. Rows and columns: see cpu/axis_plan.h.

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
};

struct SoftmaxBackward {
  Form form;
  const Tensor& dy;
  const Tensor& y;
  const Tensor& dx;
  Rows dy_rows, y_rows, dx_rows;
  Tiles tiles;
};

struct LogSumExpBackward {
  const Tensor& dlse;
  const Tensor& x;
  const Tensor& lse;
  const Tensor& dx;
  Rows dlse_rows, x_rows, lse_rows, dx_rows;
  Tiles tiles;
};

}  // namespace fk::cpu

#endif  // FK_OPS_SOFTMAX_CPU_JOBS_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/softmax/cpu.cc"
#include "cpu/foreach_target.h"
#include "cpu/axis_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

// fp32 rows up to this length keep their exponentials in the output.
constexpr int64_t kLongRow = 256 * kBlock;

// What the second pass computes from an entry and two numbers of its row.
struct ExpTimes {
  template <class V>
  HWY_INLINE V operator()(V x, V shift, V factor) const {
    return hn::Mul(Exp(F32(), hn::Sub(x, shift)), factor);
  }
};
struct SubtractBoth {
  template <class V>
  HWY_INLINE V operator()(V x, V shift, V log_sum) const {
    return hn::Sub(hn::Sub(x, shift), log_sum);
  }
};

// y = f(x, p, q) along a row.
template <class F, class T>
HWY_INLINE void MapRow(const F& f, float p, float q, const T* x, int64_t x_stride, T* y,
                       int64_t y_stride, int64_t n) {
  const F32 d;
  T x_buffer[kBlock], y_buffer[kBlock];
  const auto vp = hn::Set(d, p), vq = hn::Set(d, q);
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = std::min(kBlock, n - i);
    const T* in = Gather(x + i * x_stride, x_stride, count, x_buffer);
    T* out = y_stride == 1 ? y + i : y_buffer;
    ForEachVector(count, [&](int64_t c, auto k) HWY_ATTR {
      Store(f(Load(in + c, k), vp, vq), out + c, k);
    });
    if (y_stride != 1) Scatter(out, count, y + i * y_stride, y_stride);
  }
}

// y = f(x, p, q) in a tile of columns, with p and q per column.
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

template <class T>
void ForwardShortRows(const SoftmaxForward& job, int64_t begin, int64_t end) {
  alignas(64) float exps[RowGroup::kElements];
  const F32 d;
  RowGroup group;
  const int64_t n = job.x.size(-1), most = RowGroup::Rows(n);
  for (int64_t first = begin; first < end; first += most) {
    const int64_t rows = std::min(most, end - first);
    const auto x = [&](int64_t r) { return job.x.ptr<const T>() + job.x_rows.offset(first + r); };
    const auto y = [&](int64_t r) { return job.out.ptr<T>() + job.out_rows.offset(first + r); };
    if (job.form == Form::kSoftmax) {
      group.Find(rows, n, x, [&](int64_t r, int64_t i, auto k, auto e) HWY_ATTR {
        Store(e, exps + r * n + i, k);
      });
      for (int64_t r = 0; r < rows; ++r) {
        const auto factor = hn::Set(d, std::isinf(group.max[r]) ? kNaN : 1 / group.sum[r]);
        T* out = y(r);
        ForEachVector(n, [&](int64_t i, auto k) HWY_ATTR {
          Store(hn::Mul(Load(exps + r * n + i, k), factor), out + i, k);
        });
      }
      continue;
    }
    group.Find(rows, n, x, [](int64_t, int64_t, auto, auto) {});
    for (int64_t r = 0; r < rows; ++r) group.sum[r] = std::log(group.sum[r]);
    for (int64_t r = 0; r < rows; ++r) {
      if (job.form == Form::kLogSumExp) {
        float* lse = job.out.ptr<float>() + job.out_rows.offset(first + r);
        *lse = group.shift[r] + group.sum[r];
      } else {
        const float log_sum = std::isinf(group.max[r]) ? kNaN : group.sum[r];
        MapRow(SubtractBoth(), group.shift[r], log_sum, x(r), 1, y(r), 1, n);
      }
    }
  }
}

// A long row's exponentials, relative to the largest entry so far, go to y; a second pass brings them
// to the final maximum and divides by the sum.
HWY_INLINE void LongRowSoftmax(const float* x, float* y, int64_t n) {
  const F32 d;
  float shifts[kLongRow / kBlock];
  LogSumExp row;
  for (int64_t i = 0; i < n; i += kBlock) {
    row.Add(x + i, std::min(kBlock, n - i), [&](int64_t c, auto k, auto e) HWY_ATTR {
      Store(e, y + i + c, k);
    });
    shifts[i / kBlock] = row.shift;
  }
  for (int64_t i = 0; i < n; i += kBlock) {
    const double change = std::exp(static_cast<double>(shifts[i / kBlock]) - row.shift);
    const auto factor =
        hn::Set(d, std::isinf(row.max) ? kNaN : static_cast<float>(change / row.sum));
    ForEachVector(std::min(kBlock, n - i), [&](int64_t c, auto k) HWY_ATTR {
      Store(hn::Mul(Load(y + i + c, k), factor), y + i + c, k);
    });
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
      MapRow(ExpTimes(), row.shift, factor, x, x_stride, y, y_stride, n);
    } else {
      const float log_sum = finite ? row.log_sum() : kNaN;
      MapRow(SubtractBoth(), row.shift, log_sum, x, x_stride, y, y_stride, n);
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

// The gradients: a sum over the row of Term(dy, y), then dx = Gradient(dy, y, sum).
struct SoftmaxGradient {
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
  template <class V>
  static HWY_INLINE V Term(V dy, V) {
    return dy;
  }
  template <class V>
  static HWY_INLINE V Gradient(V dy, V y, V sum) {
    return hn::NegMulAdd(Exp(F32(), y), sum, dy);
  }
};

template <class G, class T>
void BackwardRows(const SoftmaxBackward& job, int64_t begin, int64_t end) {
  const F32 d;
  T dy_buffer[kBlock], y_buffer[kBlock], dx_buffer[kBlock];
  const int64_t n = job.y.size(-1);
  const int64_t dy_stride = job.dy.stride(-1), y_stride = job.y.stride(-1);
  const int64_t dx_stride = job.dx.stride(-1);
  for (int64_t r = begin; r < end; ++r) {
    const T* dy = job.dy.ptr<const T>() + job.dy_rows.offset(r);
    const T* y = job.y.ptr<const T>() + job.y_rows.offset(r);
    T* dx = job.dx.ptr<T>() + job.dx_rows.offset(r);
    double sum = 0;
    for (int64_t i = 0; i < n; i += kBlock) {
      const int64_t count = std::min(kBlock, n - i);
      const T* dyb = Gather(dy + i * dy_stride, dy_stride, count, dy_buffer);
      const T* yb = Gather(y + i * y_stride, y_stride, count, y_buffer);
      sum += FoldSum(count, [&](int64_t c, auto k) HWY_ATTR {
        return G::Term(Load(dyb + c, k), Load(yb + c, k));
      });
    }
    const auto vsum = hn::Set(d, static_cast<float>(sum));
    for (int64_t i = 0; i < n; i += kBlock) {
      const int64_t count = std::min(kBlock, n - i);
      const T* dyb = Gather(dy + i * dy_stride, dy_stride, count, dy_buffer);
      const T* yb = Gather(y + i * y_stride, y_stride, count, y_buffer);
      T* dxb = dx_stride == 1 ? dx + i : dx_buffer;
      ForEachVector(count, [&](int64_t c, auto k) HWY_ATTR {
        Store(G::Gradient(Load(dyb + c, k), Load(yb + c, k), vsum), dxb + c, k);
      });
      if (dx_stride != 1) Scatter(dxb, count, dx + i * dx_stride, dx_stride);
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

// dx = exp(x - lse) * dlse. Where lse = -inf there is no mass to share, and every exp(x) is 0.
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
    MapRow(ExpTimes(), shift, factor, job.x.ptr<const T>() + job.x_rows.offset(r),
           job.x.stride(-1), job.dx.ptr<T>() + job.dx_rows.offset(r), job.dx.stride(-1),
           job.x.size(-1));
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

}  // namespace

void softmax_forward(const SoftmaxForward& job, int64_t begin, int64_t end) {
  ByDType(job.x.dtype, [&](auto t) {
    using T = decltype(t);
    const bool unit = job.x.stride(-1) == 1 &&
                      (job.form == Form::kLogSumExp || job.out.stride(-1) == 1);
    if (job.tiles.count > 0) {
      ForwardColumns<T>(job, begin, end);
    } else if (unit && RowGroup::Takes(job.x.size(-1))) {
      ForwardShortRows<T>(job, begin, end);
    } else {
      ForwardRows<T>(job, begin, end);
    }
  });
}

void softmax_backward(const SoftmaxBackward& job, int64_t begin, int64_t end) {
  ByDType(job.y.dtype, [&](auto t) {
    using T = decltype(t);
    const bool columns = job.tiles.count > 0;
    if (job.form == Form::kSoftmax) {
      columns ? BackwardColumns<SoftmaxGradient, T>(job, begin, end)
              : BackwardRows<SoftmaxGradient, T>(job, begin, end);
    } else {
      columns ? BackwardColumns<LogSoftmaxGradient, T>(job, begin, end)
              : BackwardRows<LogSoftmaxGradient, T>(job, begin, end);
    }
  });
}

void logsumexp_backward(const LogSumExpBackward& job, int64_t begin, int64_t end) {
  ByDType(job.x.dtype, [&](auto t) {
    using T = decltype(t);
    job.tiles.count > 0 ? LogSumExpBackwardColumns<T>(job, begin, end)
                        : LogSumExpBackwardRows<T>(job, begin, end);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace fk::cpu {

FK_CPU_EXPORT(softmax_forward);
FK_CPU_EXPORT(softmax_backward);
FK_CPU_EXPORT(logsumexp_backward);

namespace {

// Runs `kernel` over the rows of `job`, or over its tiles if it has some.
template <class Job, class Kernel>
void parallel(const Job& job, Kernel kernel, int64_t rows, int64_t n, const Exec& exec) {
  const Tiles& tiles = job.tiles;
  const int64_t items = tiles.count > 0 ? tiles.count : rows;
  const int64_t grain = grain_of(items, tiles.count > 0 ? n * tiles.width : n);
  exec.parallel_for(items, grain, [&](int64_t b, int64_t e) { kernel(job, b, e); });
}

Status forward(Form form, const Tensor& x, const Tensor& out, const Exec& exec) {
  if (!out) return {};
  const bool reduces = form == Form::kLogSumExp;
  SoftmaxForward job{form, x, out, rows_of(x), rows_of(out, reduces ? 0 : 1), {}};
  if (in_columns(x, job.x_rows) && (reduces || in_columns(out, job.out_rows))) {
    const int64_t inner = evenly_spaced_rows({&job.x_rows, &job.out_rows});
    job.tiles = cached_tiles_of(job.x_rows.count, inner, x.size(-1));
  }
  parallel(job, FK_CPU_DISPATCH(softmax_forward), job.x_rows.count, x.size(-1), exec);
  return {};
}

Status backward(Form form, const Tensor& dy, const Tensor& y, const Tensor& dx, const Exec& exec) {
  if (!dx) return {};
  SoftmaxBackward job{form, dy, y, dx, rows_of(dy), rows_of(y), rows_of(dx), {}};
  if (in_columns(dy, job.dy_rows) && in_columns(y, job.y_rows) && in_columns(dx, job.dx_rows)) {
    const int64_t inner = evenly_spaced_rows({&job.dy_rows, &job.y_rows, &job.dx_rows});
    job.tiles = cached_tiles_of(job.y_rows.count, inner, y.size(-1));
  }
  parallel(job, FK_CPU_DISPATCH(softmax_backward), job.y_rows.count, y.size(-1), exec);
  return {};
}

}  // namespace

Status run(const SoftmaxFwd& a, const Exec& exec) { return forward(Form::kSoftmax, a.x, a.y, exec); }

Status run(const LogSoftmaxFwd& a, const Exec& exec) {
  return forward(Form::kLogSoftmax, a.x, a.y, exec);
}

Status run(const LogSumExpFwd& a, const Exec& exec) {
  return forward(Form::kLogSumExp, a.x, a.lse, exec);
}

Status run(const SoftmaxBwd& a, const Exec& exec) {
  return backward(Form::kSoftmax, a.dy, a.y, a.dx, exec);
}

Status run(const LogSoftmaxBwd& a, const Exec& exec) {
  return backward(Form::kLogSoftmax, a.dy, a.y, a.dx, exec);
}

Status run(const LogSumExpBwd& a, const Exec& exec) {
  if (!a.dx) return {};
  LogSumExpBackward job{a.dlse, a.x, a.lse, a.dx, rows_of(a.dlse, 0),
                        rows_of(a.x), rows_of(a.lse, 0), rows_of(a.dx), {}};
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
