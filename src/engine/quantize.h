// Floats to the file types of model/quantized.h, for `--quantize`.
#pragma once

#include <cstdint>

#include "model/quantized.h"

namespace fk::engine {

// The types `quantize` and `narrow` make: F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1.
bool can_quantize(model::WeightType type);

// `count` weights, a multiple of 32, to blocks; rounding to nearest, scales as llama.cpp takes
// them.
void quantize(model::WeightType type, const float* x, int64_t count, uint8_t* out);

// To F16 or BF16, to nearest even.
void narrow(model::WeightType type, const float* x, int64_t count, uint16_t* out);

uint16_t float_to_half(float value);

}  // namespace fk::engine
