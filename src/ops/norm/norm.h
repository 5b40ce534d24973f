// rms_norm and layer_norm, with the residual add that precedes them in every pre-norm block fused
// in. s = x + residual is rounded to the activations' dtype before it is normalised, so that the
// `sum` handed on, the norm and its gradient all speak of the same numbers. rms_norm also takes a
// gate, before or after the norm, and groups of columns, as Mamba-2 and its relatives have it.
#pragma once

#include "core/op.h"

namespace fk {

struct RmsNormFwd {
  static constexpr const char* kName = "rms_norm_fwd";
  static constexpr const char* kDoc =
      "Root-mean-square norm over the last axis: y = s * rsqrt(mean(s^2) + eps) * (weight + "
      "weight_offset), where s = x, or x + residual if a residual is given; then s is returned "
      "too. With a gate, s silu(gate) is normalised, or with norm_before_gate y is multiplied by "
      "silu(gate). With group_size, each so many columns have a norm of their own.";
  Tensor x, weight, residual, gate, y, sum, rstd;
  double eps = 0, weight_offset = 0;
  int64_t group_size = 0;
  bool norm_before_gate = false;

  static void declare(Declaration<RmsNormFwd>& d) {
    d.autocast(Autocast::kFloat32OnGpu);
    d.batch({"..."});
    d.input("x", &RmsNormFwd::x, "T[..., N]", "activations");
    d.input("weight", &RmsNormFwd::weight, "P[N]", "scale of each column").optional();
    d.keyword_only();
    d.input("residual", &RmsNormFwd::residual, "T[..., N]", "added to x first").optional();
    d.attribute("eps", &RmsNormFwd::eps, 1e-6, "added to the mean square").at_least(0);
    d.attribute("weight_offset", &RmsNormFwd::weight_offset, 0.0,
                "added to weight (Gemma's weights are stored minus 1)");
    d.input("gate", &RmsNormFwd::gate, "T[..., N]", "what s, or y, is multiplied by the silu of")
        .optional();
    d.attribute("norm_before_gate", &RmsNormFwd::norm_before_gate, false,
                "the gate multiplies y, not s");
    d.attribute("group_size", &RmsNormFwd::group_size, 0,
                "columns that are normalised together; None or 0: all")
        .at_least(0)
        .or_none();
    d.output("y", &RmsNormFwd::y, "T[..., N]", "the normalised rows");
    d.output("sum", &RmsNormFwd::sum, "T[..., N]", "x + residual").when("residual");
    d.output("rstd", &RmsNormFwd::rstd, "F[...]",
             "1 / sqrt(mean + eps), the mean being that of the (first) group's squares")
        .saved();
  }

  static Status validate(const RmsNormFwd& a);
};

struct RmsNormBwd {
  static constexpr const char* kName = "rms_norm_bwd";
  static constexpr const char* kDoc = "Gradients of rms_norm.";
  Tensor dy, dsum, x, weight, gate, rstd, dx, dweight, dgate;
  double eps = 0, weight_offset = 0;
  int64_t group_size = 0;
  bool norm_before_gate = false;

  static void declare(Declaration<RmsNormBwd>& d) {
    d.batch({"..."});
    d.input("dy", &RmsNormBwd::dy, "T[..., N]", "gradient of y");
    d.input("dsum", &RmsNormBwd::dsum, "T[..., N]", "gradient of sum").optional();
    d.input("x", &RmsNormBwd::x, "T[..., N]", "what was normalised: x, or sum").prefer("sum");
    d.input("weight", &RmsNormBwd::weight, "P[N]", "as in the forward").optional();
    d.input("gate", &RmsNormBwd::gate, "T[..., N]", "as in the forward").optional();
    d.input("rstd", &RmsNormBwd::rstd, "F[...]", "from the forward");
    d.attribute("eps", &RmsNormBwd::eps, 1e-6, "as in the forward").at_least(0);
    d.attribute("weight_offset", &RmsNormBwd::weight_offset, 0.0, "as in the forward");
    d.attribute("norm_before_gate", &RmsNormBwd::norm_before_gate, false, "as in the forward");
    d.attribute("group_size", &RmsNormBwd::group_size, 0, "as in the forward")
        .at_least(0)
        .or_none();
    d.output("dx", &RmsNormBwd::dx, "T[..., N]", "gradient of x, and of residual")
        .also_gradient_of("residual");
    d.output("dweight", &RmsNormBwd::dweight, "@weight[N]", "gradient of weight").when("weight");
    d.output("dgate", &RmsNormBwd::dgate, "T[..., N]", "gradient of gate").when("gate");
  }

