// gated_ssm: what implements it.
#include "ops/gated_ssm/gated_ssm.h"

namespace fk {

void register_gated_ssm(Registry& registry) {
  registry.add<GatedSsmFwd>({
    {"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run},
#if FK_HAVE_CUDA
        {"cuda", kPortable, nullptr, cuda::run, nullptr, Device::kCuda},
#endif
  });
  registry.add<GatedSsmBwd>({
    {"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run},
#if FK_HAVE_CUDA
        {"cuda", kPortable, nullptr, cuda::run, nullptr, Device::kCuda},
#endif
  });
}

}  // namespace fk
