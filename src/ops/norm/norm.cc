// rms_norm and layer_norm: what implements them.
#include "ops/norm/norm.h"

#include <string>

namespace fk {

namespace {

template <class Args>
Status check_groups(const Args& a) {
  const int64_t columns = a.x.size(-1);
  if (a.group_size == 0 || columns % a.group_size == 0) return {};
  return invalid("group_size: expected a divisor of x's last size " + std::to_string(columns) +
                 ", got " + std::to_string(a.group_size));
}

template <class Args>
bool is_plain(const Args& a) {
  return !is_gated(a);
}

}  // namespace

Status RmsNormFwd::validate(const RmsNormFwd& a) { return check_groups(a); }
Status RmsNormBwd::validate(const RmsNormBwd& a) {
  if (a.dgate && !a.gate) return invalid("dgate: expected none without gate, got a tensor");
  return check_groups(a);
}

void register_norm(Registry& registry) {
  registry.add<RmsNormFwd>(
      {{"reference", kReference, nullptr, reference::run},
       {"cpu", kPortable, is_plain<RmsNormFwd>, cpu::run},
       {"cpu_gated", kTuned, is_gated<RmsNormFwd>, cpu_gated::run, cpu_gated::workspace}});
  registry.add<RmsNormBwd>(
      {{"reference", kReference, nullptr, reference::run},
       {"cpu", kPortable, is_plain<RmsNormBwd>, cpu::run, cpu::workspace},
       {"cpu_gated", kTuned, is_gated<RmsNormBwd>, cpu_gated::run, cpu_gated::workspace}});
  registry.add<LayerNormFwd>(
      {{"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run}});
  registry.add<LayerNormBwd>({{"reference", kReference, nullptr, reference::run},
                              {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
#if FK_HAVE_CUDA
  registry.add_cuda<RmsNormFwd>({{"cuda", kPortable, is_plain<RmsNormFwd>, cuda::run},
                                 {"cuda_gated", kTuned, is_gated<RmsNormFwd>, cuda_gated::run}});
  registry.add_cuda<RmsNormBwd>(
      {{"cuda", kPortable, is_plain<RmsNormBwd>, cuda::run, cuda::workspace},
       {"cuda_gated", kTuned, is_gated<RmsNormBwd>, cuda_gated::run, cuda_gated::workspace}});
  registry.add_cuda<LayerNormFwd>({{"cuda", kPortable, nullptr, cuda::run}});
  registry.add_cuda<LayerNormBwd>({{"cuda", kPortable, nullptr, cuda::run, cuda::workspace}});
#endif
}

}  // namespace fk
