// This file computes softmax, log_softmax and logsumexp on CUDA, forward and backward.
//
// Floors (bytes of T per element): softmax and log_softmax 1 read + 1 write, their backwards 2
// reads + 1 write, logsumexp 1 read, its backward 1 read + 1 write.
//
// Rows of up to 32 KB stay in registers between the statistics and the output
// (row_in_registers.cuh). Longer rows, and rows across the fastest dimension, are reduced to their
// statistics in the workspace and read a second time (row_map.cuh).
#include "core/workspace.h"
#include "cuda/math.cuh"
#include "cuda/row_in_registers.cuh"
#include "cuda/row_map.cuh"
#include "cuda/row_reduce.cuh"
#include "ops/softmax/softmax.h"

namespace fk::cuda {
namespace {

// Says which of the two an op in registers is. That is known when it is compiled or, for rows that
// may have any stride, when it is launched.
enum class Which { kSoftmax, kLogSoftmax, kEither };

// Works in registers; for softmax, x becomes exp(x - own.max).
template <class T, Which kWhich>
struct SoftmaxTileOp {
  using Element = T;
  using State = LogSumExp<T>;
  static constexpr int kInputs = 1;
  static constexpr float kFill = -INFINITY;
  RowView<const T> in[1];
  RowView<T> out;
  bool asked_log;

  __device__ __forceinline__ bool log() const {
    return kWhich == Which::kEither ? asked_log : kWhich == Which::kLogSoftmax;
  }

  struct Row {};
  __device__ Row row(int64_t) const { return {}; }
  template <int kVectors, int kWidth>
  __device__ void add(State& state, const Row&, float (&x)[kVectors][kWidth],
                      const float (&)[kVectors][kWidth], int) const {
    if (log()) {
      state.add(x);
    } else {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int e = 0; e < kWidth; ++e) state.max = fmaxf(state.max, x[j][e]);
      }
      state.max = fminf(state.max, FLT_MAX);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float sum = 0;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          x[j][e] = exp_for<T>(x[j][e] - state.max);
          sum += x[j][e];
        }
        state.sum += sum;
      }
    }
  }
  __device__ static State empty() { return State::empty(); }
  __device__ static State reduce(const State& state, int lanes) {
    const float max = lanes_reduce(state.max, lanes, Max());
    return {max, lanes_reduce(state.sum * exp_for<T>(state.max - max), lanes, Sum())};
  }
  template <int kWidth>
  __device__ void apply(const Row&, const State& own, const State& all, float (&x)[kWidth],
                        const float (&)[kWidth]) const {
    // A row with +inf has no softmax; one of only -inf gives 0 / 0.
    const float sum = all.sum == INFINITY ? NAN : all.sum;
    const float log_sum = log() ? logf(sum) : 0.f;
    const float factor = log() ? 0.f : exp_for<T>(own.max - all.max) / sum;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      x[e] = log() ? (x[e] - all.max) - log_sum : x[e] * factor;
    }
  }
};

// Works in registers; `in` holds dy and y.
template <class T, Which kWhich>
struct SoftmaxBwdTileOp {
  using Element = T;
  struct State {
    float sum;
  };
  static constexpr int kInputs = 2;
  static constexpr float kFill = 0;
  RowView<const T> in[2];
  RowView<T> out;
  bool asked_log;

  __device__ __forceinline__ bool log() const {
    return kWhich == Which::kEither ? asked_log : kWhich == Which::kLogSoftmax;
  }

  struct Row {};
  __device__ Row row(int64_t) const { return {}; }
  template <int kVectors, int kWidth>
  __device__ void add(State& state, const Row&, const float (&dy)[kVectors][kWidth],
                      const float (&y)[kVectors][kWidth], int) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float sum = 0;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum += log() ? dy[j][e] : dy[j][e] * y[j][e];
      state.sum += sum;
    }
  }
  __device__ static State empty() { return {0.f}; }
  __device__ static State reduce(const State& state, int lanes) {
    return {lanes_reduce(state.sum, lanes, Sum())};
  }
  template <int kWidth>
  __device__ void apply(const Row&, const State&, const State& all, float (&dy)[kWidth],
                        const float (&y)[kWidth]) const {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      dy[e] = log() ? dy[e] - exp_for<T>(y[e]) * all.sum : y[e] * (dy[e] - all.sum);
    }
  }
};

// Stores the row's statistics to `stats` for the second read, or its logsumexp to `lse`.
template <class T>
struct StatisticsOp {
  using Element = T;
  using State = LogSumExp<T>;
  static constexpr int kInputs = 1;
  RowView<const T> in[1];
  State* stats;
  RowView<float> lse;

  __device__ State start(int64_t) const { return State::empty(); }
  __device__ float fill(const State&) const { return -INFINITY; }
  template <int kVectors, int kWidth>
  __device__ void add(State& state, const float (&x)[kVectors][kWidth],
                      const float (&)[kVectors][kWidth], int) const {
    state.add(x);
  }
  __device__ static State merge(const State& a, const State& b) { return State::merge(a, b); }
  __device__ void finish(int64_t row, const State& state) const {
    if (stats != nullptr) {
      stats[row] = state;
    } else {
      *lse.row(row) = state.max + logf(state.sum);
    }
  }
};

