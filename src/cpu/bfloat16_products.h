// Whether there are instructions for products of bfloat16 numbers, for cpu/matrix_bfloat16.h.
#pragma once

namespace fk::cpu {

// True if the active target (cpu/targets.h) is one that has them.
bool multiplies_bfloat16();

}  // namespace fk::cpu
