// selective_scan: argument checks beyond types and shapes, and what implements it.
#include "ops/selective_scan/selective_scan.h"

#include <string>
#include <utility>

#include "core/sequences.h"
#if FK_HAVE_CUDA
#include "core/staged.h"
#include "cuda/output_stage.h"
#endif

namespace fk {

namespace {

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
  FK_RETURN_IF_ERROR(check_sequences(a.u, a.cu_seqlens));
  return check_state_rows("initial_state", a.initial_state, a.u, a.cu_seqlens);
}

}  // namespace

Status SelectiveScanFwd::validate(const SelectiveScanFwd& a) {
  FK_RETURN_IF_ERROR(check_stage(a));
  return check(a);
}

Status SelectiveScanBwd::validate(const SelectiveScanBwd& a) {
  FK_RETURN_IF_ERROR(check_stage(a));
  FK_RETURN_IF_ERROR(check(a));
  return check_state_rows("dlast_state", a.dlast_state, a.u, a.cu_seqlens);
}

void register_selective_scan(Registry& registry) {
  registry.add<SelectiveScanFwd>({{"reference", kReference, nullptr, reference::run},
                                  {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
  registry.add<SelectiveScanBwd>({{"reference", kReference, nullptr, reference::run},
                                  {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
#if FK_HAVE_CUDA
  registry.add_cuda<SelectiveScanFwd>(
      {staged<SelectiveScanFwd, cuda::Stage, cuda::run, cuda::workspace>("cuda", kPortable),
       staged<SelectiveScanFwd, cuda::Stage, cuda_sm90::run, cuda::workspace, false,
              cuda_sm90::accepts>("cuda_sm90", kTuned)});
  registry.add_cuda<SelectiveScanBwd>(
      {staged<SelectiveScanBwd, cuda::Stage, cuda::run, cuda::workspace>("cuda", kPortable)});
#endif
}

}  // namespace fk
