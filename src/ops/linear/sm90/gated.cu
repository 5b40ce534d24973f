// gated_linear on Hopper: of a tile's 128 columns 64 are the gate's and 64 those of the other
// weight, and a thread has both of a pair (cuda/gemm/sm90_product.cuh).
#include <algorithm>

#include "ops/linear/sm90/call.h"
#include "ops/linear/sm90/few_rows.h"

namespace fk::cuda_sm90 {

namespace {

using cuda::Major;

// So few rows are a stream of the weights, which is the portable room's where the copy engine
// cannot fetch them.
bool streams_pairs(const GatedLinearFwd& a, const GatedWeights& weights) {
  return few_rows(a.x) && !(takes_few_rows(a.x, weights.gate) && takes_few_rows(a.x, weights.up)) &&
         in_vectors_but_for_address(weights.gate, a.x.dtype) &&
         in_vectors_but_for_address(weights.up, a.x.dtype);
}

struct GatedForwardParts {
  WorkspaceParts parts;
  GatedWeights weights;
  Matrix x, gate, up;
  float* partials;

  GatedForwardParts(const GatedLinearFwd& a, void* memory)
      : parts(memory),
        weights(a.w_gate, a.w_up, !a.w_up),
        x(a.x, a.x.dtype, parts),
        gate(weights.gate, a.x.dtype, parts),
        up(weights.up, a.x.dtype, parts) {
    partials = parts.take(partial_floats(x.rows, gate.rows, x.columns, true, 1, a.x.device_id));
  }
};

struct GatedBackwardParts {
  WorkspaceParts parts;
  GatedWeights weights;
  Matrix x, w_gate, w_up;
  cuda::linear::GatedInner inner;
  Tensor gate, up;  // computed again, where the forward kept none
  float* partials;

  GatedBackwardParts(const GatedLinearBwd& a, void* memory)
      : parts(memory),
        weights(a.w_gate, a.w_up, !a.w_up),
        x(a.x, a.x.dtype, parts),
        w_gate(weights.gate, a.x.dtype, parts),
        w_up(weights.up, a.x.dtype, parts),
        gate(a.gate),
        up(a.up) {
    const int64_t rows = x.rows, columns = w_gate.rows, depth = x.columns;
    const int device = a.x.device_id;
    inner.up_column = cuda::linear::padded(columns);
    inner.width = 2 * inner.up_column;
    inner.data = parts.take<char>(rows * inner.width * size_of(a.x.dtype));
    if (!a.gate) {
      const auto matrix = [&] {
        char* const data = parts.take<char>(rows * inner.up_column * size_of(a.x.dtype));
        return cuda::linear::matrix_like(a.dy, data, rows, columns, inner.up_column);
      };
      gate = matrix();
      up = matrix();
    }
    partials = parts.take(std::max({partial_floats(rows, columns, depth, true, 1, device),
                                    partial_floats(rows, depth, columns, false, 2, device),
                                    partial_floats(columns, depth, rows, false, 1, device)}));
  }

