// This file computes cross_entropy from logits on CUDA.
//
// Floors for logits (N, V): forward one read, backward one read + one write.
//
// Forward: a block (or, with few rows, several) reads a row once, keeping the online logsumexp and,
// with label smoothing, the sum of the logits less the target's; log-softmax is never stored. The
// row losses then go through one block in a fixed order, so results repeat bit for bit. Backward:
// given the logsumexp, an elementwise pass, in place if asked.
#include "core/workspace.h"
#include "cuda/loss.cuh"
#include "cuda/math.cuh"
#include "cuda/row_map.cuh"
#include "cuda/row_reduce.cuh"
#include "ops/cross_entropy/cross_entropy.h"

namespace fk::cuda {
namespace {

// Without kMaySmooth, `smoothing` is 0.
template <class T, bool kMaySmooth>
struct LossOp {
  using Element = T;
  struct State {
    LogSumExp<T> lse;
    float reference;  // the target's logit, or 0 where that is no number
    float total;      // of the logits less that, lest what all have in common hide the rest
  };
  static constexpr int kInputs = 1;
  RowView<const T> in[1];
  Targets targets;
  int64_t columns, ignore_index;
  float smoothing;
  float* row_losses;  // in the workspace; NULL if no sum of them is wanted
  float *losses, *shift, *log_sum;
  int64_t losses_stride, shift_stride, log_sum_stride;

  __device__ State start(int64_t row) const {
    float reference = 0.f;
    if (kMaySmooth && smoothing > 0.f) {
      const int64_t target = targets[row];
      if (target >= 0 && target < columns) reference = finite_or_zero(logit(row, target));
    }
    return {LogSumExp<T>::empty(), reference, 0.f};
  }
  __device__ float logit(int64_t row, int64_t column) const {
    return to_float(in[0].row(row)[column * in[0].step]);
  }
  __device__ static float finite_or_zero(float x) { return isfinite(x) ? x : 0.f; }

  __device__ float fill(const State&) const { return -INFINITY; }
  template <int kVectors, int kWidth>
  __device__ void add(State& state, const float (&x)[kVectors][kWidth],
                      const float (&)[kVectors][kWidth], int valid) const {
    state.lse.add(x);
    if (kMaySmooth) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float total = 0;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) total += x[j][e] - state.reference;
        state.total += j < valid ? total : 0.f;
      }
    }
  }
  __device__ static State merge(const State& a, const State& b) {
    return {LogSumExp<T>::merge(a.lse, b.lse), a.reference, a.total + b.total};
  }
  __device__ void finish(int64_t row, const State& state) const {
    // A row that holds +inf or NaN, or nothing but -inf, is no distribution.
    const bool good = state.lse.sum > 0.f && state.lse.sum < INFINITY;
    const float row_shift = good ? state.lse.max : 0.f;
    const float row_log_sum = good ? logf(state.lse.sum) : NAN;
    const int64_t target = targets[row];
    float loss = 0.f;
    if (target != ignore_index) {
      if (target < 0 || target >= columns) {
        loss = NAN;
      } else {
        // The large terms come first: near the maximum they cancel.
        const float at_target = logit(row, target), reference = finite_or_zero(at_target);
        loss = row_shift - reference - (1.f - smoothing) * (at_target - reference);
        if (kMaySmooth && smoothing > 0.f) {
          loss -= smoothing * (state.total / static_cast<float>(columns));
        }
        loss += row_log_sum;
      }
    }
    if (row_losses != nullptr) row_losses[row] = loss;
    if (losses != nullptr) losses[row * losses_stride] = loss;
    if (shift != nullptr) shift[row * shift_stride] = row_shift;
    if (log_sum != nullptr) log_sum[row * log_sum_stride] = row_log_sum;
  }
};

template <class T>
struct LossBwdOp {
  using Element = T;
  static constexpr int kInputs = 1;
  RowView<const T> in[1];
  RowView<T> out;
  Targets targets;
  const float *shift, *log_sum, *dlosses, *dloss, *count;
  int64_t shift_stride, log_sum_stride, dlosses_stride;
  int64_t columns, ignore_index;
  float smoothing;

