// softmax, log_softmax and logsumexp: what implements them.
#include "ops/softmax/softmax.h"

namespace fk {

void register_softmax(Registry& registry) {
  registry.add<SoftmaxFwd>({
    {"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run},
#if FK_HAVE_CUDA
        {"cuda", kPortable, nullptr, cuda::run, cuda::workspace, Device::kCuda},
#endif
  });
  registry.add<SoftmaxBwd>({
    {"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run},
#if FK_HAVE_CUDA
        {"cuda", kPortable, nullptr, cuda::run, cuda::workspace, Device::kCuda},
#endif
  });
  registry.add<LogSoftmaxFwd>({
    {"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run},
#if FK_HAVE_CUDA
        {"cuda", kPortable, nullptr, cuda::run, cuda::workspace, Device::kCuda},
#endif
  });
  registry.add<LogSoftmaxBwd>({
    {"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run},
#if FK_HAVE_CUDA
        {"cuda", kPortable, nullptr, cuda::run, cuda::workspace, Device::kCuda},
#endif
  });
  registry.add<LogSumExpFwd>({
    {"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run},
#if FK_HAVE_CUDA
        {"cuda", kPortable, nullptr, cuda::run, cuda::workspace, Device::kCuda},
#endif
  });
  registry.add<LogSumExpBwd>({
    {"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run},
#if FK_HAVE_CUDA
        {"cuda", kPortable, nullptr, cuda::run, nullptr, Device::kCuda},
#endif
  });
}

}  // namespace fk
