// Attention's backward on Hopper, head sizes from 65 to 96.
#include "ops/attention/cuda_sm90_backward.cuh"
#include "ops/attention/cuda_sm90_backward_launch.cuh"

namespace fk::cuda_sm90::backward {
namespace {

template <class T>
Status launch_type(const AttentionBwd& a, const Exec& exec) {
  constexpr int kD = 96, kM = 80;
  auto* kernel = a.cu_seqlens_q ? attention_backward_kernel<T, kD, kM, Kind::kPacked>
                                : attention_backward_kernel<T, kD, kM, Kind::kBatch>;
  return launch<T, kD, kM>(a, exec, kernel, kSharedBytes<kD, kM>);
}

}  // namespace

Status launch_96(const AttentionBwd& a, const Exec& exec) {
  return a.q.dtype == DType::kFloat16 ? launch_type<__half>(a, exec)
                                      : launch_type<__nv_bfloat16>(a, exec);
}

}  // namespace fk::cuda_sm90::backward
