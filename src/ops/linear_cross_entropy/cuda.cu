// This file computes linear_cross_entropy on any GPU: its products take a chunk of classes at a
// time, with the rows' logits of the chunk in the workspace between them.
//
// Floor: one product of 2 N V K operations in the forward and three in the backward. Beside them
// the logits are written and read once each, in float, mostly in the second-level cache.
//
// Forward: of each chunk a block per row takes what makes the logsumexp, and merges it with what
// the chunks before gave. Backward: each chunk's logits, computed again, become their gradients;
// these give the chunk's rows of dweight, whole, and a part of dx, which is summed in float.
#include <algorithm>

#include "core/workspace.h"
#include "cuda/gemm/portable_call.cuh"
#include "cuda/loss.cuh"
#include "cuda/math.cuh"
#include "cuda/parameter.cuh"
#include "cuda/reduce.cuh"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace fk::cuda {
namespace {

// A chunk's logits take no more than this, in float.
constexpr int64_t kLogitBytes = int64_t{64} << 20;
constexpr int64_t kClassBlock = 256;
constexpr int kHeadThreads = 256, kAtOnce = 4;

// Describes rows of logits in the workspace.
struct Logits {
  float* data;
  int64_t stride, rows;
  int classes, first_class;  // of the chunk
  float softcap;

