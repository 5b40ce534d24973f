// Calls of Hopper's product of few rows (few_rows.cuh).
#pragma once

#include "ops/linear/scaled_linear.h"
#include "ops/linear/sm90/call.h"

namespace fk::cuda_sm90 {

// Beyond so many rows of x tiles of 128 rows are faster: for 64 rows of 16 bits, 20 us against 22
// on an H200 (NOTES.md).
constexpr int64_t most_few_rows(DType dtype) { return size_of(dtype) == 1 ? 64 : 32; }

// Tells whether few_rows.cuh has room for x's rows and both operands can be fetched, but for
// addresses.
bool takes_few_rows(const Tensor& x, const Tensor& weight);

// `scaled` is where the scales of 8-bit floats are; else null.
Status multiply_few_rows(const Product& p, DType operands, const ScaledLinearFwd* scaled,
                         int device, cudaStream_t stream);

}  // namespace fk::cuda_sm90