template <class T>
struct NormaliseOp {
  using Element = T;
  static constexpr int kInputs = 1;
  RowView<const T> in[1];
  RowView<T> out;
  const LogSumExp<T>* stats;
  bool log;

  struct Row {
    float max;
    float norm;  // 1 / sum, or log(sum)
  };
  __device__ Row row(int64_t r) const {
    const LogSumExp<T> s = stats[r];
    const float sum = s.sum == INFINITY ? NAN : s.sum;
    return {s.max, log ? logf(sum) : 1.f / sum};
  }
  template <int kCount>
  __device__ void apply(const Row& row, int64_t, float (&x)[kCount],
                        const float (&)[kCount]) const {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      x[e] -= row.max;
      x[e] = log ? x[e] - row.norm : exp_for<T>(x[e]) * row.norm;
    }
  }
};

// Adds up sum(dy * y), or sum(dy); `in` holds dy and y.
template <class T>
struct DotOp {
  using Element = T;
  struct State {
    float sum;
  };
  static constexpr int kInputs = 2;
  RowView<const T> in[2];
  float* sums;
  bool log;

  __device__ State start(int64_t) const { return {0.f}; }
  __device__ float fill(const State&) const { return 0.f; }
  template <int kVectors, int kWidth>
  __device__ void add(State& state, const float (&dy)[kVectors][kWidth],
                      const float (&y)[kVectors][kWidth], int) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float sum = 0;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum += log ? dy[j][e] : dy[j][e] * y[j][e];
      state.sum += sum;
    }
  }
  __device__ static State merge(const State& a, const State& b) { return {a.sum + b.sum}; }
  __device__ void finish(int64_t row, const State& state) const { sums[row] = state.sum; }
};

template <class T>
struct SoftmaxBwdOp {
  using Element = T;
  static constexpr int kInputs = 2;
  RowView<const T> in[2];
  RowView<T> out;
  const float* sums;
  bool log;

  struct Row {
    float sum;
  };
  __device__ Row row(int64_t r) const { return {sums[r]}; }
  template <int kCount>
  __device__ void apply(const Row& row, int64_t, float (&x)[kCount],
                        const float (&y)[kCount]) const {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      x[e] = log ? x[e] - exp_for<T>(y[e]) * row.sum : y[e] * (x[e] - row.sum);
    }
  }
};

template <class T>
struct LogSumExpBwdOp {
  using Element = T;
  static constexpr int kInputs = 1;
  RowView<const T> in[1];
  RowView<T> out;
  RowView<const float> lse, dlse;

  struct Row {
    float lse, dlse;
  };
  __device__ Row row(int64_t r) const { return {*lse.row(r), *dlse.row(r)}; }
  template <int kCount>
  __device__ void apply(const Row& row, int64_t, float (&x)[kCount],
                        const float (&)[kCount]) const {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      x[e] = row.lse == -INFINITY ? 0.f : row.dlse * exp_for<T>(x[e] - row.lse);
    }
  }
};

// Returns the workspace where rows do not fit registers: a `State` per row, then the reduction's
// own. Outputs do not count here (a query may come without), so it provides for a layout by rows
// and for one by columns.
template <class State>
size_t two_pass_bytes(RowLayout layout, int64_t element_bytes) {
  if (fits_tile(layout, element_bytes)) return 0;
  size_t partial = partial_bytes<State>(layout, element_bytes);
  layout.inner = 1;
  partial = std::max(partial, partial_bytes<State>(layout, element_bytes));
  return WorkspaceParts::rounded(layout.rows * sizeof(State)) + partial;
}

Status run_forward(Tensor x, Tensor y, const Exec& exec, bool log) {
  if (!y) return {};
  sort_leading_dims({&x, &y});
  const RowLayout layout = layout_of({&x, &y});
  if (fits_tile(layout, size_of(x.dtype))) {
    return for_dtype(x.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const RowView<const T> in = rows_view<const T>(x);
      const RowView<T> out = rows_view<T>(y);
      const SoftmaxTileOp<T, Which::kEither> any{{in}, out, log};
      const SoftmaxTileOp<T, Which::kLogSoftmax> log_softmax{{in}, out, log};
      const SoftmaxTileOp<T, Which::kSoftmax> softmax{{in}, out, log};
      return log ? map_tiles(log_softmax, any, layout, stream_of(exec))
                 : map_tiles(softmax, any, layout, stream_of(exec));
    });
  }
  char* partial =
      exec.workspace<char>() + WorkspaceParts::rounded(layout.rows * sizeof(LogSumExp<float>));
  const auto reduction = [&](auto tag) {
    using T = typename decltype(tag)::type;
    return StatisticsOp<T>{{rows_view<const T>(x)}, exec.workspace<LogSumExp<T>>(), {}};
  };
  const auto op = [&](auto tag) {
    using T = typename decltype(tag)::type;
    return NormaliseOp<T>{
        {rows_view<const T>(x)}, rows_view<T>(y), exec.workspace<LogSumExp<T>>(), log};
  };
  return reduce_then_map(x.dtype, reduction, layout, partial, op, layout, stream_of(exec));
}

