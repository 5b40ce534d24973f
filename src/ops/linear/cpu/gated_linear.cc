// gated_linear on the CPU: twin products of the same x, and what becomes of each pair of sums.
//
// Floor: 4 M N K operations for the forward, at two vectors a clock, and 8 M N K for the backward,
// 12 with `recompute`; for few rows reading both weights. A block of rows of x is multiplied with
// the same columns of both weights, so that gate and up meet while they are in the second-level
// cache. The backward first writes the gradients of gate and up, side by side: from what the
// forward kept, or as the blocks of the products that compute both again. dx is then one sum of two
// products; dw_gate and dw_up are one each.

#ifndef FK_OPS_LINEAR_CPU_GATED_JOBS_
#define FK_OPS_LINEAR_CPU_GATED_JOBS_

#include "ops/linear/gated_linear.h"

#include "core/rows.h"
#include "cpu/gemm/multiply.h"

namespace fk::cpu {

struct GatedForward {
  const GatedLinearFwd& a;
  Rows y, gate, up;
};

struct GatedInner {
  const GatedLinearBwd& a;
  Rows dy, gate, up;
  MatrixView to_gate, to_up;  // the gradients of gate and up, of the same dtype
};

}  // namespace fk::cpu

#endif  // FK_OPS_LINEAR_CPU_GATED_JOBS_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/linear/cpu/gated_linear.cc"
#include "cpu/foreach_target.h"
#include "cpu/gemm/elements.h"
#include "cpu/simd_activations.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

template <class T, Activation kActivation>
HWY_NOINLINE void finish_gated(const GatedForward& job, const SumsBlock& block) {
  const F32 d;
  const GatedLinearFwd& a = job.a;
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t m = block.first_row + r;
    const int64_t y = a.y ? job.y.offset(m) : 0, gates = a.gate ? job.gate.offset(m) : 0;
    const int64_t ups = a.up ? job.up.offset(m) : 0;
    for_vectors(block.columns, [&](int64_t c, int64_t n) HWY_ATTR {
      const int64_t column = block.first_column + c;
      const auto gate = hn::LoadU(d, block.sums + r * block.stride + c);
      const auto up = hn::LoadU(d, block.twin + r * block.stride + c);
      if (a.gate) store_some<T>(a.gate, gates, column, n, gate);
      if (a.up) store_some<T>(a.up, ups, column, n, up);
      if (a.y) store_some<T>(a.y, y, column, n, hn::Mul(Activate<kActivation>(d, gate), up));
    });
  }
}

// The gradients of `n` numbers of gate and up, and where they go.
template <class T, Activation kActivation>
HWY_INLINE void store_inner(const GatedInner& job, int64_t m, int64_t column, int64_t n,
                            hn::Vec<F32> dy, hn::Vec<F32> gate, hn::Vec<F32> up) {
  const F32 d;
  const auto to_gate = hn::Mul(hn::Mul(dy, up), ActivationSlope<kActivation>(d, gate));
  const auto to_up = hn::Mul(dy, Activate<kActivation>(d, gate));
  const MatrixView gates = job.to_gate.from(m, column), ups = job.to_up.from(m, column);
  if (gates.dtype == DType::kFloat32) {
    store_vector(static_cast<float*>(gates.data), n, to_gate);
    store_vector(static_cast<float*>(ups.data), n, to_up);
  } else {
    store_vector(static_cast<T*>(gates.data), n, to_gate);
    store_vector(static_cast<T*>(ups.data), n, to_up);
  }
}

}  // namespace

void gated_finish(const void* opaque, const SumsBlock& block) {
  const auto& job = *static_cast<const GatedForward*>(opaque);
  by_type(job.a.x.dtype, [&](auto t) HWY_ATTR {
    with_activation(static_cast<Activation>(job.a.activation), [&](auto kind) HWY_ATTR {
      finish_gated<decltype(t), decltype(kind)::value>(job, block);
    });
  });
}

// A block of gate and up, computed again.
void gated_finish_inner(const void* opaque, const SumsBlock& block) {
  const auto& job = *static_cast<const GatedInner*>(opaque);
  by_type(job.a.x.dtype, [&](auto t) HWY_ATTR {
    using T = decltype(t);
    with_activation(static_cast<Activation>(job.a.activation), [&](auto kind) HWY_ATTR {
      const F32 d;
      for (int64_t r = 0; r < block.rows; ++r) {
        const int64_t m = block.first_row + r, dy = job.dy.offset(m);
        for_vectors(block.columns, [&](int64_t c, int64_t n) HWY_ATTR {
          const int64_t column = block.first_column + c;
          store_inner<T, decltype(kind)::value>(job, m, column, n,
                                                load_some<T>(job.a.dy, dy, column, n),
                                                hn::LoadU(d, block.sums + r * block.stride + c),
                                                hn::LoadU(d, block.twin + r * block.stride + c));
        });
      }
    });
  });
}

