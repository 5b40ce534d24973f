// Compares what an implementation computed with what the reference did.
#include <algorithm>
#include <cmath>
#include <limits>

#include "check/drawn_call.h"

namespace fk {
namespace {

// Returns the largest distance between two neighbouring numbers of a dtype, relative to them.
double step_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return std::ldexp(1, -10);
    case DType::kBFloat16:
      return std::ldexp(1, -7);
    case DType::kFloat8E4M3:
      return std::ldexp(1, -3);
    default:
      return std::ldexp(1, -23);
  }
}

// Returns by how much a call makes more of the rounding of its products than it is: scores and
// logits are divided by their softcap, which may be less than 1.
double amplification(const DrawnCall& drawn_call) {
  const int softcap = drawn_call.op->declaration.find("softcap");
  const double cap = softcap < 0 ? 0 : drawn_call.attributes[static_cast<size_t>(softcap)].number;
  return cap > 0 && cap < 1 ? 1 / cap : 1;
}

double largest(const DrawnTensor& tensor) {
  double scale = 1;
  for (double value : tensor.values) {
    if (std::isfinite(value)) scale = std::max(scale, std::fabs(value));
  }
  return scale;
}

// This is by how much more the results of an output stage's norm may differ. A rounding of y, which
// may come out either way, counts as often as a row's 1 / standard deviation says, and that is
// large where a row's numbers are nearly the same.
class NormedRows {
 public:
  NormedRows(const DrawnCall& drawn_call, const std::vector<DrawnTensor>& expected,
             double relative_error) {
    const OpDeclaration& op = drawn_call.op->declaration;
    const int normed = op.find("normed"), stats = op.find("norm_stats"), y = op.find("y");
    if (normed < 0 || stats < 0) return;
    normed_ = static_cast<size_t>(normed);
    stats_ = static_cast<size_t>(stats);
    if (expected[stats_].present) {
      for (size_t k = 1; k < expected[stats_].values.size(); k += 2) {
        const double value = expected[stats_].values[k];
        inverse_deviations_.push_back(std::isfinite(value) ? value : 0);
      }
    } else if (expected[normed_].present) {
      // Nobody asked for the statistics: all rows are taken for such as have no deviation.
      const fk_slot& eps = drawn_call.attributes[static_cast<size_t>(op.find("norm_eps"))];
      inverse_deviations_.push_back(1 / std::sqrt(std::max(eps.number, 1e-12)));
    }
    const int weight = op.find("norm_weight");
    error_of_y_ = relative_error * (y < 0 ? 1 : largest(expected[static_cast<size_t>(y)]));
    weight_ = largest(drawn_call.tensors[static_cast<size_t>(weight)]);
  }

  // Returns what element k of output i may be off by.
  double allowed(size_t i, size_t k, size_t elements) const {
    if (inverse_deviations_.empty()) return 0;
    if (i == stats_) {
      const double inverse = inverse_deviations_[k / 2];
      return k % 2 == 1 ? inverse * inverse * error_of_y_ : error_of_y_;
    }
    if (i != normed_) return 0;
    const size_t columns = elements / inverse_deviations_.size();
    return inverse_deviations_[k / columns] * weight_ * error_of_y_;
  }

 private:
  size_t stats_ = 0, normed_ = 0;
  std::vector<double> inverse_deviations_;  // of each row
  double error_of_y_ = 0, weight_ = 1;
};

}  // namespace

double largest_error(const DrawnCall& drawn_call, const std::vector<DrawnTensor>& expected,
                     const std::vector<DrawnTensor>& got, std::string* worst) {
  // Four rounded factors meet in a gradient of attention: turned q and k, out, and P or dS.
  constexpr double kFloat32Errors = 256, kRoundedFactors = 4;
  const OpDeclaration& op = drawn_call.op->declaration;
  double relative_floor = kFloat32Errors * std::ldexp(1.0, -24);
  // A norm behind the op is that of its output as it was rounded, and hands on its gradient so. It
  // makes rows of small numbers large, and with them what sums of larger ones have lost.
  constexpr double kEnlargedRows = 16;
  const int norm = op.find("norm_weight");
  const bool has_norm = norm >= 0 && drawn_call.tensors[static_cast<size_t>(norm)].present;
  if (has_norm) relative_floor *= kEnlargedRows;
  // What an op computed may be rounded before the residual is added, which may leave little of it.
  const int residual = op.find("residual");
  const bool has_residual =
      norm >= 0 && residual >= 0 && drawn_call.tensors[static_cast<size_t>(residual)].present;
  const bool rounds = op.multiplies || has_norm || has_residual;
  for (size_t i = 0; rounds && i < op.fields.size(); ++i) {
    if (drawn_call.tensors[i].present && op.fields[i].dtype_rule == DTypeRule::kActivation) {
      const DType dtype = drawn_call.tensors[i].dtype;
      // 8-bit floats have no gradients, and P alone is rounded.
      relative_floor += (dtype == DType::kFloat8E4M3 ? 1 : kRoundedFactors) * step_of(dtype) *
                        amplification(drawn_call);
      break;
    }
  }
  const NormedRows normed_rows(drawn_call, expected, relative_floor);
  double most = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!expected[i].present) continue;
    const double floor = relative_floor * largest(expected[i]);
    for (size_t k = 0; k < expected[i].values.size(); ++k) {
      const double e = expected[i].values[k], g = got[i].values[k];
      if (e == g || (std::isnan(e) && std::isnan(g))) continue;
      const double more = normed_rows.allowed(i, k, expected[i].values.size());
      double error = std::fabs(e - g) / (step_of(expected[i].dtype) * std::fabs(e) + floor + more);
      if (!(error < std::numeric_limits<double>::infinity())) {
        error = std::numeric_limits<double>::infinity();
      }
      if (error <= most) continue;
      most = error;
      *worst = op.fields[i].name + "[" + std::to_string(k) + "]: expected " + std::to_string(e) +
               ", got " + std::to_string(g);
    }
  }
  return most;
}

}  // namespace fk
