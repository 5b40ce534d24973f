// linear on Hopper, by cuda/gemm/sm90_product.cuh.
#include <algorithm>

#include "ops/linear/sm90/call.h"
#include "ops/linear/sm90/few_rows.h"

namespace fk::cuda_sm90 {

namespace {

using cuda::Major;

// So few rows are a stream of the weight, which is the portable room's where the copy engine cannot
// fetch it.
bool streams(const LinearFwd& a) {
  return few_rows(a.x) && in_vectors_but_for_address(a.weight, a.x.dtype);
}

struct ForwardParts {
  WorkspaceParts parts;
  Matrix x, weight;
  float* partials;

  ForwardParts(const LinearFwd& a, void* memory)
      : parts(memory), x(a.x, a.x.dtype, parts), weight(a.weight, a.x.dtype, parts) {
    partials =
        parts.take(partial_floats(x.rows, weight.rows, weight.columns, false, 1, a.x.device_id));
  }
};

struct BackwardParts {
  WorkspaceParts parts;
  Matrix dy, x, weight;
  float* sums = nullptr;
  void* inner = nullptr;
  float* partials = nullptr;

  BackwardParts(const LinearBwd& a, void* memory)
      : parts(memory),
        dy(a.dy, a.x.dtype, parts),
        x(a.x, a.x.dtype, parts),
        weight(a.weight, a.x.dtype, parts) {
    const int64_t width = cuda::linear::padded(dy.columns);
    if (a.activation != 0) inner = parts.take<char>(dy.rows * width * size_of(a.x.dtype));
    if (a.dbias) sums = parts.take(cuda::linear::bias_pieces(dy.rows, dy.columns) * width);
    const int64_t depth = weight.columns;
    const int device = a.x.device_id;
    partials = parts.take(std::max(partial_floats(dy.rows, depth, dy.columns, false, 1, device),
                                   partial_floats(dy.columns, depth, dy.rows, false, 1, device)));
  }

  // What is multiplied: the inner gradient, or dy itself.
  Matrix gradient() const {
    Matrix g = dy;
    if (inner == nullptr) return g;
    g.data = inner;
    g.stride = cuda::linear::padded(dy.columns);
    return g;
  }
};

}  // namespace

bool accepts(const LinearFwd& a) {
  return a.y && takes(a.x, a.weight) && (takes_few_rows(a.x, a.weight) || !streams(a)) &&
         in_even_rows(a.y) && in_even_rows(a.before) && in_even_rows(a.residual);
}

bool accepts(const LinearBwd& a) {
  return takes(a.x, a.weight) && in_even_rows(a.dx) && in_even_rows(a.dweight);
}

size_t workspace(const LinearFwd& a) {
  return std::max(ForwardParts(a, nullptr).parts.bytes(), cuda::workspace(a));
}

size_t workspace(const LinearBwd& a) {
  // Also what the portable kernel needs, which takes calls with addresses the copy engine cannot.
  return std::max(BackwardParts(a, nullptr).parts.bytes(), cuda::workspace(a));
}

Status run(const LinearFwd& a, const Exec& exec) {
  const ForwardParts parts(a, exec.workspace());
  if ((!parts.x.copied && !aligned(a.x)) || (!parts.weight.copied && !aligned(a.weight))) {
    return cuda::run(a, exec);
  }
  const cudaStream_t stream = cuda::stream_of(exec);
  const DType dtype = a.x.dtype;
  FK_RETURN_IF_ERROR(copy_if_needed(parts.x, a.x, dtype, stream));
  FK_RETURN_IF_ERROR(copy_if_needed(parts.weight, a.weight, dtype, stream));
  Product p;
  p.a = parts.x;
  p.b = parts.weight;
  p.rows = parts.x.rows;
  p.columns = parts.weight.rows;
  p.depth = parts.x.columns;
  p.dtype = dtype;
  p.out = a.y;
  p.before = a.before;
  p.residual = a.residual;
  p.partials = parts.partials;
  p.epilogue.activation = static_cast<Activation>(a.activation);
  if (a.bias) {
    p.epilogue.bias = a.bias.data;
    p.epilogue.float_bias = a.bias.dtype == DType::kFloat32;
    p.epilogue.bias_stride = a.bias.stride(0);
  }
  return multiply(p, a.x.device_id, stream);
}

Status run(const LinearBwd& a, const Exec& exec) {
  const BackwardParts parts(a, exec.workspace());
  const bool reads_dy = parts.inner == nullptr && !parts.dy.copied;
  if ((reads_dy && !aligned(a.dy)) || (!parts.x.copied && !aligned(a.x)) ||
      (!parts.weight.copied && !aligned(a.weight))) {
    return cuda::run(a, exec);
  }
  const cudaStream_t stream = cuda::stream_of(exec);
  const DType dtype = a.x.dtype;
  FK_RETURN_IF_ERROR(cuda::linear::make_inner(a, parts.inner, parts.sums, stream));
  if (parts.inner == nullptr) {
    FK_RETURN_IF_ERROR(copy_if_needed(parts.dy, a.dy, dtype, stream));
  }
  Product p;
  p.a = parts.gradient();
  p.b_major = Major::kOuter;
  p.dtype = dtype;
  p.partials = parts.partials;
  if (a.dx) {
    FK_RETURN_IF_ERROR(copy_if_needed(parts.weight, a.weight, dtype, stream));
    p.b = parts.weight;
    p.rows = p.a.rows;
    p.columns = parts.weight.columns;
    p.depth = p.a.columns;
    p.out = a.dx;
    FK_RETURN_IF_ERROR(multiply(p, a.x.device_id, stream));
  }
  if (a.dweight) {
    FK_RETURN_IF_ERROR(copy_if_needed(parts.x, a.x, dtype, stream));
    p.a_major = Major::kOuter;
    p.b = parts.x;
    p.rows = p.a.columns;
    p.columns = parts.x.columns;
    p.depth = p.a.rows;
    p.out = a.dweight;
    FK_RETURN_IF_ERROR(multiply(p, a.x.device_id, stream));
  }
  return {};
}

}  // namespace fk::cuda_sm90
