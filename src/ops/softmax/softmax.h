// This file declares softmax, log_softmax and logsumexp along one axis: three ways to leave the
// same two row statistics.
#pragma once

#include "core/op.h"

namespace fk {

struct SoftmaxFwd {
  static constexpr const char* kName = "softmax_fwd";
  static constexpr const char* kDoc = "y = exp(x - logsumexp(x)) along an axis.";
  Tensor x, y;
  int64_t axis = -1;

  static void declare(Declaration<SoftmaxFwd>& d) {
    d.autocast(Autocast::kFloat32OnGpu);
    d.batch({"..."});
    d.input("x", &SoftmaxFwd::x, "T[..., N]", "logits");
    d.axis("axis", &SoftmaxFwd::axis, -1, false, {"x", "y"}, "the axis whose entries sum to 1");
    d.output("y", &SoftmaxFwd::y, "T[..., N]", "probabilities");
  }
};

struct SoftmaxBwd {
  static constexpr const char* kName = "softmax_bwd";
  static constexpr const char* kDoc = "Gradient of softmax: dx = y * (dy - sum(dy * y)).";
  Tensor dy, y, dx;
  int64_t axis = -1;

  static void declare(Declaration<SoftmaxBwd>& d) {
    d.batch({"..."});
    d.input("dy", &SoftmaxBwd::dy, "T[..., N]", "gradient of y");
    d.input("y", &SoftmaxBwd::y, "T[..., N]", "from the forward");
    d.axis("axis", &SoftmaxBwd::axis, -1, false, {"dy", "y", "dx"}, "as in the forward");
    d.output("dx", &SoftmaxBwd::dx, "T[..., N]", "gradient of x");
  }
};

struct LogSoftmaxFwd {
  static constexpr const char* kName = "log_softmax_fwd";
  static constexpr const char* kDoc = "y = x - logsumexp(x) along an axis.";
  Tensor x, y;
  int64_t axis = -1;

  static void declare(Declaration<LogSoftmaxFwd>& d) {
    d.autocast(Autocast::kFloat32OnGpu);
    d.batch({"..."});
    d.input("x", &LogSoftmaxFwd::x, "T[..., N]", "logits");
    d.axis("axis", &LogSoftmaxFwd::axis, -1, false, {"x", "y"}, "the axis to normalise along");
    d.output("y", &LogSoftmaxFwd::y, "T[..., N]", "log-probabilities");
  }
};

struct LogSoftmaxBwd {
  static constexpr const char* kName = "log_softmax_bwd";
  static constexpr const char* kDoc = "Gradient of log_softmax: dx = dy - exp(y) * sum(dy).";
  Tensor dy, y, dx;
  int64_t axis = -1;

  static void declare(Declaration<LogSoftmaxBwd>& d) {
    d.batch({"..."});
    d.input("dy", &LogSoftmaxBwd::dy, "T[..., N]", "gradient of y");
    d.input("y", &LogSoftmaxBwd::y, "T[..., N]", "from the forward");
    d.axis("axis", &LogSoftmaxBwd::axis, -1, false, {"dy", "y", "dx"}, "as in the forward");
    d.output("dx", &LogSoftmaxBwd::dx, "T[..., N]", "gradient of x");
  }
};

struct LogSumExpFwd {
  static constexpr const char* kName = "logsumexp_fwd";
  static constexpr const char* kDoc =
      "lse = log(sum(exp(x))) along an axis, in float32. An empty axis, or one of -inf, gives "
      "-inf.";
  Tensor x, lse;
  int64_t axis = -1;

  static void declare(Declaration<LogSumExpFwd>& d) {
    d.batch({"..."});
    d.input("x", &LogSumExpFwd::x, "T[..., N]", "logits");
    d.axis("axis", &LogSumExpFwd::axis, -1, false, {"x"}, "the axis to reduce");
    d.output("lse", &LogSumExpFwd::lse, "F[...]", "logsumexp of each row");
  }
};

struct LogSumExpBwd {
  static constexpr const char* kName = "logsumexp_bwd";
  static constexpr const char* kDoc =
      "Gradient of logsumexp: dx = dlse * exp(x - lse); 0 where lse = -inf.";
  Tensor dlse, x, lse, dx;
  int64_t axis = -1;

  static void declare(Declaration<LogSumExpBwd>& d) {
    d.batch({"..."});
    d.input("dlse", &LogSumExpBwd::dlse, "F[...]", "gradient of lse");
    d.input("x", &LogSumExpBwd::x, "T[..., N]", "as in the forward");
    d.input("lse", &LogSumExpBwd::lse, "F[...]", "from the forward");
    d.axis("axis", &LogSumExpBwd::axis, -1, false, {"x", "dx"}, "as in the forward");
    d.output("dx", &LogSumExpBwd::dx, "T[..., N]", "gradient of x");
  }
};

namespace reference {
Status run(const SoftmaxFwd& a, const Exec& exec);
Status run(const SoftmaxBwd& a, const Exec& exec);
Status run(const LogSoftmaxFwd& a, const Exec& exec);
Status run(const LogSoftmaxBwd& a, const Exec& exec);
Status run(const LogSumExpFwd& a, const Exec& exec);
Status run(const LogSumExpBwd& a, const Exec& exec);
}  // namespace reference

namespace cpu {
Status run(const SoftmaxFwd& a, const Exec& exec);
Status run(const SoftmaxBwd& a, const Exec& exec);
Status run(const LogSoftmaxFwd& a, const Exec& exec);
Status run(const LogSoftmaxBwd& a, const Exec& exec);
Status run(const LogSumExpFwd& a, const Exec& exec);
Status run(const LogSumExpBwd& a, const Exec& exec);
}  // namespace cpu

namespace cuda {
Status run(const SoftmaxFwd& a, const Exec& exec);
Status run(const SoftmaxBwd& a, const Exec& exec);
Status run(const LogSoftmaxFwd& a, const Exec& exec);
Status run(const LogSoftmaxBwd& a, const Exec& exec);
Status run(const LogSumExpFwd& a, const Exec& exec);
Status run(const LogSumExpBwd& a, const Exec& exec);
size_t workspace(const SoftmaxFwd& a);
size_t workspace(const SoftmaxBwd& a);
size_t workspace(const LogSoftmaxFwd& a);
size_t workspace(const LogSoftmaxBwd& a);
size_t workspace(const LogSumExpFwd& a);
}  // namespace cuda

}  // namespace fk
