// This file checks the arguments of linear_cross_entropy beyond their types and shapes, and lists
// what implements it.
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace fk {

Status LinearCrossEntropyFwd::validate(const LinearCrossEntropyFwd& a) {
  if (a.reduction == kNone && a.loss) {
    return invalid("loss: expected none with reduction=none, got a tensor");
  }
  return check_targets(a.targets, a.weight.size(0), a.ignore_index);
}

Status LinearCrossEntropyBwd::validate(const LinearCrossEntropyBwd& a) {
  // A caller that uses lse alone has no gradient of the loss.
  const bool lse_alone = a.dlse && !a.dlosses && !a.dloss;
  if (!lse_alone) FK_RETURN_IF_ERROR(check_loss_gradients(a.reduction, a.dlosses, a.dloss));
  return check_targets(a.targets, a.weight.size(0), a.ignore_index);
}

void register_linear_cross_entropy(Registry& registry) {
  registry.add<LinearCrossEntropyFwd>({{"reference", kReference, nullptr, reference::run},
                                       {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
  registry.add<LinearCrossEntropyBwd>({{"reference", kReference, nullptr, reference::run},
                                       {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
#if FK_HAVE_CUDA
  registry.add_cuda<LinearCrossEntropyFwd>(
      {{"cuda", kPortable, nullptr, cuda::run, cuda::workspace}});
  registry.add_cuda<LinearCrossEntropyBwd>(
      {{"cuda", kPortable, nullptr, cuda::run, cuda::workspace}});
#endif
}

}  // namespace fk
