// Tells kernels whether they may use the instructions for products of bfloat16 numbers
// (cpu/gemm/tiles_bfloat16.h).
#pragma once

namespace fk::cpu {

// Returns whether the active target (cpu/targets.h) has these instructions.
bool multiplies_bfloat16();

}  // namespace fk::cpu
