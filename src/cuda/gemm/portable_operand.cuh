// An operand's part of a stage in shared memory: kOuter of M or N by 64 bytes of K, how it gets
// there from global memory, and the fragments that tensor cores take from there.
//
// Memory map: rows run along K (64 bytes each) or along the outer dimension (kOuter elements), as
// they do in global memory, so that nothing is turned on the way. The 16-byte chunks of a row are
// permuted by the row's number. Then neither the eight chunks that a quarter of a warp stores, nor
// the eight rows of a matrix that ldmatrix reads, nor the 4 x 8 floats of a fragment that lie
// across rows, share a bank.
#pragma once

#include "cuda/convert.cuh"
#include "cuda/gemm/portable_call.cuh"
#include "cuda/major.h"
#include "cuda/mma.cuh"

namespace fk::cuda {

// Which of the outer dimension a tile holds. Where there are pairs, 8 gates and the 8 that belong
// to them, `pair` further, take turns.
struct OuterRange {
  int64_t first, count;
  int64_t pair;  // 0: none

  // The number of the tile's r-th; negative where there is none.
  __device__ __forceinline__ int64_t index(int r) const {
    const int64_t at = first + (pair == 0 ? r : r / 16 * 8 + r % 8);
    if (at >= count) return -1;
    return pair != 0 && r / 8 % 2 != 0 ? at + pair : at;
  }
};

template <class T, Major kMajor, int kOuter, int kThreads>
struct OperandTile {
  static constexpr int kWidth = 16 / static_cast<int>(sizeof(T));  // elements of a chunk
  static constexpr int kDepth = 64 / static_cast<int>(sizeof(T));
  static constexpr int kBytes = kOuter * 64;
  static constexpr int kChunksEach = kOuter * 4 / kThreads;
  static_assert(kChunksEach * kThreads == kOuter * 4);

  // Returns where an element lies, in bytes.
  __device__ __forceinline__ static int place(int outer, int k) {
    if constexpr (kMajor == Major::kK) {
      return outer * 64 + ((k / kWidth) ^ (outer / 2 % 4)) * 16 +
             k % kWidth * static_cast<int>(sizeof(T));
    } else {
      const int turn = sizeof(T) == 2 ? k % 8 : k % 4 * 2;
      return k * kOuter * static_cast<int>(sizeof(T)) + ((outer / kWidth) ^ turn) * 16 +
             outer % kWidth * static_cast<int>(sizeof(T));
    }
  }

  // --- from global memory ---

  const ProductOperand& from;
  const OuterRange range;
  // Of each of this thread's chunks, its address in the slice that comes next, null where the outer
  // dimension ends before; kept only while one stride leads from slice to slice.
  const T* next[kChunksEach];
  bool keeps_addresses;

  __device__ __forceinline__ static void chunk(int i, int* outer, int* k) {
    const int index = static_cast<int>(threadIdx.x) + i * kThreads;
    if constexpr (kMajor == Major::kK) {
      *outer = index / 4;
      *k = index % 4 * kWidth;
    } else {
      *k = index / (kOuter / kWidth);
      *outer = index % (kOuter / kWidth) * kWidth;
    }
  }
  __device__ __forceinline__ const T* address(int i, int64_t k, int64_t end) const {
    int outer, inner;
    chunk(i, &outer, &inner);
    const int64_t at = range.index(outer);
    return at < 0 || k + inner >= end ? nullptr : from.at<T>(at, k + inner);
  }
  __device__ __forceinline__ void begin(int64_t k, int64_t depth) {
    keeps_addresses =
        kMajor == Major::kK || (from.parts[0].rows.ndim <= 1 && from.first_rows >= depth);
#pragma unroll
    for (int i = 0; i < kChunksEach; ++i) next[i] = address(i, k, INT64_MAX);
  }
  // The i-th chunk of the slice that begins at k; null: zeros.
  __device__ __forceinline__ const T* take(int i, int64_t k, int64_t end) {
    if (!keeps_addresses) return address(i, k, end);
    int outer, inner;
    chunk(i, &outer, &inner);
    const T* const p = next[i];
    if (p == nullptr || k + inner >= end) return nullptr;
    next[i] = p + (kMajor == Major::kK ? kDepth : kDepth * from.parts[0].rows.last_stride);
    return p;
  }
  // Elements one by one, of any strides and types.
  __device__ __forceinline__ void put_elements(char* to, int64_t k, int64_t end) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < kOuter * kDepth; i += kThreads) {
      const int outer = kMajor == Major::kK ? i / kDepth : i % kOuter;
      const int inner = kMajor == Major::kK ? i % kDepth : i / kOuter;
      const int64_t at = range.index(outer);
      T value = from_float<T>(0.f);
      if (at >= 0 && k + inner < end) value = from.element<T>(at, k + inner);
      *reinterpret_cast<T*>(to + place(outer, inner)) = value;
    }
  }
  // Starts to copy a slice (from sm_80 on; before, it copies it).
  __device__ __forceinline__ void copy(char* to, int64_t k, int64_t end) {
    if (!from.in_vectors) {
      put_elements(to, k, end);
      return;
    }
#pragma unroll
    for (int i = 0; i < kChunksEach; ++i) {
      int outer, inner;
      chunk(i, &outer, &inner);
      const T* const p = take(i, k, end);
      copy_16_bytes(shared_address(to + place(outer, inner)), p == nullptr ? from.parts[0].data : p,
                    p != nullptr);
    }
  }
  // The same in two steps, with registers between them.
  __device__ __forceinline__ void fetch(uint4 (&values)[kChunksEach], int64_t k, int64_t end) {
    if (!from.in_vectors) return;
#pragma unroll
    for (int i = 0; i < kChunksEach; ++i) {
      const T* const p = take(i, k, end);
      values[i] = make_uint4(0, 0, 0, 0);
      if (p != nullptr) values[i] = *reinterpret_cast<const uint4*>(p);
    }
  }
  __device__ __forceinline__ void put(char* to, const uint4 (&values)[kChunksEach], int64_t k,
                                      int64_t end) const {
    if (!from.in_vectors) {
      put_elements(to, k, end);
      return;
    }
#pragma unroll
    for (int i = 0; i < kChunksEach; ++i) {
      int outer, inner;
      chunk(i, &outer, &inner);
      store_shared(shared_address(to + place(outer, inner)), values[i]);
    }
  }

  // --- to the tensor cores ---

  // The fragment of 16 of the outer dimension by 32 bytes of K: that of A; of B, registers 0 and 2
  // belong to the first 8, 1 and 3 to the others.
  __device__ __forceinline__ static void load_fragment(uint32_t (&words)[4], const char* tile,
                                                       int outer, int k) {
    const int lane = threadIdx.x % 32;
    if constexpr (kMajor == Major::kK) {
      load_matrices(words, shared_address(tile + place(outer + lane % 16, k + lane / 16 * kWidth)));
    } else if constexpr (sizeof(T) == 2) {
      load_matrices_transposed(words, shared_address(tile + place(outer + lane / 8 % 2 * 8,
                                                                  k + lane / 16 * 8 + lane % 8)));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = *reinterpret_cast<const uint32_t*>(
            tile + place(outer + lane / 4 + i % 2 * 8, k + lane % 4 + i / 2 * 4));
      }
    }
  }
};

}  // namespace fk::cuda
