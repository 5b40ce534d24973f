// linear on the CPU: three matrix products and what rides along with them.
//
// Floor: 2 M N K operations for the forward and for each gradient product, at two vectors a clock;
// for few rows reading the weight. The products are cpu/gemm/product.h's. The forward's bias,
// activation and residual are applied to a block of sums while it is in the second-level cache. The
// backward first writes the gradient of what the activation was given, in float, with the sums for
// the bias; without an activation dy itself is that.

#ifndef FK_OPS_LINEAR_CPU_JOBS_
#define FK_OPS_LINEAR_CPU_JOBS_

#include "core/access.h"
#include "core/rows.h"
#include "cpu/gemm/plan.h"
#include "ops/linear/linear.h"

namespace fk::cpu {

struct LinearForward {
  const LinearFwd& a;
  ProductJob product;
  Rows y, before, residual;
};

// A product that becomes a tensor as it is: dx or dweight.
struct LinearGradient {
  ProductJob product;
  const Tensor& out;
  Rows rows;
};

struct LinearInner {
  const LinearBwd& a;
  Rows dy, before, dresidual;
  float* inner;  // M rows of padded_columns(N); NULL: dy is the inner gradient
  float* dbias;  // of each piece of rows: padded_columns(N); NULL: not wanted
  int64_t piece;
};

// Rows of any tensor as floats without gaps.
struct LinearCopy {
  const Tensor& from;
  Rows rows;
  float* out;
};

}  // namespace fk::cpu

#endif  // FK_OPS_LINEAR_CPU_JOBS_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/linear/cpu.cc"
#include "cpu/foreach_target.h"
#include "cpu/gemm/product.h"
#include "cpu/simd_activations.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

// body(t) with a value of the element type.
template <class Body>
HWY_INLINE void by_type(DType dtype, const Body& body) {
  if (dtype == DType::kFloat16) return body(float16_t());
  if (dtype == DType::kBFloat16) return body(bfloat16_t());
  body(float());
}

// Up to Lanes(F32()) elements at a column of a row.
template <class T>
HWY_INLINE hn::Vec<F32> load_some(const Tensor& t, int64_t row, int64_t column, int64_t n) {
  const F32 d;
  const T* p = static_cast<const T*>(t.data) + row + column * t.stride(-1);
  if (t.stride(-1) != 1) return LoadStridedF32(d, p, t.stride(-1), static_cast<size_t>(n));
  if (n == static_cast<int64_t>(hn::Lanes(d))) return LoadF32(d, p);
  return LoadNF32(d, p, static_cast<size_t>(n));
}

template <class T>
HWY_INLINE void store_some(const Tensor& t, int64_t row, int64_t column, int64_t n,
                           hn::Vec<F32> v) {
  const F32 d;
  T* p = static_cast<T*>(t.data) + row + column * t.stride(-1);
  if (t.stride(-1) != 1) {
    StoreStridedF32(d, v, p, t.stride(-1), static_cast<size_t>(n));
  } else if (n == static_cast<int64_t>(hn::Lanes(d))) {
    StoreF32(d, v, p);
  } else {
    StoreNF32(d, v, p, static_cast<size_t>(n));
  }
}

// body(c, n) for vectors of columns.
template <class Body>
HWY_INLINE void for_vectors(int64_t columns, const Body& body) {
  const int64_t lanes = hn::Lanes(F32());
  for (int64_t c = 0; c < columns; c += lanes) body(c, std::min(lanes, columns - c));
}