Status run_backward(Tensor y, Tensor dy, Tensor dx, const Exec& exec, bool log) {
  if (!dx) return {};
  sort_leading_dims({&y, &dy, &dx});
  const RowLayout layout = layout_of({&y, &dy, &dx});
  if (fits_tile(layout, size_of(y.dtype))) {
    return for_dtype(y.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const RowView<const T> first = rows_view<const T>(dy), second = rows_view<const T>(y);
      const RowView<T> out = rows_view<T>(dx);
      const SoftmaxBwdTileOp<T, Which::kEither> any{{first, second}, out, log};
      const SoftmaxBwdTileOp<T, Which::kLogSoftmax> log_softmax{{first, second}, out, log};
      const SoftmaxBwdTileOp<T, Which::kSoftmax> softmax{{first, second}, out, log};
      return log ? map_tiles(log_softmax, any, layout, stream_of(exec))
                 : map_tiles(softmax, any, layout, stream_of(exec));
    });
  }
  float* sums = exec.workspace<float>();
  char* partial = exec.workspace<char>() + WorkspaceParts::rounded(layout.rows * sizeof(float));
  const auto reduction = [&](auto tag) {
    using T = typename decltype(tag)::type;
    return DotOp<T>{{rows_view<const T>(dy), rows_view<const T>(y)}, sums, log};
  };
  const auto op = [&](auto tag) {
    using T = typename decltype(tag)::type;
    return SoftmaxBwdOp<T>{
        {rows_view<const T>(dy), rows_view<const T>(y)}, rows_view<T>(dx), sums, log};
  };
  return reduce_then_map(y.dtype, reduction, layout, partial, op, layout, stream_of(exec));
}

size_t forward_workspace(Tensor x) {
  sort_leading_dims({&x});
  return two_pass_bytes<LogSumExp<float>>(layout_of({&x}), size_of(x.dtype));
}

size_t backward_workspace(Tensor y, Tensor dy) {
  sort_leading_dims({&y, &dy});
  return two_pass_bytes<DotOp<float>::State>(layout_of({&y, &dy}), size_of(y.dtype));
}

}  // namespace

size_t workspace(const SoftmaxFwd& a) { return forward_workspace(a.x); }
size_t workspace(const LogSoftmaxFwd& a) { return forward_workspace(a.x); }
size_t workspace(const SoftmaxBwd& a) { return backward_workspace(a.y, a.dy); }
size_t workspace(const LogSoftmaxBwd& a) { return backward_workspace(a.y, a.dy); }

size_t workspace(const LogSumExpFwd& args) {
  LogSumExpFwd a = args;
  sort_leading_dims({&a.x});
  return partial_bytes<LogSumExp<float>>(layout_of({&a.x}), size_of(a.x.dtype));
}

Status run(const SoftmaxFwd& a, const Exec& exec) { return run_forward(a.x, a.y, exec, false); }
Status run(const LogSoftmaxFwd& a, const Exec& exec) { return run_forward(a.x, a.y, exec, true); }
Status run(const SoftmaxBwd& a, const Exec& exec) {
  return run_backward(a.y, a.dy, a.dx, exec, false);
}
Status run(const LogSoftmaxBwd& a, const Exec& exec) {
  return run_backward(a.y, a.dy, a.dx, exec, true);
}

Status run(const LogSumExpFwd& args, const Exec& exec) {
  LogSumExpFwd a = args;
  if (!a.lse) return {};
  sort_leading_dims({&a.x}, {&a.lse});
  const RowLayout layout = layout_of({&a.x});
  const auto op = [&](auto tag) {
    using T = typename decltype(tag)::type;
    return StatisticsOp<T>{{rows_view<const T>(a.x)}, nullptr, scalars_view<float>(a.lse)};
  };
  return reduce(a.x.dtype, op, layout, exec.workspace(), stream_of(exec));
}

Status run(const LogSumExpBwd& args, const Exec& exec) {
  LogSumExpBwd a = args;
  if (!a.dx) return {};
  sort_leading_dims({&a.x, &a.dx}, {&a.lse, &a.dlse});
  const RowLayout layout = layout_of({&a.x, &a.dx});
  const auto op = [&](auto tag) {
    using T = typename decltype(tag)::type;
    return LogSumExpBwdOp<T>{{rows_view<const T>(a.x)},
                             rows_view<T>(a.dx),
                             scalars_view<const float>(a.lse),
                             scalars_view<const float>(a.dlse)};
  };
  return map(a.x.dtype, op, layout, stream_of(exec));
}

}  // namespace fk::cuda
