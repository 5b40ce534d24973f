// gated_linear on any GPU: a tile holds columns of both products side by side, so that x is read
// once and the gate is a matter of the epilogue (cuda/gemm/portable_product.cuh).
#include "cuda/gemm/portable_call.cuh"
#include "ops/linear/cuda/inner.h"

namespace fk::cuda {

namespace {

// The forward's product, with which of its results are wanted.
Status multiply_pairs(const Tensor& x, const GatedWeights& weights, int64_t activation,
                      const Tensor& y, const Tensor& gate, const Tensor& up, float* partials,
                      cudaStream_t stream) {
  PortableArguments f;
  f.a = operand(x, true, x.dtype);
  f.b = stacked(weights.gate, weights.up, true, x.dtype);
  f.out = result(y);
  f.before = result(gate);
  f.before_up = result(up);
  f.rows = rows_of(x).count;
  f.columns = weights.gate.size(0);
  f.depth = weights.gate.size(1);
  f.gated = true;
  f.epilogue.activation = static_cast<Activation>(activation);
  return multiply(f, x.dtype, x.device_id, partials, stream);
}

struct GatedForwardParts {
  WorkspaceParts parts;
  float* partials;

  GatedForwardParts(const GatedLinearFwd& a, void* memory) : parts(memory) {
    const int64_t columns = GatedWeights(a.w_gate, a.w_up, !a.w_up).gate.size(0);
    partials =
        linear::take_partials(&parts, {partial_floats(rows_of(a.x).count, columns, a.x.size(-1),
                                                      true, a.x.dtype, a.x.device_id)});
  }
};

struct GatedBackwardParts {
  WorkspaceParts parts;
  linear::GatedInner inner;
  Tensor gate, up;  // computed again, where the forward kept none
  float* partials;

  GatedBackwardParts(const GatedLinearBwd& a, void* memory)
      : parts(memory), gate(a.gate), up(a.up) {
    const int64_t rows = rows_of(a.x).count, columns = a.dy.size(-1), depth = a.x.size(-1);
    const DType dtype = a.x.dtype;
    const int device = a.x.device_id;
    inner.up_column = columns;
    inner.width = linear::padded(2 * columns);
    inner.data = parts.take<char>(rows * inner.width * size_of(dtype));
    if (!a.gate) {
      const int64_t width = linear::padded(columns);
      const auto matrix = [&] {
        char* const data = parts.take<char>(rows * width * size_of(dtype));
        return linear::matrix_like(a.dy, data, rows, columns, width);
      };
      gate = matrix();
      up = matrix();
    }
    partials = linear::take_partials(
        &parts, {partial_floats(rows, columns, depth, true, dtype, device),
                 partial_floats(rows, depth, 2 * columns, false, dtype, device),
                 partial_floats(columns, depth, rows, false, dtype, device),
                 partial_floats(2 * columns, depth, rows, false, dtype, device)});
  }
};

}  // namespace

size_t workspace(const GatedLinearFwd& a) { return GatedForwardParts(a, nullptr).parts.bytes(); }

size_t workspace(const GatedLinearBwd& a) { return GatedBackwardParts(a, nullptr).parts.bytes(); }

Status run(const GatedLinearFwd& a, const Exec& exec) {
  if (!a.y && !a.gate && !a.up) return {};
  const GatedForwardParts parts(a, exec.workspace());
  const GatedWeights weights(a.w_gate, a.w_up, !a.w_up);
  return multiply_pairs(a.x, weights, a.activation, a.y, a.gate, a.up, parts.partials,
                        stream_of(exec));
}

Status run(const GatedLinearBwd& a, const Exec& exec) {
  const cudaStream_t stream = stream_of(exec);
  const GatedBackwardParts parts(a, exec.workspace());
  const GatedWeights weights(a.w_gate, a.w_up, !a.w_up);
  const int64_t rows = rows_of(a.x).count, columns = a.dy.size(-1), depth = a.x.size(-1);
  const DType dtype = a.x.dtype;
  const int device = a.x.device_id;
  if (!a.gate) {
    FK_RETURN_IF_ERROR(multiply_pairs(a.x, weights, a.activation, Tensor(), parts.gate, parts.up,
                                      parts.partials, stream));
  }
  FK_RETURN_IF_ERROR(linear::make_gated_inner(a, parts.gate, parts.up, parts.inner, stream));
  const auto inner = [&](int64_t from, int64_t count) {
    char* const data = static_cast<char*>(parts.inner.data) + from * size_of(dtype);
    return linear::matrix_like(a.dy, data, rows, count, parts.inner.width);
  };
  if (a.dx) {
    PortableArguments f;
    f.a = operand(inner(0, 2 * columns), true, dtype);
    f.b = stacked(weights.gate, weights.up, false, dtype);
    f.out = result(a.dx);
    f.rows = rows;
    f.columns = depth;
    f.depth = 2 * columns;
    FK_RETURN_IF_ERROR(multiply(f, dtype, device, parts.partials, stream));
  }
  const auto to_weight = [&](const Tensor& dw, int64_t from, int64_t count) {
    if (!dw) return Status();
    PortableArguments f;
    f.a = operand(inner(from, count), false, dtype);
    f.b = operand(a.x, false, dtype);
    f.out = result(dw);
    f.rows = count;
    f.columns = depth;
    f.depth = rows;
    return multiply(f, dtype, device, parts.partials, stream);
  };
  // Without w_up, both gradients are one matrix, as the weights are.
  FK_RETURN_IF_ERROR(to_weight(a.dw_gate, 0, a.w_up ? columns : 2 * columns));
  return to_weight(a.dw_up, columns, columns);
}

}  // namespace fk::cuda
