// Rounds float weights to the file types of model/quantized.h, for `--quantize`.
#pragma once

#include <cstdint>

#include "model/quantized.h"

namespace fk::engine {

// Returns whether `narrow` (F16, BF16) or `quantize` (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1) can make
// `type`.
bool can_quantize(model::WeightType type);

// Rounds `count` weights, a multiple of 32, to blocks of `type` at `out`: codes to nearest, with
// the scales that llama.cpp would choose.
void quantize(model::WeightType type, const float* x, int64_t count, uint8_t* out);

// Rounds `count` weights to F16 or BF16, to nearest, ties to even.
void narrow(model::WeightType type, const float* x, int64_t count, uint16_t* out);

// Returns the bits of `value` as float16, rounded to nearest, ties to even.
uint16_t float_to_half(float value);

}  // namespace fk::engine