// What becomes of a block of sums. The bias of its columns is read once.
template <class T, Activation kActivation>
HWY_NOINLINE void finish_forward(const LinearForward& job, const float* sums, int64_t stride,
                                 int64_t first_row, int64_t rows, int64_t first_column,
                                 int64_t columns) {
  const F32 d;
  const LinearFwd& a = job.a;
  alignas(64) float bias[kColumnBlock];
  for_vectors(columns, [&](int64_t c, int64_t n) HWY_ATTR {
    auto b = hn::Zero(d);
    if (a.bias) {
      const float* from = static_cast<const float*>(a.bias.data);
      const int64_t step = a.bias.stride(0), at = (first_column + c) * step;
      if (a.bias.dtype == DType::kFloat32) {
        b = LoadStridedF32(d, from + at, step, static_cast<size_t>(n));
      } else {
        b = LoadStridedF32(d, static_cast<const T*>(a.bias.data) + at, step,
                           static_cast<size_t>(n));
      }
    }
    hn::Store(b, d, bias + c);
  });
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t m = first_row + r;
    const int64_t y = a.y ? job.y.offset(m) : 0, before = a.before ? job.before.offset(m) : 0;
    const int64_t residual = a.residual ? job.residual.offset(m) : 0;
    for_vectors(columns, [&](int64_t c, int64_t n) HWY_ATTR {
      auto v = hn::Add(hn::LoadU(d, sums + r * stride + c), hn::Load(d, bias + c));
      if (a.before) store_some<T>(a.before, before, first_column + c, n, v);
      if (!a.y) return;
      v = Activate<kActivation>(d, v);
      if (a.residual) v = hn::Add(v, load_some<T>(a.residual, residual, first_column + c, n));
      store_some<T>(a.y, y, first_column + c, n, v);
    });
  }
}

}  // namespace

void linear_forward(const LinearForward& job, int64_t worker, int64_t item) {
  const auto finish = [&](const float* sums, int64_t stride, int64_t first_row, int64_t rows,
                          int64_t first_column, int64_t columns) HWY_ATTR {
    by_type(job.a.x.dtype, [&](auto t) HWY_ATTR {
      with_activation(static_cast<Activation>(job.a.activation), [&](auto kind) HWY_ATTR {
        finish_forward<decltype(t), decltype(kind)::value>(job, sums, stride, first_row, rows,
                                                           first_column, columns);
      });
    });
  };
  if (takes_few_rows(job.product.product)) {
    multiply_few_rows(job.product, item, finish);
  } else {
    multiply_block(job.product, worker, item, finish);
  }
}

void linear_gradient(const LinearGradient& job, int64_t worker, int64_t item) {
  multiply_block(job.product, worker, item,
                 [&](const float* sums, int64_t stride, int64_t first_row, int64_t rows,
                     int64_t first_column, int64_t columns) HWY_ATTR {
                   by_type(job.out.dtype, [&](auto t) HWY_ATTR {
                     const F32 d;
                     for (int64_t r = 0; r < rows; ++r) {
                       const int64_t row = job.rows.offset(first_row + r);
                       for_vectors(columns, [&](int64_t c, int64_t n) HWY_ATTR {
                         store_some<decltype(t)>(job.out, row, first_column + c, n,
                                                 hn::LoadU(d, sums + r * stride + c));
                       });
                     }
                   });
                 });
}

// A piece of rows: the inner gradient and its sum over them, and dy for the residual.
void linear_inner(const LinearInner& job, int64_t item) {
  const LinearBwd& a = job.a;
  const int64_t columns = a.dy.size(-1), width = padded_columns(columns);
  const int64_t begin = item * job.piece, end = std::min(begin + job.piece, job.dy.count);
  float* const sums = job.dbias == nullptr ? nullptr : job.dbias + item * width;
  if (sums != nullptr) std::fill_n(sums, width, 0.0f);
  by_type(a.dy.dtype, [&](auto t) HWY_ATTR {
    using T = decltype(t);
    with_activation(static_cast<Activation>(a.activation), [&](auto kind) HWY_ATTR {
      const F32 d;
      for (int64_t m = begin; m < end; ++m) {
        const int64_t dy = job.dy.offset(m), before = a.before ? job.before.offset(m) : 0;
        const int64_t dresidual = a.dresidual ? job.dresidual.offset(m) : 0;
        for_vectors(columns, [&](int64_t c, int64_t n) HWY_ATTR {
          auto v = load_some<T>(a.dy, dy, c, n);
          if (a.dresidual) store_some<T>(a.dresidual, dresidual, c, n, v);
          constexpr Activation kKind = decltype(kind)::value;
          if constexpr (kKind != Activation::kNone) {
            v = hn::Mul(v, ActivationSlope<kKind>(d, load_some<T>(a.before, before, c, n)));
          }
          if (job.inner != nullptr) hn::StoreU(v, d, job.inner + m * width + c);
          if (sums != nullptr) hn::StoreU(hn::Add(hn::LoadU(d, sums + c), v), d, sums + c);
        });
      }
    });
  });
}