// Rows of gate and up as the forward kept them.
void gated_inner(const GatedInner& job, int64_t begin, int64_t end) {
  const GatedLinearBwd& a = job.a;
  by_type(a.x.dtype, [&](auto t) HWY_ATTR {
    using T = decltype(t);
    with_activation(static_cast<Activation>(a.activation), [&](auto kind) HWY_ATTR {
      for (int64_t m = begin; m < end; ++m) {
        const int64_t dy = job.dy.offset(m), gate = job.gate.offset(m), up = job.up.offset(m);
        for_vectors(a.dy.size(-1), [&](int64_t c, int64_t n) HWY_ATTR {
          store_inner<T, decltype(kind)::value>(job, m, c, n, load_some<T>(a.dy, dy, c, n),
                                                load_some<T>(a.gate, gate, c, n),
                                                load_some<T>(a.up, up, c, n));
        });
      }
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace fk::cpu {

FK_CPU_EXPORT(gated_finish);
FK_CPU_EXPORT(gated_finish_inner);
FK_CPU_EXPORT(gated_inner);

namespace {

// Gate and up of a call, as twins.
Product gate_and_up(const MatrixView& x, int64_t rows, const GatedWeights& weights) {
  Product p{x, transposed(matrix_view(weights.gate)), rows, weights.gate.size(0),
            weights.gate.size(1)};
  p.twin = true;
  p.twin_b = transposed(matrix_view(weights.up));
  return p;
}

struct GatedForwardParts {
  WorkspaceParts parts;
  RowsMatrix x;
  Product product;
  float* scratch;

  GatedForwardParts(const GatedLinearFwd& a, void* memory)
      : parts(memory),
        x(a.x, parts),
        product(gate_and_up(x.view(), rows_of(a.x).count, {a.w_gate, a.w_up, !a.w_up})),
        scratch(parts.take(product_scratch(product))) {}
};

struct GatedBackwardParts {
  WorkspaceParts parts;
  RowsMatrix x;
  GatedWeights weights;
  Product again;  // gate and up
  MatrixView to_gate, to_up;
  Product to_x, to_w_gate, to_w_up;
  float* scratch;

  GatedBackwardParts(const GatedLinearBwd& a, void* memory)
      : parts(memory),
        x(a.x, parts),
        weights(a.w_gate, a.w_up, !a.w_up),
        again(gate_and_up(x.view(), rows_of(a.x).count, weights)) {
    // As torch has it, where products of bfloat16 are quick; float16 could be too small.
    const DType dtype = a.x.dtype == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat32;
    const int64_t rows = again.rows, columns = again.columns, depth = again.depth;
    const int64_t width = padded_columns(columns);
    to_gate = {parts.take<char>(2 * rows * width * size_of(dtype)), dtype, 2 * width, 1};
    to_up = to_gate.from(0, width);
    to_x = {to_gate, matrix_view(weights.gate), rows, depth, columns};
    to_x.sum = true;
    to_x.sum_a = to_up;
    to_x.sum_b = matrix_view(weights.up);
    to_w_gate = {transposed(to_gate), x.view(), columns, depth, rows};
    to_w_up = {transposed(to_up), x.view(), columns, depth, rows};
    int64_t most = a.gate ? 0 : product_scratch(again);
    for (const Product& p : {to_x, to_w_gate, to_w_up}) most = std::max(most, product_scratch(p));
    scratch = parts.take(most);
  }
};

}  // namespace

size_t workspace(const GatedLinearFwd& a) { return GatedForwardParts(a, nullptr).parts.bytes(); }
size_t workspace(const GatedLinearBwd& a) { return GatedBackwardParts(a, nullptr).parts.bytes(); }

Status run(const GatedLinearFwd& a, const Exec& exec) {
  if (!a.y && !a.gate && !a.up) return {};
  const GatedForwardParts parts(a, exec.workspace());
  parts.x.prepare(exec);
  const GatedForward job{a, rows_of(a.y), rows_of(a.gate), rows_of(a.up)};
  multiply(parts.product, parts.scratch, FK_CPU_DISPATCH(gated_finish), &job, exec);
  return {};
}

Status run(const GatedLinearBwd& a, const Exec& exec) {
  if (!a.dx && !a.dw_gate && !a.dw_up) return {};
  const GatedBackwardParts parts(a, exec.workspace());
  const GatedInner job{a,          rows_of(a.dy), rows_of(a.gate), rows_of(a.up), parts.to_gate,
                       parts.to_up};
  const bool keeps_x = a.gate && !a.dw_gate && !a.dw_up;
  if (!keeps_x) parts.x.prepare(exec);
  if (a.gate) {
    exec.parallel_for(job.dy.count, 8, [&](int64_t begin, int64_t end) {
      FK_CPU_DISPATCH(gated_inner)(job, begin, end);
    });
  } else {
    multiply(parts.again, parts.scratch, FK_CPU_DISPATCH(gated_finish_inner), &job, exec);
  }
  if (a.dx) multiply(parts.to_x, parts.scratch, {a.dx, {}}, exec);
  const GatedWeights gradients(a.dw_gate, a.dw_up, !a.w_up);
  if (gradients.gate) multiply(parts.to_w_gate, parts.scratch, {gradients.gate, {}}, exec);
  if (gradients.up) multiply(parts.to_w_up, parts.scratch, {gradients.up, {}}, exec);
  return {};
}

}  // namespace fk::cpu

#endif  // HWY_ONCE
