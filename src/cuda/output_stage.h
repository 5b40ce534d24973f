// The output stage behind an op's kernels on CUDA (core/staged.h): the norm's own kernels, launched
// early behind or ahead of the op's, within its call.
#pragma once

#include "core/exec.h"
#include "core/output_stage.h"

namespace fk::cuda {

struct Stage {
  // y = made + residual, if `adds`, and the norm of that. `made` is y where nothing is added and y
  // is asked for.
  static Status forward(const OutputStage& a, const Tensor& made, const Tensor& y, bool adds,
                        const Exec& exec);

  // Returns how many bytes `backward` needs of the workspace.
  static size_t backward_bytes(const OutputStageGradient& a, const Tensor& dy);
  // `total` = dy and what comes through the norm, if anything does; `copy`, where it is there,
  // becomes dy; and the gradients of the norm's parameters.
  static Status backward(const OutputStageGradient& a, const Tensor& dy, const Tensor& total,
                         const Tensor& copy, void* memory, const Exec& exec);
};

}  // namespace fk::cuda