void linear_copy(const LinearCopy& job, int64_t begin, int64_t end) {
  const int64_t columns = job.from.size(-1), width = padded_columns(columns);
  for (int64_t r = begin; r < end; ++r) {
    const MatrixView start{job.from.data, job.from.dtype, 1, job.from.stride(-1)};
    pack_rows(start.from(job.rows.offset(r)), 1, columns, job.out + r * width, width);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace fk::cpu {

FK_CPU_EXPORT(linear_forward);
FK_CPU_EXPORT(linear_gradient);
FK_CPU_EXPORT(linear_inner);
FK_CPU_EXPORT(linear_copy);

namespace {

// The rows of a tensor as one matrix, in floats of their own if their strides do not allow that.
class Matrix {
 public:
  Matrix(const Tensor& t, WorkspaceParts& parts) : tensor_(t), rows_(rows_of(t)) {
    if (rows_.ndim > 1) copy_ = parts.take(rows_.count * padded_columns(t.size(-1)));
  }
  MatrixView view() const {
    if (rows_.ndim > 1) return {copy_, DType::kFloat32, padded_columns(tensor_.size(-1)), 1};
    return {tensor_.data, tensor_.dtype, rows_.last_stride, tensor_.stride(-1)};
  }
  void prepare(const Exec& exec) const {
    if (rows_.ndim <= 1) return;
    const LinearCopy job{tensor_, rows_, copy_};
    exec.parallel_for(rows_.count, 64, [&](int64_t begin, int64_t end) {
      FK_CPU_DISPATCH(linear_copy)(job, begin, end);
    });
  }

 private:
  const Tensor& tensor_;
  Rows rows_;
  float* copy_ = nullptr;
};

MatrixView transposed(const MatrixView& m) { return {m.data, m.dtype, m.column, m.row}; }
MatrixView matrix_view(const Tensor& t) { return {t.data, t.dtype, t.stride(0), t.stride(1)}; }

ProductJob job_of(const Product& product, float* scratch) {
  return {product, product_blocks(product.rows, product.columns), scratch};
}

struct ForwardParts {
  WorkspaceParts parts;
  Matrix x;
  Product product;
  float* scratch;

  ForwardParts(const LinearFwd& a, void* memory)
      : parts(memory),
        x(a.x, parts),
        product{x.view(), transposed(matrix_view(a.weight)), rows_of(a.x).count, a.weight.size(0),
                a.weight.size(1)},
        scratch(parts.take(product_scratch(product))) {}
};

constexpr int64_t kInnerPieces = 64;  // whatever the threads are: sums are the same

struct BackwardParts {
  WorkspaceParts parts;
  Matrix dy, x;
  int64_t rows, columns, depth;
  float* inner = nullptr;
  float* dbias = nullptr;
  int64_t piece = 1, pieces = 0;
  Product to_x, to_weight;
  float* scratch;

  BackwardParts(const LinearBwd& a, void* memory)
      : parts(memory),
        dy(a.dy, parts),
        x(a.x, parts),
        rows(rows_of(a.x).count),
        columns(a.weight.size(0)),
        depth(a.weight.size(1)) {
    if (a.activation != 0) inner = parts.take(rows * padded_columns(columns));
    piece = std::max<int64_t>(1, blocks_of(rows, kInnerPieces));
    pieces = blocks_of(rows, piece);
    if (a.dbias) dbias = parts.take(pieces * padded_columns(columns));
    const MatrixView g = a.activation != 0
                             ? MatrixView{inner, DType::kFloat32, padded_columns(columns), 1}
                             : dy.view();
    to_x = {g, matrix_view(a.weight), rows, depth, columns};
    to_weight = {transposed(g), x.view(), columns, depth, rows};
    // Both are blocked, whatever their rows are.
    scratch = parts.take(worker_limit() * ProductScratch::kFloats);
  }
};

template <class Job, class Kernel>
void share_blocks(const Job& job, const Kernel& kernel, const Exec& exec) {
  share_out(exec, worker_limit(), job.product.blocks.count(),
            [&](int64_t worker, int64_t item) { kernel(job, worker, item); });
}

}  // namespace

size_t workspace(const LinearFwd& a) { return ForwardParts(a, nullptr).parts.bytes(); }
size_t workspace(const LinearBwd& a) { return BackwardParts(a, nullptr).parts.bytes(); }

Status run(const LinearFwd& a, const Exec& exec) {
  if (!a.y && !a.before) return {};
  const ForwardParts parts(a, exec.workspace());
  parts.x.prepare(exec);
  const LinearForward job{a, job_of(parts.product, parts.scratch), rows_of(a.y), rows_of(a.before),
                          rows_of(a.residual)};
  if (!takes_few_rows(parts.product)) {
    share_blocks(job, FK_CPU_DISPATCH(linear_forward), exec);
    return {};
  }
  const Product& p = parts.product;
  const Rows rows = rows_of(a.x);
  FK_CPU_DISPATCH(linear_copy)({a.x, rows, parts.scratch}, 0, rows.count);
  // Enough columns for a thread to be worth waking.
  const int64_t grain = std::max<int64_t>(1, (1 << 17) / (p.depth * p.rows * kFewColumns + 1));
  exec.parallel_for(blocks_of(p.columns, kFewColumns), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) FK_CPU_DISPATCH(linear_forward)(job, 0, i);
  });
  return {};
}

Status run(const LinearBwd& a, const Exec& exec) {
  const BackwardParts parts(a, exec.workspace());
  const bool products = a.dx || a.dweight;
  if (a.dbias || a.dresidual || (parts.inner != nullptr && products)) {
    const LinearInner job{a,           rows_of(a.dy), rows_of(a.before), rows_of(a.dresidual),
                          parts.inner, parts.dbias,   parts.piece};
    exec.parallel_for(parts.pieces, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) FK_CPU_DISPATCH(linear_inner)(job, i);
    });
  }
  if (a.dbias) {
    for (int64_t n = 0; n < parts.columns; ++n) {
      double sum = 0;
      for (int64_t i = 0; i < parts.pieces; ++i) {
        sum += parts.dbias[i * padded_columns(parts.columns) + n];
      }
      store(a.dbias, n * a.dbias.stride(0), sum);
    }
  }
  if (parts.inner == nullptr && products) parts.dy.prepare(exec);
  if (a.dx) {
    const LinearGradient job{job_of(parts.to_x, parts.scratch), a.dx, rows_of(a.dx)};
    share_blocks(job, FK_CPU_DISPATCH(linear_gradient), exec);
  }
  if (a.dweight) {
    parts.x.prepare(exec);
    const LinearGradient job{job_of(parts.to_weight, parts.scratch), a.dweight, rows_of(a.dweight)};
    share_blocks(job, FK_CPU_DISPATCH(linear_gradient), exec);
  }
  return {};
}

}  // namespace fk::cpu

#endif  // HWY_ONCE
