// Attention's backward on Hopper, head sizes above 128; values of 128 columns beside 192 have
// kernels of their own.
#include "ops/attention/cuda_sm90_backward_launch.cuh"
#include "ops/attention/cuda_sm90_backward_wide.cuh"

namespace fk::cuda_sm90::backward {
namespace {

template <class T, int kD, int kE>
Status launch_type(const AttentionBwd& a, const Exec& exec) {
  auto* kernel = attention_backward_wide_kernel<T, kD, kE, Kind::kEither>;
  if constexpr (kD == kE) {
    if (has_features(a)) kernel = attention_backward_wide_kernel<T, kD, kE, Kind::kFeatures>;
  }
  return launch<T, kD, 64>(a, exec, kernel, sizeof(WideTiles<kD, kE>));
}

template <class T>
Status launch_size(const AttentionBwd& a, const Exec& exec) {
  if (head_size(a) == 256) return launch_type<T, 256, 256>(a, exec);
  return a.v.size(-1) > 128 || has_features(a) ? launch_type<T, 192, 192>(a, exec)
                                               : launch_type<T, 192, 128>(a, exec);
}

}  // namespace

Status launch_wide(const AttentionBwd& a, const Exec& exec) {
  return a.q.dtype == DType::kFloat16 ? launch_size<__half>(a, exec)
                                      : launch_size<__nv_bfloat16>(a, exec);
}

}  // namespace fk::cuda_sm90::backward
