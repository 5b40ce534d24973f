// Matrix multiplication by a warpgroup (wgmma): one PTX instruction per function. Four warps
// multiply a 64 x 16 tile A (in shared memory or registers) by a 16 x N tile B (in shared memory)
// and add the product to 64 x N floats in registers; the instruction runs in the background while
// the warps do other work. For 8-bit floats the tiles are 64 x 32 and 32 x N, both with K along
// their rows. The instructions are sm_90a's only: a kernel that calls these functions has its body
// under `#if defined(__CUDA_ARCH_FEAT_SM90_ALL)`.
//
// This is where the elements are. Let w be the warp's number in its group, g = lane / 4 and t =
// lane % 4. A thread's d[4 * i + 2 * j + e] is row 16 * w + g + 8 * j, column 8 * i + 2 * t + e. A
// in registers is laid out the same way: a[j + 2 * i] holds columns 8 * i + 2 * t and the one after
// it of row g + 8 * j, so that the accumulators of one product, rounded in pairs, can be the A of
// the next. With 8-bit floats, a[j + 2 * i] holds the four columns from 16 * i + 4 * t on of row g
// + 8 * j.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "cuda/async_copy.cuh"
#include "cuda/major.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

namespace fk::cuda {

// Orders earlier accesses to the registers of A and D before the multiplications that follow. This
// and the functions below are called by all four warps.
__device__ __forceinline__ void warpgroup_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes a batch of multiplications, for warpgroup_wait to count.
__device__ __forceinline__ void warpgroup_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of the latest batches are unfinished.
template <int kPending>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to d across this point: a multiplication under way uses
// these registers, which the compiler cannot know. Each statement names eight registers, since
// statements cost compile time.
template <int N>
__device__ __forceinline__ void keep_registers(float (&d)[N]) {
  static_assert(N % 8 == 0);
#pragma unroll
  for (int i = 0; i < N; i += 8) {
    asm volatile(""
                 : "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]),
                   "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])::"memory");
  }
}

// Move registers between the warpgroups of a block: the one lowers, the other raises the calling
// warpgroup's registers per thread to kCount, a multiple of 8 from 24 to 240. take_registers waits
// until others have given enough.
template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// The next two functions describe tiles in shared memory with the 128-byte swizzle that the copy
// engine writes: rows of 128 bytes, of which eight (1024 bytes) form a pattern; a tile begins at a
// multiple of 1024 bytes. A wider tile is several such columns of 64 elements, one after another.

// Returns the descriptor of a tile whose rows of 128 bytes run along K; one row follows another
// along the outer dimension (M or N). Add 32 bytes to `tile` for each further 16 elements of K.
__device__ __forceinline__ uint64_t k_major(const void* tile) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | (uint64_t{1} << 16) | ((shared_address(tile) & 0x3ffff) >> 4);
}

// Returns the descriptor of a tile whose rows of 128 bytes run along the outer dimension; one row
// follows another along K. The next 64 elements of the outer dimension are `column_bytes` further.
// Add 2048 bytes to `tile` for each further 16 elements of K.
__device__ __forceinline__ uint64_t outer_major(const void* tile, uint32_t column_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | (static_cast<uint64_t>(column_bytes >> 4) << 16) |
         ((shared_address(tile) & 0x3ffff) >> 4);
}

// Returns the descriptor of a tile that is not swizzled but made of pieces of 8 rows by 16 bytes,
// each 128 bytes without gaps. A row's bytes run along K; one row follows another along the outer
// dimension. The next piece is `k_bytes` further along K and `outer_bytes` further along the outer
// dimension.
__device__ __forceinline__ uint64_t in_pieces(const void* tile, uint32_t k_bytes,
                                              uint32_t outer_bytes) {
  return (static_cast<uint64_t>(outer_bytes >> 4) << 32) |
         (static_cast<uint64_t>(k_bytes >> 4) << 16) | ((shared_address(tile) & 0x3ffff) >> 4);
}

// Returns the descriptor of a tile of the same kind `bytes` further. Addresses have 18 bits, so the
// addition does not carry into the fields above.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

// multiply(d, a, b, accumulate) starts d = a b + (accumulate ? d : 0), for float d[N / 2]. B is in
// shared memory (a descriptor); A is there too, or in registers (uint32_t a[4]). The instruction
// spells out its registers, so each N needs its own text: FK_TEXT_n names the operands of D,
// FK_LIST_n lists them, and the numbers given to FK_MULTIPLY are those of the operands after them.
#define FK_TEXT(a, b, c, d, e, f, g, h) \
  "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define FK_LIST(i)                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FK_TEXT_16 FK_TEXT(0, 1, 2, 3, 4, 5, 6, 7)
#define FK_LIST_16 FK_LIST(0)
#define FK_TEXT_32 FK_TEXT_16 "," FK_TEXT(8, 9, 10, 11, 12, 13, 14, 15)
#define FK_LIST_32 FK_LIST_16, FK_LIST(8)
#define FK_TEXT_48 FK_TEXT_32 "," FK_TEXT(16, 17, 18, 19, 20, 21, 22, 23)
#define FK_LIST_48 FK_LIST_32, FK_LIST(16)
#define FK_TEXT_64 FK_TEXT_48 "," FK_TEXT(24, 25, 26, 27, 28, 29, 30, 31)
#define FK_LIST_64 FK_LIST_48, FK_LIST(24)
#define FK_TEXT_80 FK_TEXT_64 "," FK_TEXT(32, 33, 34, 35, 36, 37, 38, 39)
#define FK_LIST_80 FK_LIST_64, FK_LIST(32)
#define FK_TEXT_96 FK_TEXT_80 "," FK_TEXT(40, 41, 42, 43, 44, 45, 46, 47)
#define FK_LIST_96 FK_LIST_80, FK_LIST(40)
#define FK_TEXT_112 FK_TEXT_96 "," FK_TEXT(48, 49, 50, 51, 52, 53, 54, 55)
#define FK_LIST_112 FK_LIST_96, FK_LIST(48)
#define FK_TEXT_128 FK_TEXT_112 "," FK_TEXT(56, 57, 58, 59, 60, 61, 62, 63)
#define FK_LIST_128 FK_LIST_112, FK_LIST(56)
#define FK_TEXT_144 FK_TEXT_128 "," FK_TEXT(64, 65, 66, 67, 68, 69, 70, 71)
#define FK_LIST_144 FK_LIST_128, FK_LIST(64)
#define FK_TEXT_160 FK_TEXT_144 "," FK_TEXT(72, 73, 74, 75, 76, 77, 78, 79)
#define FK_LIST_160 FK_LIST_144, FK_LIST(72)
#define FK_TEXT_176 FK_TEXT_160 "," FK_TEXT(80, 81, 82, 83, 84, 85, 86, 87)
#define FK_LIST_176 FK_LIST_160, FK_LIST(80)
#define FK_TEXT_192 FK_TEXT_176 "," FK_TEXT(88, 89, 90, 91, 92, 93, 94, 95)
#define FK_LIST_192 FK_LIST_176, FK_LIST(88)
#define FK_TEXT_208 FK_TEXT_192 "," FK_TEXT(96, 97, 98, 99, 100, 101, 102, 103)
#define FK_LIST_208 FK_LIST_192, FK_LIST(96)
#define FK_TEXT_224 FK_TEXT_208 "," FK_TEXT(104, 105, 106, 107, 108, 109, 110, 111)
#define FK_LIST_224 FK_LIST_208, FK_LIST(104)
#define FK_TEXT_240 FK_TEXT_224 "," FK_TEXT(112, 113, 114, 115, 116, 117, 118, 119)
#define FK_LIST_240 FK_LIST_224, FK_LIST(112)
#define FK_TEXT_256 FK_TEXT_240 "," FK_TEXT(120, 121, 122, 123, 124, 125, 126, 127)
#define FK_LIST_256 FK_LIST_240, FK_LIST(120)

#define FK_MULTIPLY_SHARED(N, type, a0, a1, a2, a3, a4)                                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #a2                                         \
               ", 0;\n"                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" FK_TEXT_##N \
               "}, %" #a0 ", %" #a1 ", p, 1, 1, %" #a3 ", %" #a4 ";\n}\n"                       \
               : FK_LIST_##N                                                                    \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)),                             \
                 "n"(kA == Major::kOuter ? 1 : 0), "n"(kB == Major::kOuter ? 1 : 0))

