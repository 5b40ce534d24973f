// Marks functions that CPU and CUDA kernels share.
#pragma once

#ifdef __CUDACC__
#define FK_HOST_DEVICE __host__ __device__ inline
#else
#define FK_HOST_DEVICE inline
#endif

// What is called once in a while on the CPU, and not to be repeated wherever it is called from.
#if defined(__CUDA_ARCH__)
#define FK_HOST_NOINLINE
#else
#define FK_HOST_NOINLINE __attribute__((noinline))
#endif