  __device__ __forceinline__ const float* row(int64_t r) const { return data + r * stride; }
  __device__ __forceinline__ float capped(float z) const {
    return softcap > 0.f ? softcap * tanhf(z / softcap) : z;
  }
};

// Holds what a row's loss is made of.
struct HeadState {
  LogSumExp<float> lse;
  float reference;  // a logit of the row, or 0 where that is no number
  float total;      // of the logits less that, lest what all have in common hide the rest
  float at_target;
};

struct MergeStates {
  __device__ __forceinline__ HeadState operator()(const HeadState& a, const HeadState& b) const {
    return {LogSumExp<float>::merge(a.lse, b.lse), a.reference, a.total + b.total, a.at_target};
  }
};

__global__ void __launch_bounds__(kHeadThreads)
    head_statistics(const Logits z, Targets targets, HeadState* states) {
  __shared__ HeadState scratch[kHeadThreads / kWarpSize];
  wait_for_earlier_kernels();
  const int64_t r = blockIdx.x;
  const float* const row = z.row(r);
  const bool first = z.first_class == 0;
  HeadState state = {LogSumExp<float>::empty(), 0.f, 0.f, 0.f};
  state.reference = first ? z.capped(row[0]) : states[r].reference;
  if (!isfinite(state.reference)) state.reference = 0.f;
#pragma unroll 1
  for (int i = threadIdx.x; i < z.classes; i += kAtOnce * kHeadThreads) {
    float x[1][kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int at = i + j * kHeadThreads;
      x[0][j] = at < z.classes ? z.capped(row[at]) : -INFINITY;
      if (at < z.classes) state.total += x[0][j] - state.reference;
    }
    state.lse.add(x);
  }
  state = block_reduce<kHeadThreads>(state, MergeStates(), scratch);
  if (threadIdx.x != 0) return;
  const int64_t target = targets[r] - z.first_class;
  float at_target = first ? 0.f : states[r].at_target;
  if (target >= 0 && target < z.classes) at_target = z.capped(row[target]);
  if (!first) state = MergeStates()(states[r], state);
  state.at_target = at_target;
  states[r] = state;
}

struct LossArguments {
  const HeadState* states;
  Targets targets;
  int64_t rows, classes, ignore_index;
  float smoothing;
  float *row_losses, *losses, *lse, *shift, *log_sum;  // NULL: not wanted
  int64_t losses_stride, lse_stride, shift_stride, log_sum_stride;
};

__global__ void __launch_bounds__(kHeadThreads)
    head_losses(const __grid_constant__ LossArguments a) {
  wait_for_earlier_kernels();
  const int64_t r = blockIdx.x * int64_t{kHeadThreads} + threadIdx.x;
  if (r >= a.rows) return;
  HeadState state = {LogSumExp<float>::empty(), 0.f, 0.f, 0.f};
  if (a.classes > 0) state = after_wait(a.states)[r];
  // A row that holds +inf or NaN, or nothing but -inf, is no distribution.
  const bool good = state.lse.sum > 0.f && state.lse.sum < INFINITY;
  const float shift = good ? state.lse.max : 0.f;
  const float log_sum = good ? logf(state.lse.sum) : NAN;
  const int64_t target = a.targets[r];
  float loss = 0.f;
  if (target != a.ignore_index) {
    // The large terms come first: near the maximum they cancel.
    const float reference = isfinite(state.at_target) ? state.at_target : 0.f;
    loss = shift - reference - (1.f - a.smoothing) * (state.at_target - reference);
    if (a.smoothing > 0.f) {
      const float mean = state.total / static_cast<float>(a.classes);
      loss -= a.smoothing * (mean + (state.reference - reference));
    }
    loss += log_sum;
    if (target < 0 || target >= a.classes) loss = NAN;
  }
  if (a.row_losses != nullptr) a.row_losses[r] = loss;
  if (a.losses != nullptr) a.losses[r * a.losses_stride] = loss;
  if (a.lse != nullptr) a.lse[r * a.lse_stride] = shift + log_sum;
  if (a.shift != nullptr) a.shift[r * a.shift_stride] = shift;
  if (a.log_sum != nullptr) a.log_sum[r * a.log_sum_stride] = log_sum;
}

struct GradientArguments {
  Logits logits;
  Targets targets;
  void* gradient;  // rows as the logits have them, which it may overwrite
  DType dtype;
  const float *dlosses, *dloss, *dlse, *shift, *log_sum, *count;  // the first three may be NULL
  int64_t dlosses_stride, dlse_stride, shift_stride, log_sum_stride;
  int64_t ignore_index, all_classes;
  float smoothing;
};

__global__ void __launch_bounds__(kHeadThreads)
    head_gradient(const __grid_constant__ GradientArguments a) {
  wait_for_earlier_kernels();
  const Logits& z = a.logits;
  const int64_t r = blockIdx.x, target = a.targets[r];
  const float shift = a.shift[r * a.shift_stride], log_sum = a.log_sum[r * a.log_sum_stride];
  float g = 0.f;
  if (target != a.ignore_index && (a.dlosses != nullptr || a.dloss != nullptr)) {
    g = a.dlosses != nullptr ? a.dlosses[r * a.dlosses_stride] : *a.dloss;
    if (a.count != nullptr) g /= *a.count;
    if (target < 0 || target >= a.all_classes) g = NAN;
  }
  const float to_lse = a.dlse != nullptr ? a.dlse[r * a.dlse_stride] : 0.f;
  const float everywhere = g * a.smoothing / static_cast<float>(a.all_classes);
  const bool empty = g == 0.f && to_lse == 0.f;
  const int64_t hit = target == a.ignore_index ? -1 : target - z.first_class;
  const float* const row = z.row(r);
#pragma unroll 1
  for (int i = threadIdx.x; i < z.classes; i += kHeadThreads) {
    float dz = 0.f;
    if (!empty) {
      const float x = z.capped(row[i]);
      dz = (g + to_lse) * expf((x - shift) - log_sum) - everywhere;
      if (i == hit) dz -= g * (1.f - a.smoothing);
      if (z.softcap > 0.f) dz *= 1.f - (x / z.softcap) * (x / z.softcap);
    }
    store_as(a.dtype, a.gradient, r * z.stride + i, dz);
  }
}

// The kernel below sums over all rows, in an order that depends on the sizes only.
constexpr int kSumColumns = 32, kSumRows = 16;

__global__ void __launch_bounds__(kSumColumns* kSumRows)
    head_dbias(const void* gradient, DType dtype, int64_t stride, int64_t rows, int classes,
               void* dbias, DType dbias_dtype, int64_t dbias_stride, int first_class) {
  __shared__ float sums[kSumRows][kSumColumns + 1];
  wait_for_earlier_kernels();
  const int c = blockIdx.x * kSumColumns + threadIdx.x;
  float sum = 0.f;
#pragma unroll 4
  for (int64_t r = threadIdx.y; r < rows; r += kSumRows) {
    if (c < classes) sum += load_as(dtype, after_wait(gradient), r * stride + c);
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= classes) return;
  sum = 0.f;
#pragma unroll
  for (int y = 0; y < kSumRows; ++y) sum += sums[y][threadIdx.x];
  store_as(dbias_dtype, dbias, (first_class + c) * dbias_stride, sum);
}

// Holds the classes of a chunk, and the stride of its rows.
struct Chunk {
  int64_t classes, stride;

