// linear on the CPU: three matrix products and what rides along with them.
//
// Floor: 2 M N K operations for the forward and for each gradient product, at two vectors a clock;
// for few rows reading the weight. The products are cpu/gemm/product.h's. The forward's bias,
// activation and residual are applied to a block of sums while it is in the second-level cache, and
// whoever finishes the last block of some rows writes their norm. The backward first writes the
// gradient of what the activation was given, in float, with the sums for the bias; without an
// activation dy itself is that, or what the norm's backward makes of it.

#ifndef FK_OPS_LINEAR_CPU_JOBS_
#define FK_OPS_LINEAR_CPU_JOBS_

#include "core/access.h"
#include "core/rows.h"
#include "cpu/gemm/multiply.h"
#include "cpu/output_stage.h"
#include "ops/linear/packed_linear.h"

namespace fk::cpu {

struct LinearForward {
  const LinearFwd& a;
  const OutputNorm& norm;
  Rows y, before, residual;
};

struct LinearInner {
  const LinearBwd& a;
  const OutputGradient& dy;
  Rows dy_rows, before, dresidual;
  MatrixView inner;  // M rows of padded_columns(N); without data: dy is the inner gradient
  float* dbias;      // of each piece of rows: padded_columns(N); NULL: not wanted
  int64_t piece;
};

}  // namespace fk::cpu

#endif  // FK_OPS_LINEAR_CPU_JOBS_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/linear/cpu/linear.cc"
#include "cpu/foreach_target.h"
#include "cpu/gemm/elements.h"
#include "cpu/simd_activations.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

// This is what becomes of a block of sums. The bias of its columns is read once.
template <class T, Activation kActivation>
HWY_NOINLINE void finish_forward(const LinearForward& job, const SumsBlock& block) {
  const F32 d;
  const LinearFwd& a = job.a;
  const Tensor& out = job.norm.y();
  alignas(64) float bias[kColumnBlock];
  load_bias<T>(a.bias, block.first_column, block.columns, bias);
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t m = block.first_row + r;
    const int64_t y = out ? job.y.offset(m) : 0, before = a.before ? job.before.offset(m) : 0;
    const int64_t residual = a.residual ? job.residual.offset(m) : 0;
    for_vectors(block.columns, [&](int64_t c, int64_t n) HWY_ATTR {
      const int64_t column = block.first_column + c;
      auto v = hn::Add(hn::LoadU(d, block.sums + r * block.stride + c), hn::Load(d, bias + c));
      if (a.before) store_some<T>(a.before, before, column, n, v);
      if (!out) return;
      v = Activate<kActivation>(d, v);
      if (a.residual) v = hn::Add(v, load_some<T>(a.residual, residual, column, n));
      store_some<T>(out, y, column, n, v);
    });
  }
}

}  // namespace

void linear_finish(const void* opaque, const SumsBlock& block) {
  const auto& job = *static_cast<const LinearForward*>(opaque);
  by_type(job.a.x.dtype, [&](auto t) HWY_ATTR {
    with_activation(static_cast<Activation>(job.a.activation), [&](auto kind) HWY_ATTR {
      finish_forward<decltype(t), decltype(kind)::value>(job, block);
    });
  });
  if (job.norm.wanted()) job.norm.stored(block.first_row, block.rows, block.columns);
}

