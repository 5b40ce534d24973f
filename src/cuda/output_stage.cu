// The output stage by launches behind an op's kernels: those of cuda/norm, and a sum of two
// matrices where there is no norm.
#include <algorithm>

#include "core/rows.h"
#include "cuda/convert.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/norm/norm.h"
#include "cuda/output_stage.h"

namespace fk::cuda {

namespace {

struct SumRows {
  void* data = nullptr;
  Rows rows;
  int64_t column = 0;
};

SumRows sum_rows(const Tensor& t) {
  if (!t) return {};
  return {t.data, rows_of(t), t.stride(-1)};
}

struct SumArguments {
  SumRows from, more, to;  // more: may be without data
  int64_t columns, count;  // count: of units of kWidth columns
};

constexpr int kSumThreads = 256;

// to = from + more. kWidth 1: any strides.
template <class T, int kWidth>
__global__ void __launch_bounds__(kSumThreads) stage_sum(const __grid_constant__ SumArguments a) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t along = a.columns / kWidth;
  for (int64_t i = blockIdx.x * int64_t{kSumThreads} + threadIdx.x; i < a.count;
       i += gridDim.x * int64_t{kSumThreads}) {
    const int64_t m = i / along, c = (i - m * along) * kWidth;
    const auto at = [&](const SumRows& p) {
      return static_cast<T*>(p.data) + p.rows.offset(m) + c * p.column;
    };
    float x[kWidth];
    unpack(load<kWidth>(at(a.from)), x);
    if (a.more.data != nullptr) {
      float y[kWidth];
      unpack(load<kWidth>(at(a.more)), y);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) x[j] += y[j];
    }
    store(at(a.to), pack<T>(x));
  }
}

// Tells whether every row can be read in pieces of 16 bytes.
bool stage_in_vectors(const Tensor& t) {
  if (!t) return true;
  const int64_t width = 16 / size_of(t.dtype);
  bool fits = t.stride(-1) == 1 && t.size(-1) % width == 0;
  for (int i = 0; i + 1 < t.ndim; ++i) fits &= t.shape[i] == 1 || t.strides[i] % width == 0;
  return fits && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

template <class T>
Status launch_sum(SumArguments a, bool vectors, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 1 << 16;
  a.count = a.from.rows.count * (a.columns / (vectors ? kVecWidth<T> : 1));
  if (a.count == 0) return {};
  const int64_t blocks = std::min(ceil_div(a.count, int64_t{kSumThreads}), kMostBlocks);
  return launch_early(vectors ? stage_sum<T, kVecWidth<T>> : stage_sum<T, 1>, "stage_sum",
                      {{static_cast<unsigned>(blocks)}, {kSumThreads}}, stream, a);
}

Status add(const Tensor& from, const Tensor& more, const Tensor& to, cudaStream_t stream) {
  const SumArguments a = {sum_rows(from), sum_rows(more), sum_rows(to), from.size(-1), 0};
  const bool vectors = stage_in_vectors(from) && stage_in_vectors(more) && stage_in_vectors(to);
  if (from.dtype == DType::kFloat32) return launch_sum<float>(a, vectors, stream);
  if (from.dtype == DType::kFloat16) return launch_sum<__half>(a, vectors, stream);
  return launch_sum<__nv_bfloat16>(a, vectors, stream);
}

// Returns one of the two numbers that the norm keeps for each row.
Tensor statistic(const Tensor& stats, int which) {
  if (!stats) return {};
  Tensor t = stats;
  t.ndim -= 1;
  if (t.data != nullptr) t.data = stats.ptr<float>() + which * stats.stride(-1);
  return t;
}

norm::BackwardCall backward_call(const OutputStageGradient& a, const Tensor& dy,
                                 const Tensor& total) {
  norm::BackwardCall call;
  if (a.dnormed) {
    call.dy = a.dnormed;
    call.dsum = dy;
    call.x = a.sum;
    if (a.is_layer()) call.mean = statistic(a.norm_stats, 0);
    call.rstd = statistic(a.norm_stats, 1);
    call.dx = total;
  }
  call.weight = a.norm_weight;
  call.dweight = a.dnorm_weight;
  call.dbias = a.dnorm_bias;
  return call;
}

}  // namespace

Status Stage::forward(const OutputStage& a, const Tensor& made, const Tensor& y, bool adds,
                      const Exec& exec) {
  const cudaStream_t stream = stream_of(exec);
  if (!a.wants_norm()) return add(made, a.residual, y, stream);
  norm::ForwardCall call;
  call.x = made;
  if (adds) {
    call.residual = a.residual;
    call.sum = y;
  }
  call.weight = a.norm_weight;
  call.bias = a.norm_bias;
  call.y = a.normed;
  call.mean = statistic(a.norm_stats, 0);
  call.rstd = statistic(a.norm_stats, 1);
  call.eps = a.norm_eps;
  return norm::run_forward(call, a.is_layer(), stream);
}

size_t Stage::backward_bytes(const OutputStageGradient& a, const Tensor& dy) {
  if (!a.goes_through_norm()) return 0;
  return norm::backward_bytes(backward_call(a, dy, dy), a.is_layer());
}

Status Stage::backward(const OutputStageGradient& a, const Tensor& dy, const Tensor& total,
                       const Tensor& copy, void* memory, const Exec& exec) {
  const cudaStream_t stream = stream_of(exec);
  if (copy) FK_RETURN_IF_ERROR(add(dy, {}, copy, stream));
  if (!a.goes_through_norm() && !a.dnorm_weight && !a.dnorm_bias) return {};
  return norm::run_backward(backward_call(a, dy, total), a.is_layer(), static_cast<float*>(memory),
                            stream);
}

}  // namespace fk::cuda
