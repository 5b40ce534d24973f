// This file lists what implements gated_ssm.
#include "ops/gated_ssm/gated_ssm.h"

namespace fk {

void register_gated_ssm(Registry& registry) {
  registry.add<GatedSsmFwd>(
      {{"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run}});
  registry.add<GatedSsmBwd>(
      {{"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run}});
#if FK_HAVE_CUDA
  registry.add_cuda<GatedSsmFwd>({{"cuda", kPortable, nullptr, cuda::run}});
  registry.add_cuda<GatedSsmBwd>({{"cuda", kPortable, nullptr, cuda::run}});
#endif
}

}  // namespace fk
