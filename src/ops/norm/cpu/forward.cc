// rms_norm and layer_norm on the CPU, forward.
//
// Floor: memory traffic, one read of x (and residual) and one write of y (and sum). Threads take
// rows, which cpu/norm/forward.cc normalises.
#include "cpu/norm/forward.h"

#include "cpu/axis_plan.h"
#include "ops/norm/norm.h"

// This file has no vector code of its own, but is compiled with others that have.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/norm/cpu/forward.cc"
#include "cpu/foreach_target.h"
#include "cpu/simd.h"

#if HWY_ONCE

namespace fk::cpu {
namespace {

void forward(NormForward& job, DType dtype, bool layer, const Exec& exec) {
  const int64_t rows = job.x.rows.count;
  const bool unit = all_unit(job.x, job.residual, job.y, job.sum, job.weight, job.bias);
  job.block = block_of(job.columns, unit);
  const int64_t tensors = 2 + (job.residual.data != nullptr) + (job.sum.data != nullptr);
  job.stream = unit && job.y.data != nullptr &&
               pays_to_stream(tensors * rows * job.columns * size_of(dtype)) &&
               job.y.streams(size_of(dtype)) && job.sum.streams(size_of(dtype));
  const auto kernel = norm_forward(dtype, layer);
  exec.parallel_for(rows, grain_of(rows, job.columns),
                    [&](int64_t begin, int64_t end) { kernel(job, begin, end); });
}

}  // namespace

Status run(const RmsNormFwd& a, const Exec& exec) {
  NormForward job{Matrix(a.x),
                  Matrix(a.residual),
                  Matrix(a.y),
                  Matrix(a.sum),
                  Matrix(Tensor()),
                  Matrix(a.rstd, 0),
                  Parameter(a.weight),
                  Parameter(Tensor()),
                  a.x.size(-1),
                  static_cast<float>(a.eps),
                  static_cast<float>(a.weight_offset)};
  forward(job, a.x.dtype, false, exec);
  return {};
}

Status run(const LayerNormFwd& a, const Exec& exec) {
  NormForward job{Matrix(a.x),
                  Matrix(a.residual),
                  Matrix(a.y),
                  Matrix(a.sum),
                  Matrix(a.mean, 0),
                  Matrix(a.rstd, 0),
                  Parameter(a.weight),
                  Parameter(a.bias),
                  a.x.size(-1),
                  static_cast<float>(a.eps),
                  0.0f};
  forward(job, a.x.dtype, true, exec);
  return {};
}

}  // namespace fk::cpu

#endif  // HWY_ONCE
