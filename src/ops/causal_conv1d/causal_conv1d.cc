// causal_conv1d and its update: argument checks beyond types and shapes, and what implements them.
#include "ops/causal_conv1d/causal_conv1d.h"

#include <string>

namespace fk {

namespace {

Status check_width(const Tensor& weight) {
  const int64_t width = weight.size(1);
  if (width >= kMinConvWidth && width <= kMaxConvWidth) return {};
  return invalid("weight: expected " + std::to_string(kMinConvWidth) + " to " +
                 std::to_string(kMaxConvWidth) + " taps (its last size), got " +
                 std::to_string(width));
}

Status check_rows(const char* name, const Tensor& state, int64_t sequences) {
  if (!state || state.size(0) == sequences) return {};
  return invalid(std::string(name) + ": expected " + std::to_string(sequences) +
                 " rows, one per sequence, got " + std::to_string(state.size(0)));
}

template <class Args>
int64_t sequences(const Args& a) {
  return a.cu_seqlens ? a.cu_seqlens.size(0) - 1 : a.x.size(0);
}

// Checks what the forward and the backward ask alike.
template <class Args>
Status check(const Args& a) {
  FK_RETURN_IF_ERROR(check_width(a.weight));
  if (a.cu_seqlens) {
    if (a.cu_seqlens.size(0) == 0) {
      return invalid("cu_seqlens: expected at least 1 value, got none");
    }
    if (a.x.size(0) != 1) {
      return invalid("cu_seqlens: expected a batch of 1, sequences being packed along L, got " +
                     std::to_string(a.x.size(0)));
    }
  }
  return check_rows("initial_state", a.initial_state, sequences(a));
}

}  // namespace

Status CausalConv1dFwd::validate(const CausalConv1dFwd& a) { return check(a); }

Status CausalConv1dBwd::validate(const CausalConv1dBwd& a) {
  FK_RETURN_IF_ERROR(check(a));
  return check_rows("dfinal_state", a.dfinal_state, sequences(a));
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
