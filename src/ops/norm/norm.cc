// rms_norm and layer_norm: what implements them.
#include "ops/norm/norm.h"

namespace fk {

void register_norm(Registry& registry) {
  registry.add<RmsNormFwd>({
    {"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run},
#if FK_HAVE_CUDA
        {"cuda", kPortable, nullptr, cuda::run, nullptr, Device::kCuda},
#endif
  });
  registry.add<RmsNormBwd>({
    {"reference", kReference, nullptr, reference::run},
        {"cpu", kPortable, nullptr, cpu::run, cpu::workspace},
#if FK_HAVE_CUDA
        {"cuda", kPortable, nullptr, cuda::run, cuda::workspace, Device::kCuda},
#endif
  });
  registry.add<LayerNormFwd>({
    {"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run},
#if FK_HAVE_CUDA
        {"cuda", kPortable, nullptr, cuda::run, nullptr, Device::kCuda},
#endif
  });
  registry.add<LayerNormBwd>({
    {"reference", kReference, nullptr, reference::run},
        {"cpu", kPortable, nullptr, cpu::run, cpu::workspace},
#if FK_HAVE_CUDA
        {"cuda", kPortable, nullptr, cuda::run, cuda::workspace, Device::kCuda},
#endif
  });
}

}  // namespace fk
