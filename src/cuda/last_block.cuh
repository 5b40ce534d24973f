// Which of a launch's blocks is the last to come somewhere, by a counter in the workspace, and so
// may read what all of them wrote.
//
// The workspace holds anything when a call begins, and a launch or a copy ahead that clears a
// counter would cost as much as it saves. So a counter carries a tag, which the host draws anew for
// each launch: one with another tag counts as 0. The last block takes the tag away again, so that a
// graph may launch the same kernel once more. What chance leaves in memory is taken for a count
// once in 2^48 launches.
#pragma once

#include <cstdint>

namespace fk::cuda {

struct LastBlock {
  unsigned long long* counter = nullptr;
  unsigned long long tag = 0;  // of 48 bits, above a count of 16

  // Tells every thread of a block whether it is the last of fewer than 2^16. All of them call it,
  // once; for the last one, what the others stored before is in the L2 cache (loads by __ldcg).
  __device__ __forceinline__ bool here(unsigned blocks) const {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned long long seen = 0, expected;
      unsigned count;
      do {
        expected = seen;
        count = (seen >> 16) == tag ? static_cast<unsigned>(seen & 0xffff) + 1 : 1;
        seen = atomicCAS(counter, expected, tag << 16 | count);
      } while (seen != expected);
      last = count == blocks;
      if (last) atomicCAS(counter, tag << 16 | count, 0ull);
      __threadfence();
    }
    __syncthreads();
    return last;
  }
};

// A tag that no other launch of this process has, nor likely any other memory.
unsigned long long new_tag();

}  // namespace fk::cuda