  // The gradient of gate, or from up_column on that of up, as an operand.
  Matrix gradient(int64_t from, DType dtype) const {
    Matrix m;
    m.data = static_cast<char*>(inner.data) + from * size_of(dtype);
    m.rows = x.rows;
    m.columns = w_gate.rows;
    m.stride = inner.width;
    return m;
  }
};

bool pairs_fit(const Tensor& x, const GatedWeights& weights, int64_t columns) {
  return takes(x, weights.gate) && columns * size_of(x.dtype) % 16 == 0;
}

Product pairs(const Matrix& x, const Matrix& gate, const Matrix& up, DType dtype,
              int64_t activation, float* partials) {
  Product p;
  p.a = x;
  p.b = gate;
  p.second_b = up;
  p.gated = true;
  p.rows = x.rows;
  p.columns = gate.rows;
  p.depth = x.columns;
  p.dtype = dtype;
  p.epilogue.activation = static_cast<Activation>(activation);
  p.partials = partials;
  return p;
}

template <class Parts>
bool operands_aligned(const Parts& parts, const Matrix& gate, const Matrix& up, const Tensor& x) {
  return (parts.x.copied || aligned(x)) && (gate.copied || aligned(parts.weights.gate)) &&
         (up.copied || aligned(parts.weights.up));
}

}  // namespace

bool accepts(const GatedLinearFwd& a) {
  const GatedWeights weights(a.w_gate, a.w_up, !a.w_up);
  return a.y && pairs_fit(a.x, weights, a.y.size(-1)) && !streams_pairs(a, weights);
}

bool accepts(const GatedLinearBwd& a) {
  const GatedWeights weights(a.w_gate, a.w_up, !a.w_up);
  return pairs_fit(a.x, weights, a.dy.size(-1)) && in_even_rows(a.dx) && in_even_rows(a.dw_gate) &&
         in_even_rows(a.dw_up);
}

// Also what the portable kernels need, which take calls with addresses the copy engine cannot.
size_t workspace(const GatedLinearFwd& a) {
  return std::max(GatedForwardParts(a, nullptr).parts.bytes(), cuda::workspace(a));
}

size_t workspace(const GatedLinearBwd& a) {
  return std::max(GatedBackwardParts(a, nullptr).parts.bytes(), cuda::workspace(a));
}

Status run(const GatedLinearFwd& a, const Exec& exec) {
  const GatedForwardParts parts(a, exec.workspace());
  const DType dtype = a.x.dtype;
  if (!operands_aligned(parts, parts.gate, parts.up, a.x) || !engine_takes(a.y, dtype) ||
      !engine_takes(a.gate, dtype) || !engine_takes(a.up, dtype) ||
      a.gate.defined != a.up.defined) {
    return cuda::run(a, exec);
  }
  const cudaStream_t stream = cuda::stream_of(exec);
  FK_RETURN_IF_ERROR(copy_if_needed(parts.x, a.x, dtype, stream));
  FK_RETURN_IF_ERROR(copy_if_needed(parts.gate, parts.weights.gate, dtype, stream));
  FK_RETURN_IF_ERROR(copy_if_needed(parts.up, parts.weights.up, dtype, stream));
  Product p = pairs(parts.x, parts.gate, parts.up, dtype, a.activation, parts.partials);
  p.out = a.y;
  p.before = a.gate;
  p.before_up = a.up;
  return multiply(p, a.x.device_id, stream);
}

Status run(const GatedLinearBwd& a, const Exec& exec) {
  const GatedBackwardParts parts(a, exec.workspace());
  if (!operands_aligned(parts, parts.w_gate, parts.w_up, a.x)) return cuda::run(a, exec);
  const cudaStream_t stream = cuda::stream_of(exec);
  const DType dtype = a.x.dtype;
  const int device = a.x.device_id;
  FK_RETURN_IF_ERROR(copy_if_needed(parts.x, a.x, dtype, stream));
  FK_RETURN_IF_ERROR(copy_if_needed(parts.w_gate, parts.weights.gate, dtype, stream));
  FK_RETURN_IF_ERROR(copy_if_needed(parts.w_up, parts.weights.up, dtype, stream));
  if (!a.gate) {
    Product p = pairs(parts.x, parts.w_gate, parts.w_up, dtype, a.activation, parts.partials);
    // y is of no use, and what comes next takes its place.
    p.out = cuda::linear::matrix_like(a.dy, parts.inner.data, p.rows, p.columns, parts.inner.width);
    p.before = parts.gate;
    p.before_up = parts.up;
    FK_RETURN_IF_ERROR(multiply(p, device, stream));
  }
  FK_RETURN_IF_ERROR(cuda::linear::make_gated_inner(a, parts.gate, parts.up, parts.inner, stream));
  Product p;
  p.b_major = Major::kOuter;
  p.dtype = dtype;
  p.partials = parts.partials;
  p.columns = parts.x.columns;
  if (a.dx) {
    p.a = parts.gradient(0, dtype);
    p.second_a = parts.gradient(parts.inner.up_column, dtype);
    p.b = parts.w_gate;
    p.second_b = parts.w_up;
    p.rows = parts.x.rows;
    p.depth = parts.w_gate.rows;
    p.out = a.dx;
    FK_RETURN_IF_ERROR(multiply(p, device, stream));
  }
  const GatedWeights results(a.dw_gate, a.dw_up, !a.w_up);
  p.second_a = p.second_b = Matrix();
  p.a_major = Major::kOuter;
  p.b = parts.x;
  p.rows = parts.w_gate.rows;
  p.depth = parts.x.rows;
  if (a.dw_gate) {
    p.a = parts.gradient(0, dtype);
    p.out = results.gate;
    FK_RETURN_IF_ERROR(multiply(p, device, stream));
  }
  if (results.up) {
    p.a = parts.gradient(parts.inner.up_column, dtype);
    p.out = results.up;
    FK_RETURN_IF_ERROR(multiply(p, device, stream));
  }
  return {};
}

}  // namespace fk::cuda_sm90
