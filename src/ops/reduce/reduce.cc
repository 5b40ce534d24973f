// This file lists what implements sum and max.
#include "ops/reduce/reduce.h"

namespace fk {

void register_reduce(Registry& registry) {
  registry.add<SumFwd>({{"reference", kReference, nullptr, reference::run},
                        {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
  registry.add<SumBwd>(
      {{"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run}});
  registry.add<MaxFwd>({{"reference", kReference, nullptr, reference::run},
                        {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
  registry.add<MaxBwd>(
      {{"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run}});
#if FK_HAVE_CUDA
  registry.add_cuda<SumFwd>({{"cuda", kPortable, nullptr, cuda::run, cuda::workspace}});
  registry.add_cuda<SumBwd>({{"cuda", kPortable, nullptr, cuda::run}});
  registry.add_cuda<MaxFwd>({{"cuda", kPortable, nullptr, cuda::run, cuda::workspace}});
  registry.add_cuda<MaxBwd>({{"cuda", kPortable, nullptr, cuda::run, cuda::workspace}});
#endif
}

}  // namespace fk
