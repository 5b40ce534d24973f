#include "core/loss.h"

#include <string>

#include "core/access.h"

namespace fk {

Status check_targets(const Tensor& targets, int64_t columns, int64_t ignore_index) {
  if (!readable(targets)) return {};
  for (int64_t i = 0; i < targets.size(0); ++i) {
    const int64_t value = load_index(targets, i * targets.stride(0));
    if ((value >= 0 && value < columns) || value == ignore_index) continue;
    return invalid("targets: expected values from 0 to " + std::to_string(columns - 1) +
                   " or ignore_index=" + std::to_string(ignore_index) + ", got " +
                   std::to_string(value) + " at row " + std::to_string(i));
  }
  return {};
}

Status check_loss_gradients(int64_t reduction, const Tensor& dlosses, const Tensor& dloss) {
  const bool per_row = reduction == kNone;
  const std::string which = per_row ? "with reduction=none" : "with reduction=mean or sum";
  const char* needed = per_row ? "dlosses" : "dloss";
  const char* other = per_row ? "dloss" : "dlosses";
  if (!(per_row ? dlosses : dloss)) {
    return invalid(std::string(needed) + ": expected a tensor " + which + ", got none");
  }
  if (per_row ? dloss : dlosses) {
    return invalid(std::string(other) + ": expected none " + which + ", got a tensor");
  }
  return {};
}

}  // namespace fk
