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
  const bool rounds = op.multiplies || has_norm;
  for (size_t i = 0; rounds && i < op.fields.size(); ++i) {
    if (drawn_call.tensors[i].present && op.fields[i].dtype_rule == DTypeRule::kActivation) {
      const DType dtype = drawn_call.tensors[i].dtype;
      // 8-bit floats have no gradients, and P alone is rounded.
      relative_floor += (dtype == DType::kFloat8E4M3 ? 1 : kRoundedFactors) * step_of(dtype) *
                        amplification(drawn_call);
      break;
    }
  }
  double largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!expected[i].present) continue;
    double scale = 1;
    for (double value : expected[i].values) {
      if (std::isfinite(value)) scale = std::max(scale, std::fabs(value));
    }
    const double floor = relative_floor * scale;
    for (size_t k = 0; k < expected[i].values.size(); ++k) {
      const double e = expected[i].values[k], g = got[i].values[k];
      if (e == g || (std::isnan(e) && std::isnan(g))) continue;
      double error = std::fabs(e - g) / (step_of(expected[i].dtype) * std::fabs(e) + floor);
      if (!(error < std::numeric_limits<double>::infinity())) {
        error = std::numeric_limits<double>::infinity();
      }
      if (error <= largest) continue;
      largest = error;
      *worst = op.fields[i].name + "[" + std::to_string(k) + "]: expected " + std::to_string(e) +
               ", got " + std::to_string(g);
    }
  }
  return largest;
}

}  // namespace fk
