// FK_HOST_DEVICE marks functions that CPU and CUDA kernels share.
#pragma once

#ifdef __CUDACC__
#define FK_HOST_DEVICE __host__ __device__ inline
#else
#define FK_HOST_DEVICE inline
#endif
