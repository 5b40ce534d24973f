// The device side of programmatic dependent launch: kernels launched by launch_early
// (cuda/launch.h) start while the kernels before them in the stream finish, so that the start of
// the one hides behind the end of the other. Each function acts for the calling thread. In code for
// less than sm_90 they do nothing, and the host launches the usual way.
#pragma once

namespace fk::cuda {

// Waits until the earlier kernels are done and their writes are visible. Every thread of a kernel
// launched early must call this before it touches global memory, to read or to write: an earlier
// kernel may still read what this one overwrites.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Returns p, in such a way that loads by __ldg from it cannot move ahead of
// wait_for_earlier_kernels. To the compiler those are loads of data that nobody writes, which it
// may move ahead of the wait unless their address becomes known only after it.
template <class T>
__device__ __forceinline__ const T* after_wait(const T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// Lets the next kernel's blocks start on free multiprocessors, once every block of this kernel has
// called it or is done. Only a kernel launched early starts then; others still wait for this one's
// end.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace fk::cuda