#define FK_MULTIPLY_REGISTERS(N, type, a0, a1, a2, a3, a4, a5, a6)                              \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #a5                                         \
               ", 0;\n"                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" FK_TEXT_##N \
               "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #a4 ", p, 1, 1, %" #a6 ";\n}\n" \
               : FK_LIST_##N                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                            \
                 "r"(static_cast<int>(accumulate)), "n"(kB == Major::kOuter ? 1 : 0))

// The same for 8-bit floats, whose operands in shared memory always have their rows along K.
#define FK_MULTIPLY_SHARED_8(N, a0, a1, a2)                                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #a2                                 \
               ", 0;\n"                                                                 \
               "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" FK_TEXT_##N \
               "}, %" #a0 ", %" #a1 ", p, 1, 1;\n}\n"                                   \
               : FK_LIST_##N                                                            \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))

#define FK_MULTIPLY_REGISTERS_8(N, a0, a1, a2, a3, a4, a5)                              \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #a5                                 \
               ", 0;\n"                                                                 \
               "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" FK_TEXT_##N \
               "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #a4 ", p, 1, 1;\n}\n"   \
               : FK_LIST_##N                                                            \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                    \
                 "r"(static_cast<int>(accumulate)))

#define FK_MULTIPLY(N, a0, a1, a2, a3, a4, a5, a6)                                              \
  template <class T, Major kA = Major::kK, Major kB = Major::kK>                                \
  __device__ __forceinline__ void multiply(float(&d)[N / 2], uint64_t a, uint64_t b,            \
                                           bool accumulate) {                                   \
    if constexpr (std::is_same_v<T, __half>) {                                                  \
      FK_MULTIPLY_SHARED(N, "f16", a0, a1, a2, a3, a4);                                         \
    } else if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) {                                    \
      static_assert(kA == Major::kK && kB == Major::kK);                                        \
      FK_MULTIPLY_SHARED_8(N, a0, a1, a2);                                                      \
    } else {                                                                                    \
      static_assert(std::is_same_v<T, __nv_bfloat16>);                                          \
      FK_MULTIPLY_SHARED(N, "bf16", a0, a1, a2, a3, a4);                                        \
    }                                                                                           \
  }                                                                                             \
  template <class T, Major kB = Major::kK>                                                      \
  __device__ __forceinline__ void multiply(float(&d)[N / 2], const uint32_t(&a)[4], uint64_t b, \
                                           bool accumulate) {                                   \
    if constexpr (std::is_same_v<T, __half>) {                                                  \
      FK_MULTIPLY_REGISTERS(N, "f16", a0, a1, a2, a3, a4, a5, a6);                              \
    } else if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) {                                    \
      static_assert(kB == Major::kK);                                                           \
      FK_MULTIPLY_REGISTERS_8(N, a0, a1, a2, a3, a4, a5);                                       \
    } else {                                                                                    \
      static_assert(std::is_same_v<T, __nv_bfloat16>);                                          \
      FK_MULTIPLY_REGISTERS(N, "bf16", a0, a1, a2, a3, a4, a5, a6);                             \
    }                                                                                           \
  }

