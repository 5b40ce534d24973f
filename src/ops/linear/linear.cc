// linear and gated_linear: what implements them, and what their declarations cannot say.
#include "ops/linear/linear.h"

#include "ops/linear/gated_linear.h"
#include "ops/linear/scaled_linear.h"
#if FK_HAVE_CUDA
#include "core/staged.h"
#include "cuda/output_stage.h"
#endif

namespace fk {

Status LinearBwd::validate(const LinearBwd& a) {
  FK_RETURN_IF_ERROR(check_stage(a));
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

Status ScaledLinearFwd::validate(const ScaledLinearFwd& a) {
  const int64_t columns = a.weight.size(0), blocks = scale_blocks(a.weight.size(1));
  if (a.x_scale.ndim > 1) {
    const int64_t got = a.x_scale.size(-1);
    if (got != 1 && got != blocks) {
      return invalid("x_scale: expected 1 or " + std::to_string(blocks) +
                     " scales for each row, got " + std::to_string(got));
    }
  }
  if (a.weight_scale.ndim == 2) {
    const int64_t rows = a.weight_scale.size(0), along = a.weight_scale.size(1);
    const bool by_rows = rows == columns && along == 1;
    if (!by_rows && (rows != scale_blocks(columns) || along != blocks)) {
      return invalid("weight_scale: expected shape (1), (" + std::to_string(columns) + ", 1) or (" +
                     std::to_string(scale_blocks(columns)) + ", " + std::to_string(blocks) +
                     "), got " + shape_string(a.weight_scale));
    }
  }
  return {};
}

#if FK_HAVE_CUDA
namespace {

// Its kernels add the residual; those of few rows write the norm too, which else is a launch behind
// them.
template <class Args, bool (*kWrites)(const Args&)>
void add_cuda_linear(Registry& registry) {
  registry.add_cuda<Args>(
      {staged<Args, cuda::Stage, cuda::run, cuda::workspace, true, nullptr, kWrites>("cuda",
                                                                                     kPortable),
       staged<Args, cuda::Stage, cuda_sm90::run, cuda_sm90::workspace, true, cuda_sm90::accepts>(
           "cuda_sm90", kTuned)});
}

}  // namespace
#endif

void register_linear(Registry& registry) {
  registry.add<LinearFwd>({{"reference", kReference, nullptr, reference::run},
                           {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
  registry.add<LinearBwd>({{"reference", kReference, nullptr, reference::run},
                           {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
  registry.add<GatedLinearFwd>({{"reference", kReference, nullptr, reference::run},
                                {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
  registry.add<GatedLinearBwd>({{"reference", kReference, nullptr, reference::run},
                                {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
  registry.add<ScaledLinearFwd>({{"reference", kReference, nullptr, reference::run},
                                 {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
#if FK_HAVE_CUDA
  add_cuda_linear<LinearFwd, cuda::writes_norm>(registry);
  add_cuda_linear<LinearBwd, nullptr>(registry);
  registry.add_cuda<GatedLinearFwd>(
      {{"cuda", kPortable, nullptr, cuda::run, cuda::workspace},
       {"cuda_sm90", kTuned, cuda_sm90::accepts, cuda_sm90::run, cuda_sm90::workspace}});
  registry.add_cuda<GatedLinearBwd>(
      {{"cuda", kPortable, nullptr, cuda::run, cuda::workspace},
       {"cuda_sm90", kTuned, cuda_sm90::accepts, cuda_sm90::run, cuda_sm90::workspace}});
  registry.add_cuda<ScaledLinearFwd>(
      {{"cuda", kPortable, nullptr, cuda::run, cuda::workspace},
       {"cuda_sm90", kTuned, cuda_sm90::accepts, cuda_sm90::run, cuda_sm90::workspace}});
#endif
}

}  // namespace fk
