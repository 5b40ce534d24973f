// Calls of Hopper's product of few rows (few_rows.cuh).
#pragma once

#include "ops/linear/scaled_linear.h"
#include "ops/linear/sm90/call.h"

namespace fk::cuda_sm90 {

constexpr int kMostFewRows = 64;

// Whether few_rows.cuh has room for x's rows and both operands can be fetched, but for addresses.
bool takes_few_rows(const Tensor& x, const Tensor& weight);

// `scaled` is where the scales of 8-bit floats are; else null.
Status multiply_few_rows(const Product& p, DType operands, const ScaledLinearFwd* scaled,
                         int device, cudaStream_t stream);

}  // namespace fk::cuda_sm90