  struct Row {
    float shift, log_sum, scale;
    int64_t target;  // -1: the row does not count
  };
  __device__ Row row(int64_t r) const {
    const int64_t target = targets[r];
    if (target == ignore_index) return {0.f, 0.f, 0.f, -1};
    float scale = dlosses != nullptr ? dlosses[r * dlosses_stride] : *dloss;
    if (count != nullptr) scale /= *count;
    if (target < 0 || target >= columns) return {0.f, 0.f, NAN, 0};
    return {shift[r * shift_stride], log_sum[r * log_sum_stride], scale, target};
  }
  template <int kCount>
  __device__ void apply(const Row& row, int64_t column, float (&x)[kCount],
                        const float (&)[kCount]) const {
    if (row.target < 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = 0.f;
      return;
    }
    const float background = smoothing / static_cast<float>(columns);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = exp_for<T>((x[i] - row.shift) - row.log_sum) - background;
    }
    const int64_t hit = row.target - column;
    if (hit >= 0 && hit < kCount) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i == hit) x[i] -= 1.f - smoothing;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] *= row.scale;
  }
};

template <bool kSmooth>
Status launch_forward(const CrossEntropyFwd& a, const Exec& exec) {
  const int64_t rows = a.logits.size(0);
  float* row_losses = a.loss ? exec.workspace<float>() : nullptr;
  char* partial = exec.workspace<char>() + WorkspaceParts::rounded(rows * sizeof(float));
  if (row_losses != nullptr || a.losses || a.shift || a.log_sum) {
    const auto op = [&](auto tag) {
      using T = typename decltype(tag)::type;
      constexpr bool kMaySmooth = kSmooth || std::is_same_v<T, Any>;
      return LossOp<T, kMaySmooth>{{rows_view<const T>(a.logits)},
                                   Targets(a.targets),
                                   a.logits.size(1),
                                   a.ignore_index,
                                   static_cast<float>(a.label_smoothing),
                                   row_losses,
                                   a.losses ? a.losses.ptr<float>() : nullptr,
                                   a.shift ? a.shift.ptr<float>() : nullptr,
                                   a.log_sum ? a.log_sum.ptr<float>() : nullptr,
                                   a.losses ? a.losses.stride(0) : 0,
                                   a.shift ? a.shift.stride(0) : 0,
                                   a.log_sum ? a.log_sum.stride(0) : 0};
    };
    FK_RETURN_IF_ERROR(
        reduce<false>(a.logits.dtype, op, layout_of({&a.logits}), partial, stream_of(exec)));
  }
  if (!a.loss && !a.count) return {};
  return launch_early(total_loss, "total_loss", {1, kTotalThreads}, stream_of(exec), row_losses,
                      Targets(a.targets), rows, a.ignore_index, a.reduction == kMean,
                      a.loss ? a.loss.ptr<float>() : nullptr,
                      a.count ? a.count.ptr<float>() : nullptr);
}

}  // namespace

size_t workspace(const CrossEntropyFwd& a) {
  const RowLayout layout = layout_of({&a.logits});
  return WorkspaceParts::rounded(layout.rows * sizeof(float)) +
         partial_bytes<LossOp<float, true>::State>(layout, size_of(a.logits.dtype));
}

Status run(const CrossEntropyFwd& a, const Exec& exec) {
  return a.label_smoothing > 0 ? launch_forward<true>(a, exec) : launch_forward<false>(a, exec);
}

Status run(const CrossEntropyBwd& a, const Exec& exec) {
  if (!a.dlogits) return {};
  const auto op = [&](auto tag) {
    using T = typename decltype(tag)::type;
    return LossBwdOp<T>{{rows_view<const T>(a.logits)},
                        rows_view<T>(a.dlogits),
                        Targets(a.targets),
                        a.shift.ptr<const float>(),
                        a.log_sum.ptr<const float>(),
                        a.reduction == kNone ? a.dlosses.ptr<const float>() : nullptr,
                        a.reduction == kNone ? nullptr : a.dloss.ptr<const float>(),
                        a.reduction == kMean ? a.count.ptr<const float>() : nullptr,
                        a.shift.stride(0),
                        a.log_sum.stride(0),
                        a.reduction == kNone ? a.dlosses.stride(0) : 0,
                        a.logits.size(1),
                        a.ignore_index,
                        static_cast<float>(a.label_smoothing)};
  };
  return map<false>(a.logits.dtype, op, layout_of({&a.logits, &a.dlogits}), stream_of(exec));
}

}  // namespace fk::cuda
