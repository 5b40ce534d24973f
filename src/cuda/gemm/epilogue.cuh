// What happens to the sums of a matrix product on their way out:
//   before = sum + bias,   out = act(before) + residual.
#pragma once

#include "core/activation.h"
#include "core/tensor.h"

namespace fk::cuda {

// A matrix in global memory whose elements are reached one by one.
struct PlainMatrix {
  void* data = nullptr;  // null: not there
  DType dtype = DType::kFloat32;
  int64_t row = 0, column = 0;  // strides in elements
};

struct Epilogue {
  Activation activation = Activation::kNone;
  const void* bias = nullptr;  // of each column; null: none
  bool float_bias = false;     // else of the product's dtype
  int64_t bias_stride = 0;
};

}  // namespace fk::cuda
