// This file computes gated_ssm on CUDA, forward and backward: one factor per token.
//
// Floor: reads of x and dt and a write of y; in the backward reads of x and dy, writes of dx and
// ddt. A block takes a token: one sum over its row, then one pass that scales; the second read of a
// row comes from L1.
#include "core/sequences.h"
#include "cuda/gates.cuh"
#include "cuda/row_partition.cuh"
#include "ops/gated_ssm/gated_ssm.h"
#include "ops/gated_ssm/weights.h"

namespace fk::cuda {
namespace {

constexpr int kGatedThreads = 128;

struct GatedArgs {
  StepView x, dt, B, C;  // `channel`: along D or N
  StepView y, dx, ddt, dB, dC;
  StepView g, s;  // without channels
  int64_t length, channels, states, tokens;
  float scale;  // of the weights
};

// Returns the sum over the row of left * right, or of left.
template <class T>
__device__ __forceinline__ float row_sum(const T* left, int64_t left_stride, const T* right,
                                         int64_t right_stride, int64_t count, float* scratch) {
  float sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += kGatedThreads) {
    const float v = to_float(left[i * left_stride]);
    sum = right == nullptr ? sum + v : fmaf(v, to_float(right[i * right_stride]), sum);
  }
  return block_sum<kGatedThreads>(sum, scratch);
}

struct Token {
  int64_t b, l;
  template <class T>
  __device__ __forceinline__ T* row(const StepView& v) const {
    return static_cast<T*>(v.data) + b * v.batch + l * v.step;
  }
};

// Returns 0.9^(L - 1 - t), scaled.
__device__ __forceinline__ float weight_at(const GatedArgs& a, int64_t l) {
  constexpr float kLog2Decay = -0.15200309344504997f;
  return a.scale * exp2f(kLog2Decay * static_cast<float>(a.length - 1 - l));
}

template <class T>
__global__ void __launch_bounds__(kGatedThreads) gate(const __grid_constant__ GatedArgs a) {
  __shared__ float scratch[2][kGatedThreads / 32];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t index = block_index();
  if (index >= a.tokens) return;
  const Token token{index / a.length, index % a.length};
  const float mean =
      row_sum<T>(token.row<const T>(a.dt), a.dt.channel, nullptr, 0, a.channels, scratch[0]) /
      static_cast<float>(a.channels);
  const float dot = row_sum<T>(token.row<const T>(a.B), a.B.channel, token.row<const T>(a.C),
                               a.C.channel, a.states, scratch[1]);
  const float g = sigmoid(mean), s = sigmoid(dot);
  if (threadIdx.x == 0) {
    if (a.g.data != nullptr) *token.row<float>(a.g) = g;
    if (a.s.data != nullptr) *token.row<float>(a.s) = s;
  }
  if (a.y.data == nullptr) return;
  const float factor = g * s * fmaf(1.f - g, weight_at(a, token.l), 1.f);
  const T* x = token.row<const T>(a.x);
  T* y = token.row<T>(a.y);
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < a.channels; i += kGatedThreads) {
    y[i * a.y.channel] = from_float<T>(factor * to_float(x[i * a.x.channel]));
  }
}

template <class T>
__global__ void __launch_bounds__(kGatedThreads) gate_back(const __grid_constant__ GatedArgs a) {
  __shared__ float scratch[kGatedThreads / 32];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t index = block_index();
  if (index >= a.tokens) return;
  const Token token{index / a.length, index % a.length};
  const float g = *token.row<const float>(a.g), s = *token.row<const float>(a.s);
  const float w = weight_at(a, token.l);
  const T* dy = token.row<const T>(a.y);
  const float dfactor =
      row_sum<T>(dy, a.y.channel, token.row<const T>(a.x), a.x.channel, a.channels, scratch);
  const float factor = g * s * fmaf(1.f - g, w, 1.f);
  const float dmean = dfactor * s * fmaf(1.f - 2.f * g, w, 1.f) * g * (1.f - g);
  const float ddot = dfactor * g * fmaf(1.f - g, w, 1.f) * s * (1.f - s);
  const T ddt = from_float<T>(dmean / static_cast<float>(a.channels));
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < a.channels; i += kGatedThreads) {
    if (a.dx.data != nullptr) {
      token.row<T>(a.dx)[i * a.dx.channel] = from_float<T>(factor * to_float(dy[i * a.y.channel]));
    }
    if (a.ddt.data != nullptr) token.row<T>(a.ddt)[i * a.ddt.channel] = ddt;
  }
#pragma unroll 1  // few states
  for (int64_t n = threadIdx.x; n < a.states; n += kGatedThreads) {
    const float B = to_float(token.row<const T>(a.B)[n * a.B.channel]);
    const float C = to_float(token.row<const T>(a.C)[n * a.C.channel]);
    if (a.dB.data != nullptr) token.row<T>(a.dB)[n * a.dB.channel] = from_float<T>(ddot * C);
    if (a.dC.data != nullptr) token.row<T>(a.dC)[n * a.dC.channel] = from_float<T>(ddot * B);
  }
}

StepView token_view(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.dtype, t.stride(0), t.stride(1), 0};
}

template <class Op>
GatedArgs gated_args(const Op& op) {
  GatedArgs a{};
  a.x = step_view(op.x);
  a.B = step_view(op.B);
  a.C = step_view(op.C);
  a.g = token_view(op.g);
  a.s = token_view(op.s);
  a.length = op.x.size(1);
  a.channels = op.x.size(2);
  a.states = op.B.size(2);
  a.tokens = op.x.size(0) * a.length;
  a.scale = a.length == 0 ? 0.f : static_cast<float>(gated_ssm::weight_scale(a.length));
  return a;
}

}  // namespace

Status run(const GatedSsmFwd& op, const Exec& exec) {
  GatedArgs a = gated_args(op);
  if (a.tokens == 0) return {};
  a.dt = step_view(op.dt);
  a.y = step_view(op.y);
  return for_dtype(op.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch_early(gate<T>, "gate", {grid_of(a.tokens), kGatedThreads}, stream_of(exec), a);
  });
}

Status run(const GatedSsmBwd& op, const Exec& exec) {
  GatedArgs a = gated_args(op);
  if (a.tokens == 0) return {};
  a.y = step_view(op.dy);
  a.dx = step_view(op.dx);
  a.ddt = step_view(op.ddt);
  a.dB = step_view(op.dB);
  a.dC = step_view(op.dC);
  return for_dtype(op.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch_early(gate_back<T>, "gate_back", {grid_of(a.tokens), kGatedThreads},
                        stream_of(exec), a);
  });
}

}  // namespace fk::cuda