  Chunk(int64_t rows, int64_t all_classes) {
    const int64_t fit = kLogitBytes / 4 / std::max<int64_t>(rows, 1) / kClassBlock * kClassBlock;
    classes = std::max<int64_t>(std::min(std::max(fit, kClassBlock), all_classes), 1);
    stride = (classes + 7) / 8 * 8;
  }
};

Tensor matrix(void* data, DType dtype, int64_t rows, int64_t columns, int64_t stride, int device) {
  Tensor t;
  t.data = data;
  t.dtype = dtype;
  t.device = Device::kCuda;
  t.device_id = device;
  t.defined = true;
  t.ndim = 2;
  t.shape[0] = rows;
  t.shape[1] = columns;
  t.strides[0] = stride;
  t.strides[1] = 1;
  return t;
}

// Returns the rows [first, first + count) of a matrix.
Tensor rows_from(const Tensor& t, int64_t first, int64_t count) {
  Tensor part = t;
  part.data = t.ptr<char>() + first * t.stride(0) * size_of(t.dtype);
  part.shape[0] = count;
  return part;
}

// Computes the logits of a chunk, in float, without their softcap.
template <class Args>
Status make_logits(const Args& a, const Tensor& logits, int64_t first, cudaStream_t stream) {
  const Tensor weight = rows_from(a.weight, first, logits.size(1));
  PortableArguments f = {};
  f.a = operand(a.x, true, a.x.dtype);
  f.b = operand(weight, true, a.x.dtype);
  f.out = result(logits);
  f.rows = logits.size(0);
  f.columns = logits.size(1);
  f.depth = a.x.size(1);
  if (a.bias) {
    f.epilogue.bias_stride = a.bias.stride(0);
    f.epilogue.float_bias = a.bias.dtype == DType::kFloat32;
    f.epilogue.bias =
        a.bias.template ptr<char>() + first * a.bias.stride(0) * size_of(a.bias.dtype);
  }
  return multiply(f, a.x.dtype, a.x.device_id, nullptr, stream);
}

Logits view_of(const Tensor& logits, int64_t first, double softcap) {
  return {logits.ptr<float>(),     logits.stride(0),
          logits.size(0),          static_cast<int>(logits.size(1)),
          static_cast<int>(first), static_cast<float>(softcap)};
}

struct HeadForwardParts {
  WorkspaceParts parts;
  Chunk chunk;
  float *logits, *row_losses;
  HeadState* states;

  HeadForwardParts(const LinearCrossEntropyFwd& a, void* memory)
      : parts(memory), chunk(a.x.size(0), a.weight.size(0)) {
    const int64_t rows = a.x.size(0);
    logits = parts.take(rows * chunk.stride);
    row_losses = parts.take(rows);
    states = parts.take<HeadState>(rows);
  }
};

struct HeadBackwardParts {
  WorkspaceParts parts;
  Chunk chunk;
  float* logits;
  void* gradient;
  Tensor dx;  // in float, where dx itself is not

  HeadBackwardParts(const LinearCrossEntropyBwd& a, void* memory)
      : parts(memory), chunk(a.x.size(0), a.weight.size(0)), dx(a.dx) {
    const int64_t rows = a.x.size(0), depth = a.x.size(1);
    const DType dtype = a.x.dtype;
    logits = parts.take(rows * chunk.stride);
    gradient = logits;
    if (dtype == DType::kFloat32) return;
    gradient = parts.take<char>(rows * chunk.stride * size_of(dtype));
    if (!a.dx || chunk.classes >= a.weight.size(0)) return;
    dx = matrix(parts.take(rows * depth), DType::kFloat32, rows, depth, depth, a.dx.device_id);
  }
};

const float* floats_of(const Tensor& t) { return t ? t.ptr<const float>() : nullptr; }
float* results_of(const Tensor& t) { return t ? t.ptr<float>() : nullptr; }
int64_t stride_of(const Tensor& t) { return t ? t.stride(0) : 0; }

Status check_sizes(int64_t rows, int64_t classes) {
  if (rows <= INT32_MAX && classes <= INT32_MAX) return {};
  return unsupported("there are more than 2^31 rows or classes");
}

}  // namespace

size_t workspace(const LinearCrossEntropyFwd& a) {
  return HeadForwardParts(a, nullptr).parts.bytes();
}

size_t workspace(const LinearCrossEntropyBwd& a) {
  return HeadBackwardParts(a, nullptr).parts.bytes();
}

