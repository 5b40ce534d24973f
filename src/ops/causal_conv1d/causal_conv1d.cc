// This file checks the arguments of causal_conv1d and its update beyond their types and shapes, and
// lists what implements them.
#include "ops/causal_conv1d/causal_conv1d.h"

#include <string>

#include "core/sequences.h"

namespace fk {

namespace {

Status check_width(const Tensor& weight) {
  const int64_t width = weight.size(1);
  if (width >= kMinConvWidth && width <= kMaxConvWidth) return {};
  return invalid("weight: expected " + std::to_string(kMinConvWidth) + " to " +
                 std::to_string(kMaxConvWidth) + " taps (its last size), got " +
                 std::to_string(width));
}

// Checks what the forward and the backward ask alike.
template <class Args>
Status check(const Args& a) {
  FK_RETURN_IF_ERROR(check_width(a.weight));
  FK_RETURN_IF_ERROR(check_sequences(a.x, a.cu_seqlens));
  return check_state_rows("initial_state", a.initial_state, a.x, a.cu_seqlens);
}

}  // namespace

Status CausalConv1dFwd::validate(const CausalConv1dFwd& a) { return check(a); }

Status CausalConv1dBwd::validate(const CausalConv1dBwd& a) {
  FK_RETURN_IF_ERROR(check(a));
  return check_state_rows("dfinal_state", a.dfinal_state, a.x, a.cu_seqlens);
}

Status CausalConv1dUpdateFwd::validate(const CausalConv1dUpdateFwd& a) {
  return check_width(a.weight);
}

void register_causal_conv1d(Registry& registry) {
  registry.add<CausalConv1dFwd>(
      {{"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run}});
  registry.add<CausalConv1dBwd>({{"reference", kReference, nullptr, reference::run},
                                 {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
  registry.add<CausalConv1dUpdateFwd>(
      {{"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run}});
#if FK_HAVE_CUDA
  registry.add_cuda<CausalConv1dFwd>({{"cuda", kPortable, nullptr, cuda::run}});
  registry.add_cuda<CausalConv1dBwd>({{"cuda", kPortable, nullptr, cuda::run, cuda::workspace}});
  registry.add_cuda<CausalConv1dUpdateFwd>({{"cuda", kPortable, nullptr, cuda::run}});
#endif
}

}  // namespace fk
