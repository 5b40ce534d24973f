// The forward of rms_norm and layer_norm by rows (cpu/norm/forward.cc).
#pragma once

#include "cpu/norm/rows.h"

namespace fk::cpu {

// y = norm(s), where s is x, or x + residual rounded to x's dtype. Whatever has no data is left
// out; `sum` takes s, `mean` and `rstd` the statistics. y may be x.
struct NormForward {
  Matrix x, residual, y, sum, mean, rstd;
  Parameter weight, bias;
  int64_t columns;
  float eps, weight_offset;
  int64_t block = 1;    // columns worked on at a time, as block_of says
  bool stream = false;  // y and sum go past the caches
};

// Normalises the rows [begin, end), on the calling thread.
using NormForwardRows = void (*)(const NormForward&, int64_t begin, int64_t end);
NormForwardRows norm_forward(DType dtype, bool layer);

}  // namespace fk::cpu
