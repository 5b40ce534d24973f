// selective_scan: argument checks beyond types and shapes, and what implements it.
#include "ops/selective_scan/selective_scan.h"

#include <string>
#include <utility>

#include "ops/selective_scan/problem.h"

namespace fk {

namespace {

Status check_rows(const char* name, const Tensor& state, int64_t sequences) {
  if (!state || state.size(0) == sequences) return {};
  return invalid(std::string(name) + ": expected " + std::to_string(sequences) +
                 " rows, one per sequence, got " + std::to_string(state.size(0)));
}

// Checks what the forward and the backward ask alike.
template <class Args>
Status check(const Args& a) {
  const int64_t channels = a.u.size(2), states = a.A.size(1);
  if (states < 1 || states > kMaxScanStates) {
    return invalid("A: expected 1 to " + std::to_string(kMaxScanStates) +
                   " states (its last size), got " + std::to_string(states));
  }
  const int64_t groups = a.B.ndim == 4 ? a.B.size(2) : 1;
  if (groups == 0 || channels % groups != 0) {
    return invalid("B: expected a number of groups that divides u's " + std::to_string(channels) +
                   " channels, got " + std::to_string(groups));
  }
  if (a.cu_seqlens) {
    if (a.cu_seqlens.size(0) == 0) {
      return invalid("cu_seqlens: expected at least 1 value, got none");
    }
    if (a.u.size(0) != 1) {
      return invalid("cu_seqlens: expected a batch of 1, sequences being packed along L, got " +
                     std::to_string(a.u.size(0)));
    }
  }
  return check_rows("initial_state", a.initial_state, scan::problem_of(a).sequences.count);
}

}  // namespace

Status SelectiveScanFwd::validate(const SelectiveScanFwd& a) { return check(a); }

Status SelectiveScanBwd::validate(const SelectiveScanBwd& a) {
  FK_RETURN_IF_ERROR(check(a));
  return check_rows("dlast_state", a.dlast_state, scan::problem_of(a).sequences.count);
}

void register_selective_scan(Registry& registry) {
  registry.add<SelectiveScanFwd>({{"reference", kReference, nullptr, reference::run},
                                  {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
  registry.add<SelectiveScanBwd>({{"reference", kReference, nullptr, reference::run},
                                  {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
#if FK_HAVE_CUDA
  registry.add_cuda<SelectiveScanFwd>(
      {{"cuda", kPortable, nullptr, cuda::run, cuda::workspace},
       {"cuda_sm90", kTuned, cuda_sm90::accepts, cuda_sm90::run, cuda::workspace}});
  registry.add_cuda<SelectiveScanBwd>({{"cuda", kPortable, nullptr, cuda::run, cuda::workspace}});
#endif
}

}  // namespace fk