  static Status validate(const RmsNormBwd& a);
};

// Returns whether a call of rms_norm has a gate, or groups of columns: kernels of their own serve
// those. Of no columns, neither matters.
template <class Args>
bool is_gated(const Args& a) {
  const int64_t columns = a.x.size(-1);
  return columns > 0 && (a.gate || (a.group_size > 0 && a.group_size != columns));
}

struct LayerNormFwd {
  static constexpr const char* kName = "layer_norm_fwd";
  static constexpr const char* kDoc =
      "Layer norm over the last axis: y = (s - mean(s)) * rsqrt(var(s) + eps) * weight + bias, "
      "where "
      "s = x, or x + residual if a residual is given; then s is returned too.";
  Tensor x, weight, bias, residual, y, sum, mean, rstd;
  double eps = 0;

  static void declare(Declaration<LayerNormFwd>& d) {
    d.autocast(Autocast::kFloat32OnGpu);
    d.batch({"..."});
    d.input("x", &LayerNormFwd::x, "T[..., N]", "activations");
    d.input("weight", &LayerNormFwd::weight, "P[N]", "scale of each column").optional();
    d.input("bias", &LayerNormFwd::bias, "P[N]", "shift of each column").optional();
    d.keyword_only();
    d.input("residual", &LayerNormFwd::residual, "T[..., N]", "added to x first").optional();
    d.attribute("eps", &LayerNormFwd::eps, 1e-5, "added to the variance").at_least(0);
    d.output("y", &LayerNormFwd::y, "T[..., N]", "the normalised rows");
    d.output("sum", &LayerNormFwd::sum, "T[..., N]", "x + residual").when("residual");
    d.output("mean", &LayerNormFwd::mean, "F[...]", "mean of each row").saved();
    d.output("rstd", &LayerNormFwd::rstd, "F[...]", "1 / sqrt(var(s) + eps)").saved();
  }
};

struct LayerNormBwd {
  static constexpr const char* kName = "layer_norm_bwd";
  static constexpr const char* kDoc = "Gradients of layer_norm.";
  Tensor dy, dsum, x, weight, bias, mean, rstd, dx, dweight, dbias;

  static void declare(Declaration<LayerNormBwd>& d) {
    d.batch({"..."});
    d.input("dy", &LayerNormBwd::dy, "T[..., N]", "gradient of y");
    d.input("dsum", &LayerNormBwd::dsum, "T[..., N]", "gradient of sum").optional();
    d.input("x", &LayerNormBwd::x, "T[..., N]", "what was normalised: x, or sum").prefer("sum");
    d.input("weight", &LayerNormBwd::weight, "P[N]", "as in the forward").optional();
    d.input("bias", &LayerNormBwd::bias, "P[N]", "as in the forward; its dtype").optional();
    d.input("mean", &LayerNormBwd::mean, "F[...]", "from the forward");
    d.input("rstd", &LayerNormBwd::rstd, "F[...]", "from the forward");
    d.output("dx", &LayerNormBwd::dx, "T[..., N]", "gradient of x, and of residual")
        .also_gradient_of("residual");
    d.output("dweight", &LayerNormBwd::dweight, "@weight[N]", "gradient of weight").when("weight");
    d.output("dbias", &LayerNormBwd::dbias, "@bias[N]", "gradient of bias").when("bias");
  }
};

namespace reference {
Status run(const RmsNormFwd& a, const Exec& exec);
Status run(const RmsNormBwd& a, const Exec& exec);
Status run(const LayerNormFwd& a, const Exec& exec);
Status run(const LayerNormBwd& a, const Exec& exec);
}  // namespace reference

namespace cpu {
Status run(const RmsNormFwd& a, const Exec& exec);
Status run(const RmsNormBwd& a, const Exec& exec);
Status run(const LayerNormFwd& a, const Exec& exec);
Status run(const LayerNormBwd& a, const Exec& exec);
size_t workspace(const RmsNormBwd& a);
size_t workspace(const LayerNormBwd& a);
}  // namespace cpu

// These serve rms_norm with a gate or with groups of columns.
namespace cpu_gated {
Status run(const RmsNormFwd& a, const Exec& exec);
Status run(const RmsNormBwd& a, const Exec& exec);
size_t workspace(const RmsNormFwd& a);
size_t workspace(const RmsNormBwd& a);
}  // namespace cpu_gated

namespace cuda {
Status run(const RmsNormFwd& a, const Exec& exec);
Status run(const RmsNormBwd& a, const Exec& exec);
Status run(const LayerNormFwd& a, const Exec& exec);
Status run(const LayerNormBwd& a, const Exec& exec);
size_t workspace(const RmsNormBwd& a);
size_t workspace(const LayerNormBwd& a);
}  // namespace cuda

namespace cuda_gated {
Status run(const RmsNormFwd& a, const Exec& exec);
Status run(const RmsNormBwd& a, const Exec& exec);
size_t workspace(const RmsNormBwd& a);
}  // namespace cuda_gated

}  // namespace fk
