// merge_attention_states: argument checks beyond types and shapes, and what implements it.
#include "ops/merge_attention_states/merge_attention_states.h"

#include <string>

namespace fk {

namespace {

// All batched, or all packed.
Status check_rank(const char* name, const Tensor& t, int expected) {
  if (!t || t.ndim == expected) return {};
  return invalid(std::string(name) + ": expected " + std::to_string(expected) +
                 " dimensions to fit outs, got " + std::to_string(t.ndim));
}

}  // namespace

Status MergeAttentionStatesFwd::validate(const MergeAttentionStatesFwd& a) {
  return check_rank("lses", a.lses, a.outs.ndim - 1);
}

Status MergeAttentionStatesBwd::validate(const MergeAttentionStatesBwd& a) {
  FK_RETURN_IF_ERROR(check_rank("dout", a.dout, a.outs.ndim - 1));
  FK_RETURN_IF_ERROR(check_rank("dlse", a.dlse, a.outs.ndim - 2));
  return check_rank("lses", a.lses, a.outs.ndim - 1);
}

void register_merge_attention_states(Registry& registry) {
  registry.add<MergeAttentionStatesFwd>({
    {"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run},
#if FK_HAVE_CUDA
        {"cuda", kPortable, nullptr, cuda::run, nullptr, Device::kCuda},
#endif
  });
  registry.add<MergeAttentionStatesBwd>({
    {"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run},
#if FK_HAVE_CUDA
        {"cuda", kPortable, nullptr, cuda::run, nullptr, Device::kCuda},
#endif
  });
}

}  // namespace fk