Status run(const LinearCrossEntropyFwd& a, const Exec& exec) {
  const HeadForwardParts parts(a, exec.workspace());
  const cudaStream_t stream = stream_of(exec);
  const int64_t rows = a.x.size(0), classes = a.weight.size(0);
  FK_RETURN_IF_ERROR(check_sizes(rows, classes));
  const unsigned blocks = static_cast<unsigned>(rows);
  for (int64_t first = 0; rows > 0 && first < classes; first += parts.chunk.classes) {
    const Tensor logits =
        matrix(parts.logits, DType::kFloat32, rows, std::min(parts.chunk.classes, classes - first),
               parts.chunk.stride, a.x.device_id);
    FK_RETURN_IF_ERROR(make_logits(a, logits, first, stream));
    FK_RETURN_IF_ERROR(launch_early(head_statistics, "head_statistics", {{blocks}, {kHeadThreads}},
                                    stream, view_of(logits, first, a.softcap), Targets(a.targets),
                                    parts.states));
  }
  if (rows > 0) {
    const LossArguments f{parts.states,
                          Targets(a.targets),
                          rows,
                          classes,
                          a.ignore_index,
                          static_cast<float>(a.label_smoothing),
                          a.loss ? parts.row_losses : nullptr,
                          results_of(a.losses),
                          results_of(a.lse),
                          results_of(a.shift),
                          results_of(a.log_sum),
                          stride_of(a.losses),
                          stride_of(a.lse),
                          stride_of(a.shift),
                          stride_of(a.log_sum)};
    FK_RETURN_IF_ERROR(launch_early(head_losses, "head_losses",
                                    {{(blocks + kHeadThreads - 1) / kHeadThreads}, {kHeadThreads}},
                                    stream, f));
  }
  if (!a.loss && !a.count) return {};
  return launch_early(total_loss, "total_loss", {1, kTotalThreads}, stream,
                      a.loss ? parts.row_losses : nullptr, Targets(a.targets), rows, a.ignore_index,
                      a.reduction == kMean, results_of(a.loss), results_of(a.count));
}

Status run(const LinearCrossEntropyBwd& a, const Exec& exec) {
  const HeadBackwardParts parts(a, exec.workspace());
  const cudaStream_t stream = stream_of(exec);
  const int64_t rows = a.x.size(0), classes = a.weight.size(0), depth = a.x.size(1);
  const int device = a.x.device_id;
  const DType dtype = a.x.dtype;
  FK_RETURN_IF_ERROR(check_sizes(rows, classes));
  int64_t first = 0;
  do {  // once even if there are no classes: dx is 0 then
    const int64_t some = std::min(parts.chunk.classes, classes - first);
    const Tensor logits =
        matrix(parts.logits, DType::kFloat32, rows, some, parts.chunk.stride, device);
    const Tensor gradient = matrix(parts.gradient, dtype, rows, some, parts.chunk.stride, device);
    if (rows > 0 && some > 0) {
      FK_RETURN_IF_ERROR(make_logits(a, logits, first, stream));
      const GradientArguments f{view_of(logits, first, a.softcap),
                                Targets(a.targets),
                                parts.gradient,
                                dtype,
                                a.reduction == kNone ? floats_of(a.dlosses) : nullptr,
                                a.reduction == kNone ? nullptr : floats_of(a.dloss),
                                floats_of(a.dlse),
                                floats_of(a.shift),
                                floats_of(a.log_sum),
                                a.reduction == kMean ? floats_of(a.count) : nullptr,
                                stride_of(a.dlosses),
                                stride_of(a.dlse),
                                stride_of(a.shift),
                                stride_of(a.log_sum),
                                a.ignore_index,
                                classes,
                                static_cast<float>(a.label_smoothing)};
      FK_RETURN_IF_ERROR(launch_early(head_gradient, "head_gradient",
                                      {{static_cast<unsigned>(rows)}, {kHeadThreads}}, stream, f));
    }
    if (a.dbias && some > 0) {
      const unsigned blocks = static_cast<unsigned>((some + kSumColumns - 1) / kSumColumns);
      FK_RETURN_IF_ERROR(launch_early(head_dbias, "head_dbias", {{blocks}, {kSumColumns, kSumRows}},
                                      stream, parts.gradient, dtype, parts.chunk.stride, rows,
                                      static_cast<int>(some), a.dbias.data, a.dbias.dtype,
                                      a.dbias.stride(0), static_cast<int>(first)));
    }
    if (a.dweight) {
      PortableArguments f = {};
      f.a = operand(gradient, false, dtype);
      f.b = operand(a.x, false, dtype);
      f.out = result(rows_from(a.dweight, first, some));
      f.rows = some;
      f.columns = depth;
      f.depth = rows;
      FK_RETURN_IF_ERROR(multiply(f, dtype, device, nullptr, stream));
    }
    if (a.dx) {
      const Tensor weight = rows_from(a.weight, first, some);
      PortableArguments f = {};
      f.a = operand(gradient, true, dtype);
      f.b = operand(weight, false, dtype);
      f.out = result(first + some == classes ? a.dx : parts.dx);
      if (first > 0) f.residual = result(parts.dx);
      f.rows = rows;
      f.columns = depth;
      f.depth = some;
      FK_RETURN_IF_ERROR(multiply(f, dtype, device, nullptr, stream));
    }
    first += some;
  } while (first < classes);
  return {};
}

}  // namespace fk::cuda
