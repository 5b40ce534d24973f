// This file lists what implements merge_attention_states.
#include "ops/merge_attention_states/merge_attention_states.h"

namespace fk {

void register_merge_attention_states(Registry& registry) {
  registry.add<MergeAttentionStatesFwd>(
      {{"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run}});
  registry.add<MergeAttentionStatesBwd>(
      {{"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run}});
#if FK_HAVE_CUDA
  registry.add_cuda<MergeAttentionStatesFwd>({{"cuda", kPortable, nullptr, cuda::run}});
  registry.add_cuda<MergeAttentionStatesBwd>({{"cuda", kPortable, nullptr, cuda::run}});
#endif
}

}  // namespace fk
