// The backward of rms_norm and layer_norm by rows (cpu/norm/backward.cc).
#pragma once

#include "cpu/norm/rows.h"

namespace fk::cpu {

// dx = the gradient of what was normalised, x, given dy of the norm; dsum, where it has data, is
// added to it. dx may be dsum. Only layer_norm has a mean.
struct NormBackward {
  Matrix dy, dsum, x, mean, rstd, dx;
  Parameter weight;
  int64_t columns;
  float weight_offset;
  int64_t block = 1;    // columns worked on at a time, as block_of says
  bool unit = false;    // all columns have stride 1
  bool stream = false;  // dx goes past the caches
};

// This is what rows add to the gradients of weight and bias: norm_sums_width floats each; NULL: not
// wanted.
struct NormSums {
  float *weight, *bias;
  bool first;  // nothing is in them yet
};
inline int64_t norm_sums_width(int64_t columns) { return (columns + 63) / 64 * 64; }

// Works on the rows [begin, end), on the calling thread.
using NormBackwardRows = void (*)(const NormBackward&, int64_t begin, int64_t end, const NormSums&);
NormBackwardRows norm_backward(DType dtype, bool layer);

}  // namespace fk::cpu
