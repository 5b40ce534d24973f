// This file checks the arguments of cross_entropy beyond their types and shapes, and lists what
// implements it.
#include "ops/cross_entropy/cross_entropy.h"

namespace fk {

Status CrossEntropyFwd::validate(const CrossEntropyFwd& a) {
  if (a.reduction == kNone && a.loss) {
    return invalid("loss: expected none with reduction=none, got a tensor");
  }
  return check_targets(a.targets, a.logits.size(1), a.ignore_index);
}

Status CrossEntropyBwd::validate(const CrossEntropyBwd& a) {
  FK_RETURN_IF_ERROR(check_loss_gradients(a.reduction, a.dlosses, a.dloss));
  return check_targets(a.targets, a.logits.size(1), a.ignore_index);
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
