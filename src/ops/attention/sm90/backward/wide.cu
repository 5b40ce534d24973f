// This file launches attention's backward on Hopper for head sizes above 128; values of 128 columns
// beside 192 have kernels of their own.
#include "ops/attention/sm90/backward/launch.h"
#include "ops/attention/sm90/backward/pair.cuh"
#include "ops/attention/sm90/backward/wide.cuh"

namespace fk::cuda_sm90::backward {
namespace {

template <class T, int kD, Kind kKind>
Status launch_wide_kernel(const AttentionBwd& a, const Exec& exec) {
  return launch(a, exec, attention_backward_wide_kernel<T, kD, kKind>, sizeof(WideTiles<kD>));
}

template <class T>
Status launch_wide_type(const AttentionBwd& a, const Exec& exec) {
  if (has_features(a)) return launch_wide_kernel<T, 256, Kind::kFeatures>(a, exec);
  if (head_size(a) == 256) return launch_wide_kernel<T, 256, Kind::kEither>(a, exec);
  if (!in_pairs(a)) return launch_wide_kernel<T, 192, Kind::kEither>(a, exec);
  using Shared = PairTiles<192, 128>;
  return launch(a, exec, attention_backward_pair_kernel<T, 192, 128, Kind::kEither>, sizeof(Shared),
                Shared::kThreads);
}

}  // namespace

Status launch_wide(const AttentionBwd& a, const Exec& exec) {
  return a.q.dtype == DType::kFloat16 ? launch_wide_type<__half>(a, exec)
                                      : launch_wide_type<__nv_bfloat16>(a, exec);
}

}  // namespace fk::cuda_sm90::backward
