// ssd: argument checks beyond types and shapes, and what implements it.
#include "ops/ssd/ssd.h"

#include <cstdio>
#include <string>

#include "ops/ssd/problem.h"

namespace fk {

namespace {

Status check_size(const char* name, const char* what, int64_t size, int64_t most) {
  if (size >= 1 && size <= most) return {};
  return invalid(std::string(name) + ": expected 1 to " + std::to_string(most) + " " + what +
                 " (its last size), got " + std::to_string(size));
}

Status check_rows(const char* name, const Tensor& state, int64_t sequences) {
  if (!state || state.size(0) == sequences) return {};
  return invalid(std::string(name) + ": expected " + std::to_string(sequences) +
                 " rows, one per sequence, got " + std::to_string(state.size(0)));
}

// What the forward and the backward check alike.
template <class Args>
Status check(const Args& a) {
  FK_RETURN_IF_ERROR(check_size("x", "channels of a head", a.x.size(3), kMaxSsdChannels));
  FK_RETURN_IF_ERROR(check_size("B", "states", a.B.size(3), kMaxSsdStates));
  const int64_t heads = a.x.size(2), groups = a.B.size(2);
  if (groups == 0 ? heads != 0 : heads % groups != 0) {
    return invalid("B: expected a number of groups that divides x's " + std::to_string(heads) +
                   " heads, got " + std::to_string(groups));
  }
  if (a.dt_limit_min > a.dt_limit_max) {
    char text[96];
    std::snprintf(text, sizeof text,
                  "dt_limit: expected a least that is not above the most, got (%g, %g)",
                  a.dt_limit_min, a.dt_limit_max);
    return invalid(text);
  }
  if (a.cu_seqlens) {
    if (a.cu_seqlens.size(0) == 0) {
      return invalid("cu_seqlens: expected at least 1 value, got none");
    }
    if (a.x.size(0) != 1) {
      return invalid("cu_seqlens: expected a batch of 1, sequences being packed along L, got " +
                     std::to_string(a.x.size(0)));
    }
  }
  return check_rows("initial_state", a.initial_state, ssd::problem_of(a).sequences.count);
}

}  // namespace

Status SsdFwd::validate(const SsdFwd& a) { return check(a); }

Status SsdBwd::validate(const SsdBwd& a) {
  FK_RETURN_IF_ERROR(check(a));
  return check_rows("dfinal_state", a.dfinal_state, ssd::problem_of(a).sequences.count);
}

void register_ssd(Registry& registry) {
  registry.add<SsdFwd>({{"reference", kReference, nullptr, reference::run},
                        {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
  registry.add<SsdBwd>({{"reference", kReference, nullptr, reference::run},
                        {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
#if FK_HAVE_CUDA
  registry.add_cuda<SsdFwd>({{"cuda", kPortable, nullptr, cuda::run, cuda::workspace}});
  registry.add_cuda<SsdBwd>({{"cuda", kPortable, nullptr, cuda::run, cuda::workspace}});
#endif
}

}  // namespace fk
