// linear on any GPU: the calls' products, by cuda/gemm/portable_product.cuh.
#include <algorithm>

#include "cuda/gemm/row_norm.cuh"
#include "cuda/output_stage.h"
#include "ops/linear/cuda/inner.h"

namespace fk::cuda {

namespace {

struct ForwardParts {
  WorkspaceParts parts;
  float* partials;
  unsigned long long* counter = nullptr;

  ForwardParts(const LinearFwd& a, void* memory)
      : parts(memory),
        partials(linear::take_partials(
            &parts, {partial_floats(rows_of(a.x).count, a.weight.size(0), a.weight.size(1), false,
                                    a.x.dtype, a.x.device_id)})) {
    if (writes_norm(a)) counter = parts.take<unsigned long long>(1);
  }
};

RowNorm norm_of(const LinearFwd& a, unsigned long long* counter) {
  RowNorm norm;
  norm.normed = result(a.normed);
  norm.stats = result(a.norm_stats);
  norm.weight = norm::parameter_of(a.norm_weight, 1.f, 0.f);
  norm.bias = norm::parameter_of(a.norm_bias, 0.f, 0.f);
  norm.eps = static_cast<float>(a.norm_eps);
  norm.layer = a.is_layer();
  norm.last = {counter, new_tag()};
  return norm;
}

// What a backward keeps: the inner gradient, where there is an activation, and sums for dbias.
struct BackwardParts {
  WorkspaceParts parts;
  void* inner = nullptr;
  float* sums = nullptr;
  float* partials = nullptr;  // of products whose K is split

  BackwardParts(const LinearBwd& a, void* memory) : parts(memory) {
    const int64_t rows = rows_of(a.dy).count, columns = a.dy.size(-1);
    const int64_t width = linear::padded(columns);
    if (a.activation != 0) inner = parts.take<char>(rows * width * size_of(a.dy.dtype));
    if (a.dbias) sums = parts.take(linear::bias_pieces(rows, columns) * width);
    const int64_t depth = a.weight.size(1);
    const DType dtype = a.x.dtype;
    const int device = a.x.device_id;
    partials =
        linear::take_partials(&parts, {partial_floats(rows, depth, columns, false, dtype, device),
                                       partial_floats(columns, depth, rows, false, dtype, device)});
  }
};

}  // namespace

bool writes_norm(const LinearFwd& a) { return a.y && a.normed; }

size_t workspace(const LinearFwd& a) { return ForwardParts(a, nullptr).parts.bytes(); }

Status run(const LinearFwd& a, const Exec& exec) {
  if (!a.y && !a.before) return {};
  const ForwardParts parts(a, exec.workspace());
  const DType dtype = a.x.dtype;
  PortableArguments f = {};
  f.a = operand(a.x, true, dtype);
  f.b = operand(a.weight, true, dtype);
  f.out = result(a.y);
  f.before = result(a.before);
  f.residual = result(a.residual);
  f.rows = rows_of(a.x).count;
  f.columns = a.weight.size(0);
  f.depth = a.weight.size(1);
  f.epilogue.activation = static_cast<Activation>(a.activation);
  if (a.bias) {
    f.epilogue.bias = a.bias.data;
    f.epilogue.float_bias = a.bias.dtype == DType::kFloat32;
    f.epilogue.bias_stride = a.bias.stride(0);
  }
  if (!writes_norm(a)) {
    return multiply(f, dtype, a.x.device_id, parts.partials, stream_of(exec));
  }
  const RowNorm norm = norm_of(a, parts.counter);
  bool normed;
  FK_RETURN_IF_ERROR(
      multiply(f, &norm, dtype, a.x.device_id, parts.partials, stream_of(exec), &normed));
  return normed ? Status() : Stage::forward(a, a.y, a.y, false, exec);
}

size_t workspace(const LinearBwd& a) { return BackwardParts(a, nullptr).parts.bytes(); }

Status run(const LinearBwd& a, const Exec& exec) {
  const cudaStream_t stream = stream_of(exec);
  const BackwardParts parts(a, exec.workspace());
  const int64_t rows = rows_of(a.dy).count, columns = a.weight.size(0), depth = a.weight.size(1);
  const Tensor inner = a.activation == 0 ? a.dy
                                         : linear::matrix_like(a.dy, parts.inner, rows, columns,
                                                               linear::padded(columns));
  FK_RETURN_IF_ERROR(linear::make_inner(a, parts.inner, parts.sums, stream));
  const DType dtype = a.x.dtype;
  if (a.dx) {
    PortableArguments f = {};
    f.a = operand(inner, true, dtype);
    f.b = operand(a.weight, false, dtype);
    f.out = result(a.dx);
    f.rows = rows;
    f.columns = depth;
    f.depth = columns;
    FK_RETURN_IF_ERROR(multiply(f, dtype, a.x.device_id, parts.partials, stream));
  }
  if (a.dweight) {
    PortableArguments f = {};
    f.a = operand(inner, false, dtype);
    f.b = operand(a.x, false, dtype);
    f.out = result(a.dweight);
    f.rows = columns;
    f.columns = depth;
    f.depth = rows;
    FK_RETURN_IF_ERROR(multiply(f, dtype, a.x.device_id, parts.partials, stream));
  }
  return {};
}

}  // namespace fk::cuda
