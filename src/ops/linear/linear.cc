// linear: what implements it, and what its declaration cannot say.
#include "ops/linear/linear.h"

namespace fk {

Status LinearBwd::validate(const LinearBwd& a) {
  if (a.activation != 0 && !a.before) {
    return invalid("before: expected what the forward keeps for its activation, got none");
  }
  return {};
}

void register_linear(Registry& registry) {
  registry.add<LinearFwd>({{"reference", kReference, nullptr, reference::run},
                           {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
  registry.add<LinearBwd>({{"reference", kReference, nullptr, reference::run},
                           {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
#if FK_HAVE_CUDA
  registry.add_cuda<LinearFwd>(
      {{"cuda", kPortable, nullptr, cuda::run, cuda::workspace},
       {"cuda_sm90", kTuned, cuda_sm90::accepts, cuda_sm90::run, cuda_sm90::workspace}});
  registry.add_cuda<LinearBwd>(
      {{"cuda", kPortable, nullptr, cuda::run, cuda::workspace},
       {"cuda_sm90", kTuned, cuda_sm90::accepts, cuda_sm90::run, cuda_sm90::workspace}});
#endif
}

}  // namespace fk
