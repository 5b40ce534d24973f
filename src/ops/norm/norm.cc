// rms_norm and layer_norm: what implements them.
#include "ops/norm/norm.h"

namespace fk {

void register_norm(Registry& registry) {
  registry.add<RmsNormFwd>(
      {{"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run}});
  registry.add<RmsNormBwd>({{"reference", kReference, nullptr, reference::run},
                            {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
  registry.add<LayerNormFwd>(
      {{"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run}});
  registry.add<LayerNormBwd>({{"reference", kReference, nullptr, reference::run},
                              {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
#if FK_HAVE_CUDA
  registry.add_cuda<RmsNormFwd>({{"cuda", kPortable, nullptr, cuda::run}});
  registry.add_cuda<RmsNormBwd>({{"cuda", kPortable, nullptr, cuda::run, cuda::workspace}});
  registry.add_cuda<LayerNormFwd>({{"cuda", kPortable, nullptr, cuda::run}});
  registry.add_cuda<LayerNormBwd>({{"cuda", kPortable, nullptr, cuda::run, cuda::workspace}});
#endif
}

}  // namespace fk
