// scaled_linear on the CPU: numbers times their scales as floats, then the products that linear
// takes.
//
// Floor: that of linear in float32, whose multiply-adds these are; few rows would be bound by the
// weight's bytes, but are by the instructions that decode it. A chunk of the weight at a time is
// brought into floats, and stays in the caches until all rows of x have met it.

#ifndef FK_OPS_LINEAR_CPU_SCALED_JOBS_
#define FK_OPS_LINEAR_CPU_SCALED_JOBS_

#include "ops/linear/scaled_linear.h"

#include <algorithm>

#include "core/rows.h"
#include "cpu/gemm/multiply.h"

namespace fk::cpu {

// Rows of a tensor, times their scales, as floats padded_columns(columns) apart.
struct ScaledRows {
  const Tensor& from;
  Rows rows;
  Scales scales;
  int64_t first;  // row of the tensor that becomes the first
  float* to;
};

struct ScaledForward {
  const ScaledLinearFwd& a;
  Rows y, residual;
  int64_t first_row, first_column;  // of the product in the output
};

}  // namespace fk::cpu

#endif  // FK_OPS_LINEAR_CPU_SCALED_JOBS_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/linear/cpu/scaled_linear.cc"
#include "cpu/foreach_target.h"
#include "cpu/gemm/elements.h"
#include "cpu/simd_activations.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

// Lanes(F32()) floats of 8 bits at p. Their exponent and mantissa, moved to where a float16 has
// them, are 2^-8 of the number, subnormal ones too.
HWY_INLINE hn::Vec<F32> load_float8(const uint8_t* p) {
  const F32 d;
  const hn::Rebind<uint8_t, F32> d8;
  const hn::Rebind<uint16_t, F32> d16;
  const hn::Rebind<uint32_t, F32> d32;
  const auto bits = hn::PromoteTo(d16, hn::LoadU(d8, p));
  const auto magnitude = hn::And(bits, hn::Set(d16, 0x7f));
  const auto sign = hn::ShiftLeft<8>(hn::And(bits, hn::Set(d16, 0x80)));
  const auto half = hn::Or(sign, hn::ShiftLeft<7>(magnitude));
  const auto value = hn::Mul(detail::widen<float16_t>(d, half), hn::Set(d, 256.0f));
  const auto ones = hn::Eq(hn::PromoteTo(d32, magnitude), hn::Set(d32, 0x7fu));
  return hn::IfThenElse(hn::RebindMask(d, ones), hn::NaN(d), value);
}

// `n` <= kScaleBlock numbers by one scale. `to` has room for whole vectors, which are zeros past
// the n-th.
template <class T>
HWY_INLINE void scale_block(const T* x, int64_t stride, int64_t n, float by, float* to) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  const auto scale = hn::Set(d, by);
  T some[kScaleBlock + 64];
  if (stride != 1 || n % lanes != 0) {
    std::fill(some, some + kScaleBlock + 64, T());
    for (int64_t i = 0; i < n; ++i) some[i] = x[i * stride];
    x = some;
  }
  for (int64_t i = 0; i < n; i += lanes) {
    if constexpr (sizeof(T) == 1) {
      hn::StoreU(hn::Mul(load_float8(x + i), scale), d, to + i);
    } else {
      hn::StoreU(hn::Mul(LoadF32(d, x + i), scale), d, to + i);
    }
  }
}

template <class T>
void scale_rows_of(const ScaledRows& job, int64_t begin, int64_t end) {
  const int64_t columns = job.from.size(-1), stride = job.from.stride(-1);
  const int64_t width = padded_columns(columns);
  for (int64_t r = begin; r < end; ++r) {
    const T* const x = static_cast<const T*>(job.from.data) + job.rows.offset(job.first + r);
    float* const to = job.to + r * width;
    if (columns < width) std::fill(to + columns, to + width, 0.0f);
    for (int64_t k = 0; k < columns; k += kScaleBlock) {
      scale_block(x + k * stride, stride, std::min(kScaleBlock, columns - k),
                  job.scales.at(job.first + r, k), to + k);
    }
  }
}

template <class T, Activation kActivation>
HWY_NOINLINE void finish_scaled(const ScaledForward& job, const SumsBlock& block) {
  const F32 d;
  const ScaledLinearFwd& a = job.a;
  const int64_t first = job.first_column + block.first_column;
  alignas(64) float bias[kColumnBlock];
  load_bias<T>(a.bias, first, block.columns, bias);
  const bool float_residual = a.residual && a.residual.dtype == DType::kFloat32;
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t m = job.first_row + block.first_row + r;
    const int64_t y = job.y.offset(m), residual = a.residual ? job.residual.offset(m) : 0;
    for_vectors(block.columns, [&](int64_t c, int64_t n) HWY_ATTR {
      auto v = hn::Add(hn::LoadU(d, block.sums + r * block.stride + c), hn::Load(d, bias + c));
      v = Activate<kActivation>(d, v);
      if (float_residual) {
        v = hn::Add(v, load_some<float>(a.residual, residual, first + c, n));
      } else if (a.residual) {
        v = hn::Add(v, load_some<T>(a.residual, residual, first + c, n));
      }
      store_some<T>(a.y, y, first + c, n, v);
    });
  }
}

}  // namespace

