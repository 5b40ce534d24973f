// cross_entropy: argument checks beyond types and shapes, and what implements it.
#include "ops/cross_entropy/cross_entropy.h"

#include <string>

#include "core/access.h"

namespace fk {

namespace {

Status check(const Tensor& targets, int64_t columns, int64_t ignore_index) {
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

}  // namespace

Status CrossEntropyFwd::validate(const CrossEntropyFwd& a) {
  if (a.reduction == kNone && a.loss) {
    return invalid("loss: expected none with reduction=none, got a tensor");
  }
  return check(a.targets, a.logits.size(1), a.ignore_index);
}

Status CrossEntropyBwd::validate(const CrossEntropyBwd& a) {
  const bool per_row = a.reduction == kNone;
  const std::string which = per_row ? "with reduction=none" : "with reduction=mean or sum";
  const char* needed = per_row ? "dlosses" : "dloss";
  const char* other = per_row ? "dloss" : "dlosses";
  if (!(per_row ? a.dlosses : a.dloss)) {
    return invalid(std::string(needed) + ": expected a tensor " + which + ", got none");
  }
  if (per_row ? a.dloss : a.dlosses) {
    return invalid(std::string(other) + ": expected none " + which + ", got a tensor");
  }
  return check(a.targets, a.logits.size(1), a.ignore_index);
}

void register_cross_entropy(Registry& registry) {
  registry.add<CrossEntropyFwd>({{"reference", kReference, nullptr, reference::run},
                                 {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
  registry.add<CrossEntropyBwd>(
      {{"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run}});
#if FK_HAVE_CUDA
  registry.add_cuda<CrossEntropyFwd>({{"cuda", kPortable, nullptr, cuda::run, cuda::workspace}});
  registry.add_cuda<CrossEntropyBwd>({{"cuda", kPortable, nullptr, cuda::run}});
#endif
}

}  // namespace fk
