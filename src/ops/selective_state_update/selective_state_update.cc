// This file checks the arguments of selective_state_update beyond their types and shapes, and lists
// what implements it.
#include "ops/selective_state_update/selective_state_update.h"

#include <string>

namespace fk {

Status SelectiveStateUpdateFwd::validate(const SelectiveStateUpdateFwd& a) {
  const int64_t shared = a.state.size(1), groups = a.B.ndim == 3 ? a.B.size(1) : 1;
  if (groups == 0 ? shared != 0 : shared % groups != 0) {
    return invalid("B: expected a number of groups that divides state's second size " +
                   std::to_string(shared) + ", got " + std::to_string(groups));
  }
  return {};
}

void register_selective_state_update(Registry& registry) {
  registry.add<SelectiveStateUpdateFwd>(
      {{"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run}});
#if FK_HAVE_CUDA
  registry.add_cuda<SelectiveStateUpdateFwd>({{"cuda", kPortable, nullptr, cuda::run}});
#endif
}

}  // namespace fk
