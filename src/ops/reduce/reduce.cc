// sum and max: what implements them.
#include "ops/reduce/reduce.h"

namespace fk {

void register_reduce(Registry& registry) {
  registry.add<SumFwd>({
    {"reference", kReference, nullptr, reference::run},
        {"cpu", kPortable, nullptr, cpu::run, cpu::workspace},
#if FK_HAVE_CUDA
        {"cuda", kPortable, nullptr, cuda::run, cuda::workspace, Device::kCuda},
#endif
  });
  registry.add<SumBwd>({
    {"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run},
#if FK_HAVE_CUDA
        {"cuda", kPortable, nullptr, cuda::run, nullptr, Device::kCuda},
#endif
  });
  registry.add<MaxFwd>({
    {"reference", kReference, nullptr, reference::run},
        {"cpu", kPortable, nullptr, cpu::run, cpu::workspace},
#if FK_HAVE_CUDA
        {"cuda", kPortable, nullptr, cuda::run, cuda::workspace, Device::kCuda},
#endif
  });
  registry.add<MaxBwd>({
    {"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run},
#if FK_HAVE_CUDA
        {"cuda", kPortable, nullptr, cuda::run, cuda::workspace, Device::kCuda},
#endif
  });
}

}  // namespace fk
