// linear and gated_linear: what implements them, and what their declarations cannot say.
#include "ops/linear/linear.h"

#include "ops/linear/gated_linear.h"

namespace fk {

Status LinearBwd::validate(const LinearBwd& a) {
  if (a.activation != 0 && !a.before) {
    return invalid("before: expected what the forward keeps for its activation, got none");
  }
  return {};
}

Status GatedLinearBwd::validate(const GatedLinearBwd& a) {
  if (static_cast<bool>(a.gate) != static_cast<bool>(a.up)) {
    return invalid(std::string(a.gate ? "up" : "gate") +
                   ": expected what the forward keeps, or neither gate nor up, got one of them");
  }
  return {};
}

void register_linear(Registry& registry) {
  registry.add<LinearFwd>({{"reference", kReference, nullptr, reference::run},
                           {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
  registry.add<LinearBwd>({{"reference", kReference, nullptr, reference::run},
                           {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
  registry.add<GatedLinearFwd>({{"reference", kReference, nullptr, reference::run},
                                {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
  registry.add<GatedLinearBwd>({{"reference", kReference, nullptr, reference::run},
                                {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
#if FK_HAVE_CUDA
  registry.add_cuda<LinearFwd>(
      {{"cuda", kPortable, nullptr, cuda::run, cuda::workspace},
       {"cuda_sm90", kTuned, cuda_sm90::accepts, cuda_sm90::run, cuda_sm90::workspace}});
  registry.add_cuda<LinearBwd>(
      {{"cuda", kPortable, nullptr, cuda::run, cuda::workspace},
       {"cuda_sm90", kTuned, cuda_sm90::accepts, cuda_sm90::run, cuda_sm90::workspace}});
  registry.add_cuda<GatedLinearFwd>(
      {{"cuda", kPortable, nullptr, cuda::run, cuda::workspace},
       {"cuda_sm90", kTuned, cuda_sm90::accepts, cuda_sm90::run, cuda_sm90::workspace}});
  registry.add_cuda<GatedLinearBwd>(
      {{"cuda", kPortable, nullptr, cuda::run, cuda::workspace},
       {"cuda_sm90", kTuned, cuda_sm90::accepts, cuda_sm90::run, cuda_sm90::workspace}});
#endif
}

}  // namespace fk
