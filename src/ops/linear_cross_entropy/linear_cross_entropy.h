// linear_cross_entropy computes the loss of a language model's head,
//
//   z = x W^T + b,   z = softcap tanh(z / softcap) where softcap > 0,
//   loss_i = logsumexp(z_i) - (1 - s) z_i[target_i] - s mean(z_i),
//
// with x (N, K) and W (V, K). The logits z (N, V) are never in memory as a whole: the forward keeps
// of each row what makes its logsumexp, as two numbers (see cross_entropy.h), and the backward
// computes the logits again, a chunk of columns at a time. That makes four products of forward and
// backward together, where logits in memory would make three.
#pragma once

#include "core/loss.h"
#include "core/op.h"

namespace fk {

struct LinearCrossEntropyFwd {
  static constexpr const char* kName = "linear_cross_entropy_fwd";
  static constexpr const char* kDoc =
      "Cross-entropy of the logits x weight^T + bias, which are never in memory as a whole: "
      "loss_i = logsumexp(logits_i) - (1 - s) * logits_i[target_i] - s * mean(logits_i), where s "
      "is "
      "label_smoothing; 0 where target_i = ignore_index. The mean is over the targets that count.";
  Tensor x, weight, targets, bias, losses, loss, lse, shift, log_sum, count;
  int64_t ignore_index = -100, reduction = kMean;
  double label_smoothing = 0, softcap = 0;
  bool return_lse = false;

  static void declare(Declaration<LinearCrossEntropyFwd>& d) {
    using Op = LinearCrossEntropyFwd;
    d.multiplies();
    d.reorders();
    d.input("x", &Op::x, "T[N, K]", "what the head is given");
    d.input("weight", &Op::weight, "P[V, K]", "a row for each class");
    d.input("targets", &Op::targets, "I[N]", "the right class of each row").below("V");
    d.keyword_only();
    d.input("bias", &Op::bias, "P[V]", "added to each row of logits").optional();
    d.attribute("ignore_index", &Op::ignore_index, -100, "rows with this target count not");
    d.attribute("label_smoothing", &Op::label_smoothing, 0.0,
                "share of the target that all classes have alike")
        .at_least(0)
        .at_most(1);
    d.choice("reduction", &Op::reduction, {"none", "mean", "sum"}, kMean,
             "what is returned: each row's loss, their mean or their sum");
    d.attribute("softcap", &Op::softcap, 0.0,
                "logits become softcap * tanh(logits / softcap); 0: they stay")
        .at_least(0);
    d.attribute("return_lse", &Op::return_lse, false, "also return lse");
    d.output("losses", &Op::losses, "F[N]", "one loss per row").when("reduction=none");
    d.output("loss", &Op::loss, "F[]", "mean or sum").when("reduction!=none");
    d.output("lse", &Op::lse, "F[N]", "log(sum(exp(logits))) of each row").when("return_lse");
    d.output("shift", &Op::shift, "F[N]", "largest logit of each row; 0 if infinite").saved();
    d.output("log_sum", &Op::log_sum, "F[N]", "log(sum(exp(logits - shift)))").saved();
    d.output("count", &Op::count, "F[]", "rows that count").saved();
  }

  static Status validate(const LinearCrossEntropyFwd& a);
};

struct LinearCrossEntropyBwd {
  static constexpr const char* kName = "linear_cross_entropy_bwd";
  static constexpr const char* kDoc = "Gradients of linear_cross_entropy.";
  Tensor dlosses, dloss, dlse, x, weight, targets, bias, shift, log_sum, count;
  Tensor dx, dweight, dbias;
  int64_t ignore_index = -100, reduction = kMean;
  double label_smoothing = 0, softcap = 0;

  static void declare(Declaration<LinearCrossEntropyBwd>& d) {
    using Op = LinearCrossEntropyBwd;
    d.multiplies();
    d.reorders();
    d.input("dlosses", &Op::dlosses, "F[N]", "gradient of losses").optional();
    d.input("dloss", &Op::dloss, "F[]", "gradient of loss").optional();
    d.input("dlse", &Op::dlse, "F[N]", "gradient of lse").optional();
    d.input("x", &Op::x, "T[N, K]", "as in the forward");
    d.input("weight", &Op::weight, "P[V, K]", "as in the forward");
    d.input("targets", &Op::targets, "I[N]", "as in the forward").below("V");
    d.input("bias", &Op::bias, "P[V]", "as in the forward").optional();
    d.input("shift", &Op::shift, "F[N]", "from the forward");
    d.input("log_sum", &Op::log_sum, "F[N]", "from the forward");
    d.input("count", &Op::count, "F[]", "from the forward");
    d.attribute("ignore_index", &Op::ignore_index, -100, "as in the forward");
    d.attribute("label_smoothing", &Op::label_smoothing, 0.0, "as in the forward")
        .at_least(0)
        .at_most(1);
    d.choice("reduction", &Op::reduction, {"none", "mean", "sum"}, kMean, "as in the forward");
    d.attribute("softcap", &Op::softcap, 0.0, "as in the forward").at_least(0);
    d.output("dx", &Op::dx, "T[N, K]", "gradient of x");
    d.output("dweight", &Op::dweight, "@weight", "gradient of weight");
    d.output("dbias", &Op::dbias, "@bias", "gradient of bias").when("bias");
  }

  static Status validate(const LinearCrossEntropyBwd& a);
};

namespace reference {
Status run(const LinearCrossEntropyFwd& a, const Exec& exec);
Status run(const LinearCrossEntropyBwd& a, const Exec& exec);
}  // namespace reference

namespace cpu {
Status run(const LinearCrossEntropyFwd& a, const Exec& exec);
Status run(const LinearCrossEntropyBwd& a, const Exec& exec);
size_t workspace(const LinearCrossEntropyFwd& a);
size_t workspace(const LinearCrossEntropyBwd& a);
}  // namespace cpu

namespace cuda {
Status run(const LinearCrossEntropyFwd& a, const Exec& exec);
Status run(const LinearCrossEntropyBwd& a, const Exec& exec);
size_t workspace(const LinearCrossEntropyFwd& a);
size_t workspace(const LinearCrossEntropyBwd& a);
}  // namespace cuda

}  // namespace fk