// A piece of rows: the norm's backward, the inner gradient and its sum over them, and dy for the
// residual.
void linear_inner(const LinearInner& job, int64_t item) {
  const LinearBwd& a = job.a;
  const Tensor& g = job.dy.gradient();
  const int64_t columns = g.size(-1), width = padded_columns(columns);
  const int64_t begin = item * job.piece, end = std::min(begin + job.piece, job.dy_rows.count);
  const bool normed = job.dy.goes_through_norm(), copies = a.dresidual && !normed;
  constexpr int64_t kNormedAtOnce = 16;  // rows that are still near when they are read again
  float* const sums = job.dbias == nullptr ? nullptr : job.dbias + item * width;
  if (sums != nullptr) std::fill_n(sums, width, 0.0f);
  by_type(a.dy.dtype, [&](auto t) HWY_ATTR {
    using T = decltype(t);
    with_activation(static_cast<Activation>(a.activation), [&](auto kind) HWY_ATTR {
      const F32 d;
      for (int64_t m = begin; m < end; ++m) {
        if (normed && (m - begin) % kNormedAtOnce == 0) {
          job.dy.rows(item, m, std::min(m + kNormedAtOnce, end), m == begin);
        }
        const int64_t dy = job.dy_rows.offset(m), before = a.before ? job.before.offset(m) : 0;
        const int64_t dresidual = copies ? job.dresidual.offset(m) : 0;
        for_vectors(columns, [&](int64_t c, int64_t n) HWY_ATTR {
          auto v = load_some<T>(g, dy, c, n);
          if (copies) store_some<T>(a.dresidual, dresidual, c, n, v);
          constexpr Activation kKind = decltype(kind)::value;
          if constexpr (kKind != Activation::kNone) {
            v = hn::Mul(v, ActivationSlope<kKind>(d, load_some<T>(a.before, before, c, n)));
          }
          if (job.inner.data != nullptr) {
            if (job.inner.dtype == DType::kFloat32) {
              hn::StoreU(v, d, static_cast<float*>(job.inner.data) + m * width + c);
            } else {
              StoreF32(d, v, static_cast<T*>(job.inner.data) + m * width + c);
            }
          }
          if (sums != nullptr) hn::StoreU(hn::Add(hn::LoadU(d, sums + c), v), d, sums + c);
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

FK_CPU_EXPORT(linear_finish);
FK_CPU_EXPORT(linear_inner);

namespace {

// This is what becomes of the blocks of a forward's product.
LinearForward forward_job(const LinearFwd& a, const OutputNorm& norm) {
  return {a, norm, rows_of(norm.y()), rows_of(a.before), rows_of(a.residual)};
}

struct ForwardParts {
  WorkspaceParts parts;
  RowsMatrix x;
  Product product;
  float* scratch;
  OutputNorm norm;

  ForwardParts(const LinearFwd& a, void* memory)
      : parts(memory),
        x(a.x, parts),
        product{x.view(), transposed(matrix_view(a.weight)), rows_of(a.x).count, a.weight.size(0),
                a.weight.size(1)},
        scratch(parts.take(product_scratch(product))),
        norm(a, a.y, a.x.dtype, product.columns, rows_at_once(product), parts) {}
};

struct BackwardParts {
  WorkspaceParts parts;
  int64_t rows, columns, depth, piece, pieces;
  MatrixView inner;
  OutputGradient gradient;
  RowsMatrix dy, x;
  float* dbias = nullptr;
  Product to_x, to_weight;
  float* scratch;

  BackwardParts(const LinearBwd& a, void* memory)
      : parts(memory),
        rows(rows_of(a.x).count),
        columns(a.weight.size(0)),
        depth(a.weight.size(1)),
        piece(gradient_piece(rows)),
        pieces(gradient_pieces(rows)),
        inner(inner_of(a)),
        // Where both are of one dtype, the inner gradient takes the place of that of y.
        gradient(a, a.dy, pieces, inner.dtype == a.x.dtype ? inner : MatrixView{}, parts),
        dy(gradient.gradient(), parts),
        x(a.x, parts) {
    if (a.dbias) dbias = parts.take(pieces * padded_columns(columns));
    const MatrixView g = a.activation != 0 ? inner : dy.view();
    to_x = {g, matrix_view(a.weight), rows, depth, columns};
    to_weight = {transposed(g), x.view(), columns, depth, rows};
    scratch = parts.take(std::max(product_scratch(to_x), product_scratch(to_weight)));
  }

 private:
  MatrixView inner_of(const LinearBwd& a) {
    if (a.activation == 0) return {};
    // As torch has it, where products of bfloat16 are quick; float16 could be too small.
    const DType dtype = a.x.dtype == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat32;
    const int64_t width = padded_columns(columns);
    return {parts.take<char>(rows * width * size_of(dtype)), dtype, width, 1};
  }
};

}  // namespace

size_t workspace(const LinearFwd& a) { return ForwardParts(a, nullptr).parts.bytes(); }
size_t workspace(const LinearBwd& a) { return BackwardParts(a, nullptr).parts.bytes(); }

Status run(const LinearFwd& a, const Exec& exec) {
  const ForwardParts parts(a, exec.workspace());
  if (!a.y && !a.before && !parts.norm.wanted()) return {};
  parts.x.prepare(exec);
  parts.norm.begin();
  const LinearForward job = forward_job(a, parts.norm);
  multiply(parts.product, parts.scratch, FK_CPU_DISPATCH(linear_finish), &job, exec);
  return {};
}

namespace {

struct PackedParts {
  WorkspaceParts parts;
  LeftOperand x;
  Product product;
  float* scratch;
  OutputNorm norm;

  PackedParts(const LinearFwd& a, const Panels& weight, void* memory)
      : parts(memory),
        x(a.x, weight, parts),
        product(x.product()),
        scratch(parts.take(product_scratch(product))),
        norm(a, a.y, a.x.dtype, product.columns, rows_at_once(product), parts) {}
};

}  // namespace

size_t packed_workspace(const LinearFwd& a, const Panels& weight) {
  return PackedParts(a, weight, nullptr).parts.bytes();
}

void run_packed(const LinearFwd& a, const Panels& weight, const Exec& exec) {
  const PackedParts parts(a, weight, exec.workspace());
  parts.x.prepare(exec);
  parts.norm.begin();
  const LinearForward job = forward_job(a, parts.norm);
  multiply(parts.product, parts.scratch, FK_CPU_DISPATCH(linear_finish), &job, exec);
}

Status run(const LinearBwd& a, const Exec& exec) {
  const BackwardParts parts(a, exec.workspace());
  const bool products = a.dx || a.dweight;
  const bool normed = parts.gradient.goes_through_norm();
  if (a.dbias || a.dresidual || normed || (a.activation != 0 && products)) {
    const LinearInner job{a,
                          parts.gradient,
                          rows_of(parts.gradient.gradient()),
                          rows_of(a.before),
                          rows_of(a.dresidual),
                          parts.inner,
                          parts.dbias,
                          parts.piece};
    exec.parallel_for(parts.pieces, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) FK_CPU_DISPATCH(linear_inner)(job, i);
    });
  }
  if (a.dbias) add_pieces(parts.dbias, parts.pieces, padded_columns(parts.columns), a.dbias);
  parts.gradient.finish(parts.pieces);
  if (a.activation == 0 && products) parts.dy.prepare(exec);
  if (a.dx) multiply(parts.to_x, parts.scratch, {a.dx, {}}, exec);
  if (a.dweight) {
    parts.x.prepare(exec);
    multiply(parts.to_weight, parts.scratch, {a.dweight, {}}, exec);
  }
  return {};
}

}  // namespace fk::cpu

#endif  // HWY_ONCE
