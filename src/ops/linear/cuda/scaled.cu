// scaled_linear on any GPU: both operands times their scales as matrices of the output's dtype, in
// the workspace, then the product of cuda/gemm/portable_product.cuh.
//
// Floor of the pass ahead: each number is read once and written once, in 2 bytes for one of 8 bits.
// Rounding to bfloat16 what a scale has been multiplied by costs about as much as rounding the
// output does.
#include <algorithm>

#include "core/workspace.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/float8.cuh"
#include "cuda/gemm/portable_call.cuh"
#include "ops/linear/cuda/inner.h"
#include "ops/linear/scaled_linear.h"

namespace fk::cuda {

namespace {

struct ScaleArguments {
  const void* from;
  Rows rows;
  int64_t column;  // stride
  Scales scales;
  void* to;  // rows of `width`, whose last columns are zeros
  int64_t columns, width;
  bool vectors;  // eight numbers of a row can be read at once
};

constexpr int kScaledWide = 32, kScaledHigh = 8, kScaledEach = 8;

template <class T, class R>
__global__ void __launch_bounds__(kScaledWide* kScaledHigh)
    scale_rows(const __grid_constant__ ScaleArguments a) {
  wait_for_earlier_kernels();
  const int64_t k = (blockIdx.x * int64_t{kScaledWide} + threadIdx.x) * kScaledEach;
  if (k >= a.width) return;
  for (int64_t r = blockIdx.y * int64_t{kScaledHigh} + threadIdx.y; r < a.rows.count;
       r += gridDim.y * int64_t{kScaledHigh}) {
    const T* const from = static_cast<const T*>(a.from) + a.rows.offset(r) + k * a.column;
    float x[kScaledEach] = {};
    constexpr int kAtOnce = kVecWidth<T> < kScaledEach ? kVecWidth<T> : kScaledEach;
    if (a.vectors && k + kScaledEach <= a.columns) {
#pragma unroll
      for (int i = 0; i < kScaledEach; i += kAtOnce) {
        const Vec<T, kAtOnce> v = load<kAtOnce>(from + i);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) x[i + j] = to_float(v.data[j]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kScaledEach; ++i) {
        if (k + i < a.columns) x[i] = to_float(from[i * a.column]);
      }
    }
    const float scale = a.scales.at(r, k);
#pragma unroll
    for (float& value : x) value *= scale;
    R* const to = static_cast<R*>(a.to) + r * a.width + k;
    constexpr int kStored = kVecWidth<R>;
#pragma unroll
    for (int i = 0; i < kScaledEach; i += kStored) {
      float some[kStored];
#pragma unroll
      for (int j = 0; j < kStored; ++j) some[j] = x[i + j];
      store(to + i, pack<R>(some));
    }
  }
}

template <class T, class R>
Status launch_scale(const ScaleArguments& f, cudaStream_t stream) {
  const auto wide = static_cast<unsigned>(ceil_div(f.width, int64_t{kScaledWide} * kScaledEach));
  const auto high = static_cast<unsigned>(
      std::min<int64_t>(ceil_div(f.rows.count, int64_t{kScaledHigh}), 1 << 15));
  return launch_early(scale_rows<T, R>, "scale_rows", {{wide, high}, {kScaledWide, kScaledHigh}},
                      stream, f);
}

// A matrix of the output's dtype in the workspace. K is filled up to whole vectors by zeros.
struct ScaledMatrix {
  Tensor as;

  ScaledMatrix(const Tensor& t, DType dtype, WorkspaceParts& parts) {
    const int64_t rows = rows_of(t).count, width = linear::padded(t.size(-1));
    void* const data = parts.take<char>(rows * width * size_of(dtype));
    as = linear::matrix_like(t, data, rows, width, width);
    as.dtype = dtype;
  }
  Status fill(const Tensor& from, const Scales& scales, cudaStream_t stream) const {
    ScaleArguments f = {};
    f.from = from.data;
    f.rows = rows_of(from);
    f.column = from.stride(-1);
    f.scales = scales;
    f.to = as.data;
    f.columns = from.size(-1);
    f.width = as.size(1);
    if (f.rows.count == 0 || f.width == 0) return {};
    f.vectors = operand(from, true, from.dtype).in_vectors && f.column == 1;
    switch (from.dtype) {
      case DType::kFloat32:
        return launch_scale<float, float>(f, stream);
      case DType::kFloat16:
        return launch_scale<__half, __half>(f, stream);
      case DType::kBFloat16:
        return launch_scale<__nv_bfloat16, __nv_bfloat16>(f, stream);
      default:
        return launch_scale<__nv_fp8_e4m3, __nv_bfloat16>(f, stream);
    }
  }
};

struct ScaledParts {
  WorkspaceParts parts;
  ScaledMatrix x, weight;
  float* partials;

  ScaledParts(const ScaledLinearFwd& a, void* memory)
      : parts(memory), x(a.x, result_of(a), parts), weight(a.weight, result_of(a), parts) {
    partials = linear::take_partials(
        &parts, {partial_floats(x.as.size(0), weight.as.size(0), weight.as.size(1), false,
                                result_of(a), a.x.device_id)});
  }
};

}  // namespace

size_t workspace(const ScaledLinearFwd& a) { return ScaledParts(a, nullptr).parts.bytes(); }

Status run(const ScaledLinearFwd& a, const Exec& exec) {
  if (!a.y) return {};
  const cudaStream_t stream = stream_of(exec);
  const ScaledParts parts(a, exec.workspace());
  FK_RETURN_IF_ERROR(parts.x.fill(a.x, x_scales(a), stream));
  FK_RETURN_IF_ERROR(parts.weight.fill(a.weight, weight_scales(a), stream));
  const DType dtype = result_of(a);
  PortableArguments f = {};
  f.a = operand(parts.x.as, true, dtype);
  f.b = operand(parts.weight.as, true, dtype);
  f.out = result(a.y);
  f.residual = result(a.residual);
  f.rows = parts.x.as.size(0);
  f.columns = parts.weight.as.size(0);
  f.depth = parts.weight.as.size(1);
  f.epilogue.activation = static_cast<Activation>(a.activation);
  if (a.bias) {
    f.epilogue.bias = a.bias.data;
    f.epilogue.float_bias = a.bias.dtype == DType::kFloat32;
    f.epilogue.bias_stride = a.bias.stride(0);
  }
  return multiply(f, dtype, a.x.device_id, parts.partials, stream);
}

}  // namespace fk::cuda