void scaled_rows(const ScaledRows& job, int64_t begin, int64_t end) {
  if (job.from.dtype == DType::kFloat8E4M3) return scale_rows_of<uint8_t>(job, begin, end);
  by_type(job.from.dtype, [&](auto t) HWY_ATTR { scale_rows_of<decltype(t)>(job, begin, end); });
}

void scaled_finish(const void* opaque, const SumsBlock& block) {
  const auto& job = *static_cast<const ScaledForward*>(opaque);
  by_type(job.a.y.dtype, [&](auto t) HWY_ATTR {
    with_activation(static_cast<Activation>(job.a.activation), [&](auto kind) HWY_ATTR {
      finish_scaled<decltype(t), decltype(kind)::value>(job, block);
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace fk::cpu {

FK_CPU_EXPORT(scaled_rows);
FK_CPU_EXPORT(scaled_finish);

namespace {

// This is what is brought into floats at a time: of the weight what a second-level cache holds, of
// x so many rows that decoding the weight once more for the next of them costs little.
constexpr int64_t kWeightFloats = int64_t{1} << 18, kRowFloats = int64_t{1} << 22;
constexpr int64_t kLeastRows = 256;

struct ScaledParts {
  WorkspaceParts parts;
  int64_t rows, columns, depth, width;
  int64_t rows_at_once, columns_at_once;
  float *x, *weight, *scratch;

  ScaledParts(const ScaledLinearFwd& a, void* memory)
      : parts(memory),
        rows(rows_of(a.x).count),
        columns(a.weight.size(0)),
        depth(a.weight.size(1)),
        width(padded_columns(depth)) {
    const int64_t some = kWeightFloats / std::max<int64_t>(width, 1) / kColumnBlock * kColumnBlock;
    columns_at_once = std::min(columns, std::max(some, kColumnBlock));
    rows_at_once = std::min(rows, std::max(kLeastRows, kRowFloats / std::max<int64_t>(width, 1)));
    x = parts.take(rows_at_once * width);
    weight = parts.take(columns_at_once * width);
    // A last chunk of few rows or columns may be cut in another way.
    int64_t most = 0;
    for (const int64_t m : {rows_at_once, rest(rows, rows_at_once)}) {
      for (const int64_t n : {columns_at_once, rest(columns, columns_at_once)}) {
        most = std::max(most, product_scratch(product(m, n)));
      }
    }
    scratch = parts.take(most);
  }
  static int64_t rest(int64_t all, int64_t each) { return each == 0 ? 0 : all % each; }
  Product product(int64_t m, int64_t n) const {
    return {{x, DType::kFloat32, width, 1}, {weight, DType::kFloat32, 1, width}, m, n, depth};
  }
};

}  // namespace

size_t workspace(const ScaledLinearFwd& a) { return ScaledParts(a, nullptr).parts.bytes(); }

Status run(const ScaledLinearFwd& a, const Exec& exec) {
  if (!a.y) return {};
  const ScaledParts parts(a, exec.workspace());
  const auto scale = [&](const Tensor& from, const Scales& scales, int64_t first, int64_t count,
                         float* to) {
    const ScaledRows job{from, rows_of(from), scales, first, to};
    exec.parallel_for(count, 16, [&](int64_t begin, int64_t end) {
      FK_CPU_DISPATCH(scaled_rows)(job, begin, end);
    });
  };
  for (int64_t m = 0; m < parts.rows; m += parts.rows_at_once) {
    const int64_t rows = std::min(parts.rows_at_once, parts.rows - m);
    scale(a.x, x_scales(a), m, rows, parts.x);
    for (int64_t n = 0; n < parts.columns; n += parts.columns_at_once) {
      const int64_t columns = std::min(parts.columns_at_once, parts.columns - n);
      scale(a.weight, weight_scales(a), n, columns, parts.weight);
      const ScaledForward job{a, rows_of(a.y), rows_of(a.residual), m, n};
      multiply(parts.product(rows, columns), parts.scratch, FK_CPU_DISPATCH(scaled_finish), &job,
               exec);
    }
  }
  return {};
}

}  // namespace fk::cpu

#endif  // HWY_ONCE
