// This file is the host's side of attention's forward on any GPU from Turing on.
#include "ops/attention/cuda/forward_launch.h"
#include "ops/attention/cuda/forward_plan.h"

namespace fk::cuda {

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
  const ForwardPlan plan(a, properties.code, &parts);
  if (plan.empty()) return {};
  FK_RETURN_IF_ERROR(prepare(plan.problem, {&plan.q, &plan.k, &plan.v}, stream));
  const Forward p = plan.arguments(a);
  const int dim = dim_of(plan.problem);
  const bool features =
      !p.change.plain || (!p.q.vectors && !plan.q.inside) || !p.k.vectors || !p.v.vectors;
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
