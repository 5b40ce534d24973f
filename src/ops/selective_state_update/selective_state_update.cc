// selective_state_update: argument checks beyond types and shapes, and what implements it.
#include "ops/selective_state_update/selective_state_update.h"

#include <string>
#include <utility>

namespace fk {

namespace {

Status check_rank(const char* name, const Tensor& t, int rank, const Tensor& state) {
  if (!t || t.ndim == rank) return {};
  return invalid(std::string(name) + ": expected " + std::to_string(rank) +
                 " dimensions, since state has " + std::to_string(state.ndim) + ", got " +
                 std::to_string(t.ndim));
}

}  // namespace

Status SelectiveStateUpdateFwd::validate(const SelectiveStateUpdateFwd& a) {
  const int rank = a.state.ndim;
  for (const auto& [name, t] : {std::pair<const char*, const Tensor*>{"x", &a.x},
                                {"dt", &a.dt},
                                {"A", &a.A},
                                {"z", &a.z}}) {
    FK_RETURN_IF_ERROR(check_rank(name, *t, rank - 1, a.state));
  }
  FK_RETURN_IF_ERROR(check_rank("D", a.D, rank - 2, a.state));
  FK_RETURN_IF_ERROR(check_rank("dt_bias", a.dt_bias, rank - 2, a.state));
  if (a.C.ndim != a.B.ndim) {
    return invalid("C: expected " + std::to_string(a.B.ndim) + " dimensions, as B has, got " +
                   std::to_string(a.C.ndim));
  }
  const int64_t shared = a.state.size(1), groups = a.B.ndim == 3 ? a.B.size(1) : 1;
  if (groups == 0 ? shared != 0 : shared % groups != 0) {
    return invalid("B: expected a number of groups that divides state's second size " +
                   std::to_string(shared) + ", got " + std::to_string(groups));
  }
  return {};
}

void register_selective_state_update(Registry& registry) {
  registry.add<SelectiveStateUpdateFwd>({
    {"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run},
#if FK_HAVE_CUDA
        {"cuda", kPortable, nullptr, cuda::run, nullptr, Device::kCuda},
#endif
  });
}

}  // namespace fk
