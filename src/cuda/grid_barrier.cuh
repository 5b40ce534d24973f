// A barrier for blocks that are all on the device at once, as those of a cooperative launch are
// (LaunchShape::cooperative), by a counter in global memory that is 0 when the kernel starts. It
// only ever rises: after round n, counted from 1, it is n times the number of blocks.
#pragma once

#include <cstdint>

namespace fk::cuda {

// Arrives for the whole block. One thread calls it behind a __syncthreads; what the block's threads
// wrote before is visible to those that wait.
__device__ __forceinline__ void grid_arrive(uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Waits until the counter has reached `arrivals`, which counts modulo 2^32. One thread calls it;
// for the others of its block a __syncthreads must follow, and they read what other blocks wrote
// past the L1 cache (__ldcg).
__device__ __forceinline__ void grid_wait(const uint32_t* counter, uint32_t arrivals) {
  uint32_t seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (static_cast<int32_t>(seen - arrivals) < 0);
}

}  // namespace fk::cuda
