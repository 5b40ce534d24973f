// cross_entropy computes the loss from logits in one pass: neither softmax nor log-softmax is ever
// stored. A row's logsumexp is handed to the backward as two numbers, shift + log_sum: their sum,
// rounded to float32, would cost large logits the digits in which probabilities differ.
#pragma once

#include "core/loss.h"
#include "core/op.h"

namespace fk {

struct CrossEntropyFwd {
  static constexpr const char* kName = "cross_entropy_fwd";
  static constexpr const char* kDoc =
      "loss_i = logsumexp(logits_i) - (1 - s) * logits_i[target_i] - s * mean(logits_i), where s "
      "is "
      "label_smoothing; 0 where target_i = ignore_index. The mean is over the targets that count.";
  Tensor logits, targets, losses, loss, shift, log_sum, count;
  int64_t ignore_index = -100, reduction = kMean;
  double label_smoothing = 0;

  static void declare(Declaration<CrossEntropyFwd>& d) {
    d.input("logits", &CrossEntropyFwd::logits, "T[N, V]", "unnormalised log-probabilities");
    d.input("targets", &CrossEntropyFwd::targets, "I[N]", "the right column of each row")
        .below("V");
    d.keyword_only();
    d.attribute("ignore_index", &CrossEntropyFwd::ignore_index, -100,
                "rows with this target count not");
    d.attribute("label_smoothing", &CrossEntropyFwd::label_smoothing, 0.0,
                "share of the target that all classes have alike")
        .at_least(0)
        .at_most(1);
    d.choice("reduction", &CrossEntropyFwd::reduction, {"none", "mean", "sum"}, kMean,
             "what is returned: each row's loss, their mean or their sum");
    d.output("losses", &CrossEntropyFwd::losses, "F[N]", "one loss per row").when("reduction=none");
    d.output("loss", &CrossEntropyFwd::loss, "F[]", "mean or sum").when("reduction!=none");
    d.output("shift", &CrossEntropyFwd::shift, "F[N]", "largest logit of each row; 0 if infinite")
        .saved();
    d.output("log_sum", &CrossEntropyFwd::log_sum, "F[N]", "log(sum(exp(logits - shift)))").saved();
    d.output("count", &CrossEntropyFwd::count, "F[]", "rows that count").saved();
  }

  static Status validate(const CrossEntropyFwd& a);
};

struct CrossEntropyBwd {
  static constexpr const char* kName = "cross_entropy_bwd";
  static constexpr const char* kDoc = "Gradient of cross_entropy; may overwrite the logits.";
  Tensor dlosses, dloss, logits, targets, shift, log_sum, count, dlogits;
  int64_t ignore_index = -100, reduction = kMean;
  double label_smoothing = 0;

  static void declare(Declaration<CrossEntropyBwd>& d) {
    d.input("dlosses", &CrossEntropyBwd::dlosses, "F[N]", "gradient of losses").optional();
    d.input("dloss", &CrossEntropyBwd::dloss, "F[]", "gradient of loss").optional();
    d.input("logits", &CrossEntropyBwd::logits, "T[N, V]", "as in the forward");
    d.input("targets", &CrossEntropyBwd::targets, "I[N]", "as in the forward").below("V");
    d.input("shift", &CrossEntropyBwd::shift, "F[N]", "from the forward");
    d.input("log_sum", &CrossEntropyBwd::log_sum, "F[N]", "from the forward");
    d.input("count", &CrossEntropyBwd::count, "F[]", "from the forward");
    d.attribute("ignore_index", &CrossEntropyBwd::ignore_index, -100, "as in the forward");
    d.attribute("label_smoothing", &CrossEntropyBwd::label_smoothing, 0.0, "as in the forward")
        .at_least(0)
        .at_most(1);
    d.choice("reduction", &CrossEntropyBwd::reduction, {"none", "mean", "sum"}, kMean,
             "as in the forward");
    d.output("dlogits", &CrossEntropyBwd::dlogits, "T[N, V]", "gradient of logits")
        .may_alias("logits");
  }

  static Status validate(const CrossEntropyBwd& a);
};

namespace reference {
Status run(const CrossEntropyFwd& a, const Exec& exec);
Status run(const CrossEntropyBwd& a, const Exec& exec);
}  // namespace reference

namespace cpu {
Status run(const CrossEntropyFwd& a, const Exec& exec);
Status run(const CrossEntropyBwd& a, const Exec& exec);
size_t workspace(const CrossEntropyFwd& a);
}  // namespace cpu

namespace cuda {
Status run(const CrossEntropyFwd& a, const Exec& exec);
Status run(const CrossEntropyBwd& a, const Exec& exec);
size_t workspace(const CrossEntropyFwd& a);
}  // namespace cuda

}  // namespace fk
