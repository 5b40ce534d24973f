// linear on any GPU: the calls' products, by cuda/gemm/portable_product.cuh.
#include "cuda/gemm/portable_call.cuh"
#include "ops/linear/cuda_inner.h"

namespace fk::cuda {

namespace {

// What a backward keeps: the inner gradient, where there is an activation, and sums for dbias.
struct BackwardParts {
  WorkspaceParts parts;
  void* inner = nullptr;
  float* sums = nullptr;

  BackwardParts(const LinearBwd& a, void* memory) : parts(memory) {
    const int64_t rows = rows_of(a.dy).count, columns = a.dy.size(-1);
    const int64_t width = linear::padded(columns);
    if (a.activation != 0) inner = parts.take<char>(rows * width * size_of(a.dy.dtype));
    if (a.dbias) sums = parts.take(linear::bias_pieces(rows, columns) * width);
  }
};

}  // namespace

Status run(const LinearFwd& a, const Exec& exec) {
  if (!a.y && !a.before) return {};
  PortableArguments f = {};
  f.a = operand(a.x, true);
  f.b = operand(a.weight, true);
  f.out = result(a.y);
  f.before = result(a.before);
  f.residual = result(a.residual);
  f.rows = f.a.rows.count;
  f.columns = a.weight.size(0);
  f.depth = a.weight.size(1);
  f.epilogue.activation = static_cast<Activation>(a.activation);
  if (a.bias) {
    f.epilogue.bias = a.bias.data;
    f.epilogue.float_bias = a.bias.dtype == DType::kFloat32;
    f.epilogue.bias_stride = a.bias.stride(0);
  }
  const bool vectors = in_vectors(a.x, a.x.dtype) && in_vectors(a.weight, a.x.dtype);
  return multiply(f, a.x.dtype, vectors, a.x.device_id, stream_of(exec));
}

size_t workspace(const LinearBwd& a) { return BackwardParts(a, nullptr).parts.bytes(); }

Status run(const LinearBwd& a, const Exec& exec) {
  const cudaStream_t stream = stream_of(exec);
  const BackwardParts parts(a, exec.workspace());
  const int64_t rows = rows_of(a.dy).count, columns = a.weight.size(0), depth = a.weight.size(1);
  Tensor inner = a.dy;
  if (a.activation != 0) {
    inner.data = parts.inner;
    inner.ndim = 2;
    inner.shape[0] = rows;
    inner.shape[1] = columns;
    inner.strides[0] = linear::padded(columns);
    inner.strides[1] = 1;
  }
  FK_RETURN_IF_ERROR(linear::make_inner(a, parts.inner, parts.sums, stream));
  const DType dtype = a.x.dtype;
  if (a.dx) {
    PortableArguments f = {};
    f.a = operand(inner, true);
    f.b = operand(a.weight, false);
    f.out = result(a.dx);
    f.rows = rows;
    f.columns = depth;
    f.depth = columns;
    const bool vectors = in_vectors(inner, dtype) && in_vectors(a.weight, dtype);
    FK_RETURN_IF_ERROR(multiply(f, dtype, vectors, a.x.device_id, stream));
  }
  if (a.dweight) {
    PortableArguments f = {};
    f.a = operand(inner, false);
    f.b = operand(a.x, false);
    f.out = result(a.dweight);
    f.rows = columns;
    f.columns = depth;
    f.depth = rows;
    const bool vectors = in_vectors(inner, dtype) && in_vectors(a.x, dtype);
    FK_RETURN_IF_ERROR(multiply(f, dtype, vectors, a.x.device_id, stream));
  }
  return {};
}

}  // namespace fk::cuda
