// scaled_linear: linear of numbers that have scales, 8-bit floats above all,
//
//   y = act(sum over k of (x[m, k] sx[m, k]) (W[n, k] sw[n, k]) + b) + residual
//
// A scale belongs to a whole tensor, to a row, or to a block: 1 x 128 of x, 128 x 128 of W. Sums
// are float. There is no gradient: this is for weights that are no longer trained.
#pragma once

#include <cstdint>

#include "core/activation.h"
#include "core/op.h"
#include "core/rows.h"

namespace fk {

struct ScaledLinearFwd {
  static constexpr const char* kName = "scaled_linear_fwd";
  static constexpr const char* kDoc =
      "y = act((x x_scale) (weight weight_scale)^T + bias) + residual: a linear layer of 8-bit "
      "floats with their scales.";
  Tensor x, weight, x_scale, weight_scale, bias, residual, y;
  int64_t activation = 0;

  static void declare(Declaration<ScaledLinearFwd>& d) {
    using Op = ScaledLinearFwd;
    d.multiplies();
    d.reorders();
    d.takes_float8();
    d.input("x", &Op::x, "T[..., K]", "activations");
    d.input("weight", &Op::weight, "T[N, K]", "a row for each output column");
    d.input("x_scale", &Op::x_scale, "F[1 | ..., X]",
            "what x is multiplied by: one number, one for each row (X is 1), or one for each 128 "
            "columns of a row")
        .own_form();
    d.input("weight_scale", &Op::weight_scale, "F[1 | U, V]",
            "the same for weight: one number, one for each row (N, 1), or one for each block of "
            "128 x 128")
        .own_form();
    d.input("bias", &Op::bias, "P[N]", "added to each row of the product").optional();
    d.keyword_only();
    d.choice("activation", &Op::activation, activation_names(), 0, "of product and bias");
    // The residual has the outputs' dtype, which activations of 8 bits have not.
    d.input("residual", &Op::residual, "P[..., N]", "added to what the activation gives")
        .optional();
    d.output("y", &Op::y, "T[..., N]", "output");
  }

  static Status validate(const ScaledLinearFwd& a);
};

// This is what y and residual are: bfloat16 where x is 8-bit floats.
inline DType result_of(const ScaledLinearFwd& a) { return result_dtype(a.x.dtype); }

constexpr int64_t kScaleBlock = 128;
constexpr int64_t scale_blocks(int64_t size) { return (size + kScaleBlock - 1) / kScaleBlock; }

// The scales of a matrix whose rows are those of x, or the weight's: that of row r and column k is
// at(r / rows_each, k / kScaleBlock), where either may not matter.
struct Scales {
  const float* data = nullptr;
  Rows rows;              // of the scales
  int64_t rows_each = 1;  // 0: all rows have the same
  int64_t along_k = 0;    // stride from one 128 of K to the next; 0: they have the same

  FK_HOST_DEVICE float at(int64_t row, int64_t k) const {
    const int64_t r = rows_each == 0 ? 0 : rows.offset(rows_each == 1 ? row : row / rows_each);
    return data[r + k / kScaleBlock * along_k];
  }
};

inline Scales scales_of(const Tensor& t, int64_t rows_each, int64_t columns) {
  Scales s;
  s.data = static_cast<const float*>(t.data);
  s.rows_each = 0;
  if (t.ndim == 1) return s;
  s.rows = rows_of(t);
  s.rows_each = rows_each;
  if (t.size(-1) > 1 && columns > kScaleBlock) s.along_k = t.stride(-1);
  return s;
}
inline Scales x_scales(const ScaledLinearFwd& a) { return scales_of(a.x_scale, 1, a.x.size(-1)); }
inline Scales weight_scales(const ScaledLinearFwd& a) {
  const Tensor& s = a.weight_scale;
  const bool by_rows = s.ndim == 2 && s.size(0) == a.weight.size(0) && s.size(1) == 1;
  return scales_of(s, by_rows ? 1 : kScaleBlock, a.weight.size(1));
}

namespace reference {
Status run(const ScaledLinearFwd& a, const Exec& exec);
}  // namespace reference

namespace cpu {
Status run(const ScaledLinearFwd& a, const Exec& exec);
size_t workspace(const ScaledLinearFwd& a);
}  // namespace cpu

namespace cuda {
Status run(const ScaledLinearFwd& a, const Exec& exec);
size_t workspace(const ScaledLinearFwd& a);
}  // namespace cuda

namespace cuda_sm90 {
bool accepts(const ScaledLinearFwd& a);
Status run(const ScaledLinearFwd& a, const Exec& exec);
size_t workspace(const ScaledLinearFwd& a);
}  // namespace cuda_sm90

}  // namespace fk
