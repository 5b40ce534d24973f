// Bulk copies from global to shared memory, which the copy engine makes while threads do other
// work, and the barriers (mbarrier) on which they complete: one PTX instruction per function. The
// instructions are sm_90's, and in code for less the functions do nothing: the host must not launch
// a kernel that relies on them where the device code was compiled for less (cuda/launch.h).
#pragma once

#include <cstdint>

namespace fk::cuda {

// The 32-bit address in shared memory that PTX instructions take, from a generic pointer.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Initialises a barrier in shared memory, whose phases each complete after `arrivals` arrivals. One
// thread calls it.
__device__ __forceinline__ void barrier_init([[maybe_unused]] uint64_t* barrier,
                                             [[maybe_unused]] uint32_t arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
#endif
}

// Makes initialised barriers visible to the copy engine; for the other threads of the block, a
// __syncthreads must follow.
__device__ __forceinline__ void fence_barrier_init() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Arrives at the barrier and makes its current phase wait for `bytes` of copies as well.
__device__ __forceinline__ void barrier_arrive_expect([[maybe_unused]] uint64_t* barrier,
                                                      [[maybe_unused]] uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

// Waits until the phase of the given parity (0 for the first, 1 for the second, 0 for the third...)
// is complete.
__device__ __forceinline__ void barrier_wait([[maybe_unused]] uint64_t* barrier,
                                             [[maybe_unused]] uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
#endif
}

// Starts a copy of `bytes` from global memory to shared memory and returns; it completes on
// `barrier` by its bytes. `to`, `from` and `bytes` are multiples of 16. One thread calls it.
__device__ __forceinline__ void bulk_copy_to_shared([[maybe_unused]] void* to,
                                                    [[maybe_unused]] const void* from,
                                                    [[maybe_unused]] uint32_t bytes,
                                                    [[maybe_unused]] uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#endif
}

}  // namespace fk::cuda
