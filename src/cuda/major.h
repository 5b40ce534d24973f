// Says which way an operand of a matrix product lies in memory.
#pragma once

namespace fk::cuda {

// Along which dimension the rows of an operand in shared memory run: K, or the outer dimension,
// which is M for A and N for B.
enum class Major { kK, kOuter };

}  // namespace fk::cuda
