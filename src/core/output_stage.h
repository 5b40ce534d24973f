// The output stage that many ops share: a residual is added to what the op computes, and the norm
// of the sum, which is what the next layer begins with, is written beside it:
//
//   y = op(...) + residual,   normed = norm(y)
//
// as rms_norm(x, residual=...) and layer_norm have it: y is rounded to the activations' dtype
// before it is normalised. An op's argument struct derives from OutputStage, its backward's from
// OutputStageGradient, and both declare their members by the functions here.
#pragma once

#include <vector>

#include "core/declaration.h"
#include "core/rows.h"
#include "core/status.h"

namespace fk {

// The types of an op's output y: of its rows, of a parameter of its columns, and of two floats for
// each row.
struct StageTypes {
  const char *y, *parameter, *statistics;
};

struct OutputStage {
  Tensor residual, norm_weight, norm_bias, normed, norm_stats;
  // This is what the op computed, for a backward that cannot do without it where y has a residual
  // in it.
  Tensor before_residual;
  int64_t norm = 0;
  double norm_eps = 0;

  bool is_layer() const { return norm == 1; }
  bool wants_norm() const { return normed || norm_stats; }

  template <class Args>
  static void declare_inputs(Declaration<Args>& d, const StageTypes& types) {
    d.input("residual", &Args::residual, types.y, "added to the output").optional();
    d.input("norm_weight", &Args::norm_weight, types.parameter,
            "of a norm of y, which is returned before y")
        .optional();
    d.input("norm_bias", &Args::norm_bias, types.parameter, "of that norm, with norm=\"layer\"")
        .optional();
    d.choice("norm", &Args::norm, {"rms", "layer"}, 0, "as rms_norm or layer_norm");
    d.attribute("norm_eps", &Args::norm_eps, 1e-6, "added to the norm's mean square or variance")
        .at_least(0);
  }
  template <class Args>
  static void declare_outputs(Declaration<Args>& d, const StageTypes& types) {
    d.output("normed", &Args::normed, types.y, "the norm of y").when("norm_weight");
    d.output("norm_stats", &Args::norm_stats, types.statistics,
             "mean (0 with norm=\"rms\") and 1 / standard deviation of each row of y")
        .when("norm_weight")
        .saved();
  }
  template <class Args>
  static void declare_before_residual(Declaration<Args>& d, const StageTypes& types) {
    d.output("before_residual", &Args::before_residual, types.y, "y without residual")
        .when("residual")
        .saved();
  }
};

// The backward is given the forward's y only where there is a norm: `when` says so of an input that
// would always be there otherwise.
struct OutputStageGradient {
  Tensor dnormed, sum, norm_weight, norm_bias, norm_stats, dresidual, dnorm_weight, dnorm_bias;
  int64_t norm = 0;

  bool is_layer() const { return norm == 1; }
  // Tells whether the gradient of y has a part that comes through the norm.
  bool goes_through_norm() const { return norm_weight && dnormed; }

  template <class Args>
  static void declare_inputs(Declaration<Args>& d, const StageTypes& types) {
    d.input("dnormed", &Args::dnormed, types.y, "gradient of normed").optional();
    d.input("sum", &Args::sum, types.y, "what was normalised: the forward's y")
        .optional()
        .prefer("y")
        .when("norm_weight");
    d.input("norm_weight", &Args::norm_weight, types.parameter, "as in the forward").optional();
    d.input("norm_bias", &Args::norm_bias, types.parameter, "as in the forward; its dtype")
        .optional();
    d.input("norm_stats", &Args::norm_stats, types.statistics, "from the forward").optional();
    d.choice("norm", &Args::norm, {"rms", "layer"}, 0, "as in the forward");
  }
  template <class Args>
  static void declare_outputs(Declaration<Args>& d, const StageTypes& types) {
    d.output("dresidual", &Args::dresidual, types.y, "gradient of residual: that of y in all");
    d.output("dnorm_weight", &Args::dnorm_weight, "@norm_weight", "gradient of norm_weight")
        .when("norm_weight");
    d.output("dnorm_bias", &Args::dnorm_bias, "@norm_bias", "gradient of norm_bias")
        .when("norm_bias");
  }
};

// These check what the declarations cannot say.
Status check_stage(const OutputStage& a);
Status check_stage(const OutputStageGradient& a);

// A tensor with the leading dims that `like` has, whose rows lie `width` apart.
Tensor rows_like(const Tensor& like, DType dtype, int64_t columns, int64_t width, void* data);

namespace reference {

// Writes the norm of a row of y, which is given as it was rounded to y's dtype.
void write_norm(const OutputStage& a, int64_t row, const double* y, int64_t columns);

// Makes y and its norm of what an op computed, rows of y's columns: adds the residual, and stores.
void finish_rows(const OutputStage& a, const Tensor& y, DType dtype, int64_t columns,
                 const std::vector<double>& values);

// The gradient of a whole y in all: dy, and what comes through the norm. Makes dresidual and the
// gradients of the norm's parameters, too.
class StageGradient {
 public:
  StageGradient(const OutputStageGradient& a, const Tensor& dy);
  double at(int64_t row, int64_t column) const {
    return values_[static_cast<size_t>(row * columns_ + column)];
  }

 private:
  void go_through_norm(const OutputStageGradient& a);

  int64_t rows_, columns_;
  std::vector<double> values_;
};

}  // namespace reference

}  // namespace fk