FK_MULTIPLY(16, 8, 9, 10, 11, 12, 13, 14)
FK_MULTIPLY(32, 16, 17, 18, 19, 20, 21, 22)
FK_MULTIPLY(48, 24, 25, 26, 27, 28, 29, 30)
FK_MULTIPLY(64, 32, 33, 34, 35, 36, 37, 38)
FK_MULTIPLY(80, 40, 41, 42, 43, 44, 45, 46)
FK_MULTIPLY(96, 48, 49, 50, 51, 52, 53, 54)
FK_MULTIPLY(112, 56, 57, 58, 59, 60, 61, 62)
FK_MULTIPLY(128, 64, 65, 66, 67, 68, 69, 70)
FK_MULTIPLY(144, 72, 73, 74, 75, 76, 77, 78)
FK_MULTIPLY(160, 80, 81, 82, 83, 84, 85, 86)
FK_MULTIPLY(176, 88, 89, 90, 91, 92, 93, 94)
FK_MULTIPLY(192, 96, 97, 98, 99, 100, 101, 102)
FK_MULTIPLY(208, 104, 105, 106, 107, 108, 109, 110)
FK_MULTIPLY(224, 112, 113, 114, 115, 116, 117, 118)
FK_MULTIPLY(240, 120, 121, 122, 123, 124, 125, 126)
FK_MULTIPLY(256, 128, 129, 130, 131, 132, 133, 134)

#undef FK_MULTIPLY
#undef FK_MULTIPLY_SHARED
#undef FK_MULTIPLY_REGISTERS
#undef FK_MULTIPLY_SHARED_8
#undef FK_MULTIPLY_REGISTERS_8
#undef FK_TEXT
#undef FK_LIST
#undef FK_TEXT_16
#undef FK_LIST_16
#undef FK_TEXT_32
#undef FK_LIST_32
#undef FK_TEXT_48
#undef FK_LIST_48
#undef FK_TEXT_64
#undef FK_LIST_64
#undef FK_TEXT_80
#undef FK_LIST_80
#undef FK_TEXT_96
#undef FK_LIST_96
#undef FK_TEXT_112
#undef FK_LIST_112
#undef FK_TEXT_128
#undef FK_LIST_128
#undef FK_TEXT_144
#undef FK_LIST_144
#undef FK_TEXT_160
#undef FK_LIST_160
#undef FK_TEXT_176
#undef FK_LIST_176
#undef FK_TEXT_192
#undef FK_LIST_192
#undef FK_TEXT_208
#undef FK_LIST_208
#undef FK_TEXT_224
#undef FK_LIST_224
#undef FK_TEXT_240
#undef FK_LIST_240
#undef FK_TEXT_256
#undef FK_LIST_256

}  // namespace fk::cuda

#endif
