// rms_norm and layer_norm on CUDA, for the ops of that name and for the output stage of others
// (cuda/output_stage.h). Tensors that are not given are undefined; their rows may lie anywhere.
#pragma once

#include "core/tensor.h"
#include "cuda/launch.h"

namespace fk::cuda::norm {

// y = norm(s), where s is x, or x + residual rounded to x's dtype; `sum` takes s where there is a
// residual. `mean`, which is 0 of an rms_norm, and `rstd` have an entry for each row.
struct ForwardCall {
  Tensor x, residual, weight, bias, y, sum, mean, rstd;
  double eps = 0, weight_offset = 0;
};
Status run_forward(const ForwardCall& call, bool layer, cudaStream_t stream);

// dx = the gradient of what was normalised, x, given dy of the norm; dsum is added to it. Only
// layer_norm has a mean and a dbias. Without dy only dweight and dbias are made, which are 0 then.
struct BackwardCall {
  Tensor dy, dsum, x, weight, mean, rstd, dx, dweight, dbias;
  double weight_offset = 0;
};
// The bytes of `partials`: dweight and dbias are as in the call, the others may lack their data.
size_t backward_bytes(const BackwardCall& call, bool layer);
Status run_backward(const BackwardCall& call, bool layer, float* partials, cudaStream_t stream);

}  // namespace fk::cuda::norm
