// This file says which calls attention's backward on Hopper takes, for head sizes up to 128.
// Rotated q and k are made ahead, and their gradients rotated back, by passes of cuda/rotate.h.
#include <algorithm>
#include <cstddef>

#include "ops/attention/cuda/rotate.h"
#include "ops/attention/sm90/backward/backward.cuh"
#include "ops/attention/sm90/backward/launch.h"
#include "ops/attention/sm90/tensors.h"

namespace fk::cuda_sm90 {

namespace backward {
namespace {

template <class T, int kD, int kM, Kind kKind>
Status launch_kernel(const AttentionBwd& a, const Exec& exec) {
  return launch(a, exec, attention_backward_kernel<T, kD, kM, kKind>, kSharedBytes<kD, kM>);
}

template <class T>
Status launch_type(const AttentionBwd& a, const Exec& exec) {
  const attention::Problem problem = attention::problem_of(a);
  const bool features = has_features(a);
  const int d = head_size(a);
  if (d > 128) return launch_wide(a, exec);
  if (d == 96) return launch_kernel<T, 96, 80, Kind::kEither>(a, exec);
  if (d == 64) {
    if (features) return launch_kernel<T, 64, 64, Kind::kFeatures>(a, exec);
    return problem.packed ? launch_kernel<T, 64, 128, Kind::kPacked>(a, exec)
                          : launch_kernel<T, 64, 128, Kind::kBatch>(a, exec);
  }
  if (features) return launch_kernel<T, 128, 64, Kind::kFeatures>(a, exec);
  if (queries(a, problem, a.deterministic || exec.deterministic()) == 80) {
    return problem.packed ? launch_kernel<T, 128, 80, Kind::kPacked>(a, exec)
                          : launch_kernel<T, 128, 80, Kind::kBatch>(a, exec);
  }
  return problem.packed ? launch_kernel<T, 128, 64, Kind::kPacked>(a, exec)
                        : launch_kernel<T, 128, 64, Kind::kBatch>(a, exec);
}

// Returns whether the copy engine and accesses of 16 bytes take the strides.
bool strides_fit(const Tensor& t) {
  if (t.stride(-1) != 1) return false;
  for (int i = 0; i + 1 < t.ndim; ++i) {
    if (!cuda::tensor_map_takes(t.shape[i], t.strides[i] * 2)) return false;
  }
  return true;
}

Status launch_call(const AttentionBwd& a, const Exec& exec) {
  return a.q.dtype == DType::kFloat16 ? launch_type<__half>(a, exec)
                                      : launch_type<__nv_bfloat16>(a, exec);
}

// Returns the call without its rotation. What is rotated, and its gradients, stand in the workspace
// behind `bytes`, which grow by theirs.
AttentionBwd without_rotation(const AttentionBwd& a, char* workspace, int64_t* bytes) {
  AttentionBwd b = a;
  b.rotary_cos = b.rotary_sin = {};
  for (Tensor* t : {&b.q, &b.k, &b.dq, &b.dk}) {
    if (!*t) continue;
    *t = without_gaps(*t, workspace == nullptr ? nullptr : workspace + *bytes);
    *bytes += WorkspaceParts::rounded(t->numel() * size_of(t->dtype));
  }
  return b;
}

Status launch_rotated(const AttentionBwd& a, const Exec& exec) {
  const cudaStream_t stream = cuda::stream_of(exec);
  const attention::Problem problem = attention::problem_of(a);
  const cuda::attention::Rotation rotation = cuda::attention::rotation_of(a);
  int64_t bytes = Plan(a, a.deterministic || exec.deterministic()).bytes;
  const AttentionBwd b = without_rotation(a, exec.workspace<char>(), &bytes);
  const cuda::attention::Preparation tensors[] = {{&a.q, true, rotation, b.q.data},
                                                  {&a.k, false, rotation, b.k.data}};
  FK_RETURN_IF_ERROR(
      cuda::attention::prepare(problem, cuda::attention::Form::kSame, tensors, 2, stream));
  FK_RETURN_IF_ERROR(launch_call(b, exec));
  if (a.dq) {
    FK_RETURN_IF_ERROR(
        cuda::attention::rotate_back(problem, b.dq.data, true, rotation, a.dq, stream));
  }
  return a.dk ? cuda::attention::rotate_back(problem, b.dk.data, false, rotation, a.dk, stream)
              : Status{};
}

}  // namespace

}  // namespace backward

bool aligned(const AttentionBwd& a) {
  return all_aligned({&a.dout, &a.q, &a.k, &a.v, &a.out, &a.dq, &a.dk, &a.dv});
}

bool takes(const AttentionBwd& a) {
  const DType dtype = a.q.dtype;
  if (dtype != DType::kFloat16 && dtype != DType::kBFloat16) return false;
  if (cuda::device_properties(a.q.device_id).code < 90) return false;
  // The sum of dQ is turned into rows 16 columns at a time.
  if (a.q.size(-1) % 16 != 0 || a.v.size(-1) % 8 != 0) return false;
  if (a.bias) return false;
  if (a.q.numel() == 0 || a.k.numel() == 0 || a.v.numel() == 0) return false;
  if (a.alibi_slopes && a.alibi_slopes.dtype != DType::kFloat32) return false;
  if (a.sinks && a.sinks.dtype == DType::kFloat64) return false;
  const backward::Plan plan(a, false);
  if (plan.problem.batch == 0) return false;
  if (std::max(plan.problem.q_len, plan.problem.k_len) >= backward::kFar) return false;
  if (std::max(plan.blocks, plan.tiles) >= (int64_t{1} << 27)) return false;
  for (const Tensor* t : {&a.dout, &a.q, &a.k, &a.v, &a.out, &a.dq, &a.dk, &a.dv}) {
    if (*t && !backward::strides_fit(*t)) return false;
  }
  return true;
}

size_t workspace(const AttentionBwd& a) {
  int64_t own = std::max(backward::Plan(a, false).bytes, backward::Plan(a, true).bytes);
  if (cuda::attention::rotation_of(a).pairs > 0) backward::without_rotation(a, nullptr, &own);
  return static_cast<size_t>(own);
}

Status run(const AttentionBwd& a, const Exec& exec) {
  return cuda::attention::rotation_of(a).pairs > 0 ? backward::launch_rotated(a, exec)
                                                   : backward::launch_call(a, exec);
}

}  // namespace fk::cuda_sm90
