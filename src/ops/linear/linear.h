// linear: a matrix product with bias, activation and the output stage (core/output_stage.h),
//
//   before = x W^T + b,   y = act(before) + residual,   normed = norm(y)
//
// with x (..., K) and W (N, K), as torch has them. Sums are float; what is multiplied may be
// rounded to x's dtype first (a float32 weight of half precision activations).
//
// Columns are independent of each other but for the norm, so that N has no role: a call is cut
// along rows.
//
// The backward needs `before` where there is an activation: the forward keeps it, in x's dtype,
// which costs one store of a tensor like y; to compute it again would cost the whole product.
#pragma once

#include "core/activation.h"
#include "core/op.h"
#include "core/output_stage.h"

namespace fk {

struct LinearFwd : OutputStage {
  static constexpr const char* kName = "linear_fwd";
  static constexpr const char* kDoc =
      "y = act(x weight^T + bias) + residual: a linear layer, with all that follows it in one "
      "pass. With norm_weight, the norm of y is returned before y.";
  static constexpr StageTypes kStage = {"T[..., N]", "P[N]", "F[..., 2]"};
  Tensor x, weight, bias, y, before;
  int64_t activation = 0;

  static void declare(Declaration<LinearFwd>& d) {
    using Op = LinearFwd;
    d.multiplies();
    d.reorders();
    d.batch({"..."});
    d.input("x", &Op::x, "T[..., K]", "activations");
    d.input("weight", &Op::weight, "P[N, K]", "a row for each output column");
    d.input("bias", &Op::bias, "P[N]", "added to each row of the product").optional();
    d.keyword_only();
    d.choice("activation", &Op::activation, activation_names(), 0, "of product and bias");
    declare_inputs(d, kStage);
    declare_outputs(d, kStage);
    d.output("y", &Op::y, "T[..., N]", "output");
    d.output("before", &Op::before, "T[..., N]", "what the activation is given")
        .when("activation!=")
        .saved();
  }

  Tensor& stage_output() { return y; }
  DType stage_dtype() const { return x.dtype; }
  static Status validate(const LinearFwd& a) { return check_stage(a); }
};

struct LinearBwd : OutputStageGradient {
  static constexpr const char* kName = "linear_bwd";
  static constexpr const char* kDoc = "Gradients of linear.";
  Tensor dy, x, weight, bias, before, dx, dweight, dbias;
  int64_t activation = 0;

  static void declare(Declaration<LinearBwd>& d) {
    using Op = LinearBwd;
    d.multiplies();
    d.reorders();
    d.batch({"..."});
    d.input("dy", &Op::dy, "T[..., N]", "gradient of y");
    d.input("x", &Op::x, "T[..., K]", "as in the forward");
    d.input("weight", &Op::weight, "P[N, K]", "as in the forward");
    d.input("bias", &Op::bias, "P[N]", "as in the forward; its dtype").optional();
    d.input("before", &Op::before, "T[..., N]", "from the forward, where it has an activation")
        .optional();
    d.choice("activation", &Op::activation, activation_names(), 0, "as in the forward");
    declare_inputs(d, LinearFwd::kStage);
    d.output("dx", &Op::dx, "T[..., K]", "gradient of x");
    d.output("dweight", &Op::dweight, "@weight", "gradient of weight");
    d.output("dbias", &Op::dbias, "@bias", "gradient of bias").when("bias");
    declare_outputs(d, LinearFwd::kStage);
  }

  Tensor& stage_gradient() { return dy; }
  static Status validate(const LinearBwd& a);
};

namespace reference {
Status run(const LinearFwd& a, const Exec& exec);
Status run(const LinearBwd& a, const Exec& exec);
}  // namespace reference

namespace cpu {
Status run(const LinearFwd& a, const Exec& exec);
Status run(const LinearBwd& a, const Exec& exec);
size_t workspace(const LinearFwd& a);
size_t workspace(const LinearBwd& a);
}  // namespace cpu

namespace cuda {
// Tells whether `run` sees to the norm: in the same kernel, if it can.
bool writes_norm(const LinearFwd& a);
Status run(const LinearFwd& a, const Exec& exec);
Status run(const LinearBwd& a, const Exec& exec);
size_t workspace(const LinearFwd& a);
size_t workspace(const LinearBwd& a);
}  // namespace cuda

namespace cuda_sm90 {
bool accepts(const LinearFwd& a);
bool accepts(const LinearBwd& a);
Status run(const LinearFwd& a, const Exec& exec);
Status run(const LinearBwd& a, const Exec& exec);
size_t workspace(const LinearFwd& a);
size_t workspace(const LinearBwd& a);
}  // namespace cuda_sm90

}  // namespace fk
