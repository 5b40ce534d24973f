// Kernels that start while the ones before them in the stream finish (launch_early in launch.h):
// the start of the one hides behind the end of the other. For one thread; nothing below sm_90.
#pragma once

namespace fk::cuda {

// Waits until the earlier kernels are done and their writes are seen. Every thread of a kernel
// launched early must call this before it touches global memory, for reads and for writes: an
// earlier kernel may still read what this one overwrites.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// For loads by __ldg after the wait: a compiler may move those ahead of it, as of data that nobody
// writes, unless their address is known only then.
template <class T>
__device__ __forceinline__ const T* after_wait(const T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// Lets the next kernel take up free multiprocessors, once every block has called this or is done.
// Only kernels launched early start then; others still wait for the end.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace fk::cuda
