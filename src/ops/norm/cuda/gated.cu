// rms_norm with a gate or with groups of columns, on CUDA: chooses the kernel of cuda/gated.cuh,
// and launches.
#include "cuda/norm/views.cuh"
#include "ops/norm/cuda/gated.cuh"
#include "ops/norm/norm.h"

namespace fk::cuda_gated {
namespace {

using namespace cuda;        // NOLINT: launches, streams
using namespace cuda::norm;  // NOLINT: the kernels' own namespace

constexpr int kGatedThreads = 256;

template <class Args>
Gated gated_of(const Args& a) {
  Gated p;
  p.x = view_of(a.x, 1);
  p.gate = view_of(a.gate, 1);
  p.weight = parameter_of(a.weight, 1.f, static_cast<float>(a.weight_offset));
  p.rows = p.x.rows.count;
  p.columns = a.x.size(-1);
  p.group = a.group_size > 0 ? a.group_size : p.columns;
  p.eps = static_cast<float>(a.eps);
  p.norm_before_gate = a.norm_before_gate;
  return p;
}

// Whether groups are of whole vectors, which start where vectors do.
bool whole_vectors(const Gated& p, const Tensor& x) { return p.group * size_of(x.dtype) % 16 == 0; }

}  // namespace

Status run(const RmsNormFwd& a, const Exec& exec) {
  Gated p = gated_of(a);
  if (p.rows == 0 || p.columns == 0) return {};
  p.residual = view_of(a.residual, 1);
  p.y = view_of(a.y, 1);
  p.sum = view_of(a.sum, 1);
  p.rstd = view_of(a.rstd, 0);
  const bool aligned =
      whole_vectors(p, a.x) && all_vectorised(a.x, a.residual, a.gate, a.y, a.sum, a.weight);
  return for_dtype(a.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto kernel = aligned ? gated_forward<T, kVecWidth<T>, kGatedThreads>
                                : gated_forward<T, 1, kGatedThreads>;
    const int64_t items = p.rows * (p.columns / p.group);
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(items, 1 << 20));
    return launch_early(kernel, "norm gated_forward", {blocks, kGatedThreads}, stream_of(exec), p);
  });
}

size_t workspace(const RmsNormBwd& a) {
  const int64_t rows = rows_of(a.x).count;
  return a.dweight ? sizeof(float) * looped_backward_blocks(a.x, rows) * a.x.size(-1) : 0;
}

Status run(const RmsNormBwd& a, const Exec& exec) {
  Gated p = gated_of(a);
  if (p.columns == 0) return {};
  p.dy = view_of(a.dy, 1);
  p.dsum = view_of(a.dsum, 1);
  p.dx = view_of(a.dx, 1);
  p.dgate = view_of(a.dgate, 1);
  const bool aligned =
      whole_vectors(p, a.x) && all_vectorised(a.x, a.dy, a.dsum, a.gate, a.dx, a.dgate, a.weight);
  const int blocks = looped_backward_blocks(a.x, p.rows);
  Gradients gradients;
  gradients.columns = p.columns;
  gradients.blocks = blocks;
  if (a.dweight) {
    p.dweight = exec.workspace<float>();
    gradients.gradients[0] = gradient_of(a.dweight, p.dweight);
  }
  const cudaStream_t stream = stream_of(exec);
  if (blocks > 0) {
    FK_RETURN_IF_ERROR(for_dtype(a.x.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      const auto kernel = aligned ? gated_backward<T, kVecWidth<T>, kGatedThreads>
                                  : gated_backward<T, 1, kGatedThreads>;
      const dim3 grid(static_cast<unsigned>(blocks),
                      static_cast<unsigned>(std::min<int64_t>(p.columns / p.group, 65535)));
      return launch_early(kernel, "norm gated_backward", {grid, kGatedThreads}, stream, p);
    }));
  }
  return a.dweight ? launch_add_partials(gradients, stream) : Status();
}

}  // namespace fk::cuda_gated
