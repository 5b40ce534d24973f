// Attention on any GPU from Turing on: the forward's host side. The kernels are in
// cuda/forward.cuh.
#include "ops/attention/cuda/forward_launch.h"
#include "ops/attention/cuda/plan.h"

namespace fk::cuda {
namespace attention {
namespace {

struct ForwardPlan {
  Problem problem;
  Form form;
  Maxima maxima;
  Prepared q, k, v;

  ForwardPlan(const AttentionFwd& a, int code, WorkspaceParts* parts)
      : problem(fk::attention::problem_of(a)),
        form(form_of(a.q.dtype, code)),
        maxima(problem, form, 3, parts),
        q(a.q, true, rotation_of(a), form, maxima.of(0), parts,
          fk::attention::slope_view(a.q_scale), true),
        k(a.k, false, rotation_of(a), form, maxima.of(1), parts,
          fk::attention::slope_view(a.k_scale)),
        v(a.v, false, Rotation(), form, maxima.of(2), parts, fk::attention::slope_view(a.v_scale)) {
  }
};

}  // namespace
}  // namespace attention

size_t workspace(const AttentionFwd& a) {
  WorkspaceParts parts;
  attention::ForwardPlan(a, device_properties(a.q.device_id).code, &parts);
  return parts.bytes();
}

Status run(const AttentionFwd& a, const Exec& exec) {
  using namespace attention;  // NOLINT: this room's own
  const DeviceProperties& properties = device_properties(a.q.device_id);
  const cudaStream_t stream = stream_of(exec);
  WorkspaceParts parts(exec.workspace());
  ForwardPlan plan(a, properties.code, &parts);
  const Problem& problem = plan.problem;
  if (problem.batch == 0 || problem.heads == 0 || problem.q_len == 0) return {};
  const ScoreChange change = score_change_of(a, problem);
  const int dim = dim_of(problem);
  const auto aligned = [&](Prepared x) {
    x.form = Form::kSame;
    return x.operand(problem).vectors;
  };
  const bool hopper = properties.code >= 90 && plan.form == Form::kTwoTerms && dim <= 128 &&
                      change.plain && aligned(plan.q) && aligned(plan.k) && aligned(plan.v);
  if (hopper) plan.q.form = plan.k.form = plan.v.form = Form::kSame;
  FK_RETURN_IF_ERROR(prepare(problem, {&plan.q, &plan.k, &plan.v}, stream));

  Forward p = {};
  p.problem = problem;
  p.q = plan.q.operand(problem);
  p.k = plan.k.operand(problem);
  p.v = plan.v.operand(problem);
  if (plan.q.inside) p.q_floats = a.q.ptr<const float>();
  p.group = static_cast<int>(problem.group());
  p.out = result_of(a.out);
  p.lse = fk::attention::row_view(a.lse);
  p.change = change;
  if (a.sinks) {
    p.sinks = {a.sinks.data, 0, 0, a.sinks.stride(0), 0};
    p.sinks_dtype = a.sinks.dtype;
  }
  if (hopper) return launch_forward_float_sm90(p, dim, properties, stream);
  const bool features =
      !change.plain || (!p.q.vectors && !plan.q.inside) || !p.k.vectors || !p.v.vectors;
  switch (plan.form) {
    case Form::kTwoTerms:
      return launch_forward<__half, 2>(p, dim, features, properties, stream);
    case Form::kScaled:
      return launch_forward<__half, 1>(p, dim, features, properties, stream);
    default:
      return a.q.dtype == DType::kFloat16
                 ? launch_forward<__half, 1>(p, dim, features, properties, stream)
                 : launch_forward<__nv_bfloat16, 1>(p, dim, features, properties, stream);
  }
}

}  // namespace fk::cuda
