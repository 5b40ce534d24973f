// Matrix instructions of a warp (mma.sync), the loads that feed them (ldmatrix), asynchronous
// copies of 16 bytes (cp.async), and atomic adds: one PTX instruction per function where the
// architecture has it, otherwise the fewest that do the same. All lanes of a warp call mma_16816
// and load_matrices together.
//
// A lane holds these elements of the matrices (m16n8k16), with lane = 4 g + t. In `a`, a[0] and
// a[1] are columns 2t and 2t + 1 of rows g and g + 8, and a[2] and a[3] the columns 8 further. In
// `b`, b[0] is rows 2t and 2t + 1 of column g, and b[1] the rows 8 further. In `c`, c[0] and c[1]
// are columns 2t and 2t + 1 of row g, and c[2] and c[3] those of row g + 8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/async_copy.cuh"

namespace fk::cuda {

// Adds the product of a (16 x 16) and b (16 x 8) to c (16 x 8). The last argument only selects the
// type.
__device__ __forceinline__ void mma_16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1, __half) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  // Turing has half the depth: one instruction for the first 8 of the 16, one for the others.
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// The same for bfloat16, from sm_80 on: Turing's tensor cores have no bfloat16, and there it does
// nothing.
__device__ __forceinline__ void mma_16816([[maybe_unused]] float (&c)[4],
                                          [[maybe_unused]] const uint32_t (&a)[4],
                                          [[maybe_unused]] uint32_t b0,
                                          [[maybe_unused]] uint32_t b1, __nv_bfloat16) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Loads four 8x8 matrices of 16-bit elements from shared memory: lane l gives the address of row l
// % 8 of matrix l / 8, and receives elements 2t and 2t + 1 of row g of each matrix.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Loads four matrices as load_matrices does, each transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Store to and load from shared memory at an address from shared_address; it is aligned to what is
// stored or loaded.
__device__ __forceinline__ void store_shared(uint32_t address, const uint4& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// Copies 16 bytes from global to shared memory, both aligned to 16. Unless `wanted`, it stores
// zeros and does not read `from`. From sm_80 on the copy runs in the background: it is complete
// only after copies_wait.
__device__ __forceinline__ void copy_16_bytes(uint32_t to, const void* from, bool wanted) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "{\n"
      ".reg .pred ignored;\n"
      "setp.eq.u32 ignored, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, ignored;\n"
      "}\n" ::"r"(to),
      "l"(from), "r"(static_cast<uint32_t>(wanted))
      : "memory");
#else
  store_shared(to, wanted ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0));
#endif
}

// Copies one float in the same way, or stores 0 unless `wanted`.
__device__ __forceinline__ void copy_float(uint32_t to, const float* from, bool wanted) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "{\n"
      ".reg .pred ignored;\n"
      "setp.eq.u32 ignored, %2, 0;\n"
      "cp.async.ca.shared.global [%0], [%1], 4, ignored;\n"
      "}\n" ::"r"(to),
      "l"(from), "r"(static_cast<uint32_t>(wanted))
      : "memory");
#else
  store_shared(to, wanted ? __float_as_uint(*from) : 0u);
#endif
}

// Closes a group of this thread's copies, for copies_wait to count.
__device__ __forceinline__ void copies_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending of this thread's latest groups are still under way.
template <int kPending>
__device__ __forceinline__ void copies_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// Adds x0 to x3 to four neighbouring floats in global memory, each atomically; `to` is a multiple
// of 16 bytes. From sm_90 on; before, it does nothing.
__device__ __forceinline__ void add_four([[maybe_unused]] float* to, [[maybe_unused]] float x0,
                                         [[maybe_unused]] float x1, [[maybe_unused]] float x2,
                                         [[maybe_unused]] float x3) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x0), "f"(x1), "f"(x2),
               "f"(x3)
               : "memory");
#endif
}

// Adds x to a float in global memory, atomically.
__device__ __forceinline__ void add_one(float* to, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}

}  // namespace fk::cuda
