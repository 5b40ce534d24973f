// This file brings values into the form in which the 8-bit kernel multiplies them
// (sm90/float8.cuh): transposed, in blocks of kKeys keys of one head.
//
// Floor: one read and one write of v. A thread turns four columns of 16 keys by byte permutes; the
// block is put together in shared memory and written in order.
//
// A block is, for each 32 keys, kWidth rows of 32 bytes, as pieces of 8 rows by 16 bytes, those of
// the first 16 keys ahead of the others'. Within 16 keys byte 4 t + 2 h + e is key 8 h + 2 t + e:
// where a thread that holds scores finds its probabilities in the left operand of the product.
#pragma once

#include <cstdint>

#include "cuda/dependent_launch.cuh"
#include "ops/attention/problem.h"

namespace fk::cuda_sm90 {

template <int kWidth>
constexpr int kValueStepBytes = 32 * kWidth;

struct ValueArguments {
  attention::View v;
  int batch, kv_heads, k_len, columns;
  bool packed;
  const int32_t* cu_k;
  int cu_k_stride;
  int blocks_per_sequence;
  char* to;
  int* next_tile;  // set to 0 on the way, for the kernel behind; may be null
};

// Packed sequence b has its blocks from b + begin / kKeys on.
template <int kWidth, int kKeys>
__global__ void __launch_bounds__(kWidth / 4 * kKeys / 16)
    pack_values(const __grid_constant__ ValueArguments a) {
  constexpr int kThreads = kWidth / 4 * kKeys / 16;
  __shared__ uint4 image[kKeys * kWidth / 16];
  cuda::wait_for_earlier_kernels();
  if (a.next_tile != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *a.next_tile = 0;
  const int kv_head = blockIdx.x % a.kv_heads, block = blockIdx.x / a.kv_heads;
  int batch, begin = 0, length = a.k_len, n;
  if (a.packed) {
    int low = 0, high = a.batch - 1;  // the last sequence that begins up to here
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      const int at = min(max(a.cu_k[middle * a.cu_k_stride], 0), a.k_len) / kKeys + middle;
      if (at <= block) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    batch = low;
    begin = min(max(a.cu_k[batch * a.cu_k_stride], 0), a.k_len);
    length = max(min(a.cu_k[(batch + 1) * a.cu_k_stride], a.k_len) - begin, 0);
    n = block - begin / kKeys - batch;
  } else {
    batch = block / a.blocks_per_sequence;
    n = block % a.blocks_per_sequence;
  }
  const int group = threadIdx.x % (kWidth / 4), sixteen = threadIdx.x / (kWidth / 4);
  const int column = 4 * group, first = n * kKeys + 16 * sixteen;
  const char* const from = static_cast<const char*>(a.v.data) + (a.packed ? 0 : batch * a.v.batch) +
                           (begin + first) * a.v.row + kv_head * a.v.head + column;
  uint32_t key[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const bool inside = first >= 0 && first + i < length && column < a.columns;
    key[i] = inside ? __ldg(reinterpret_cast<const uint32_t*>(from + i * a.v.row)) : 0;
  }
  cuda::let_next_kernel_start();
  uint32_t row[4][4];  // of the four columns, four words of 4 keys
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const uint32_t k0 = key[2 * t], k1 = key[2 * t + 1], k8 = key[8 + 2 * t], k9 = key[9 + 2 * t];
    const uint32_t low0 = __byte_perm(k0, k1, 0x5140), low8 = __byte_perm(k8, k9, 0x5140);
    const uint32_t high0 = __byte_perm(k0, k1, 0x7362), high8 = __byte_perm(k8, k9, 0x7362);
    row[0][t] = __byte_perm(low0, low8, 0x5410);
    row[1][t] = __byte_perm(low0, low8, 0x7632);
    row[2][t] = __byte_perm(high0, high8, 0x5410);
    row[3][t] = __byte_perm(high0, high8, 0x7632);
  }
  // A thread takes 16 bytes at a time; those of a piece are permuted by its place, for neighbours
  // to meet different banks.
  const int piece = sixteen / 2 * (kWidth / 4) + group / 2 * 2 + sixteen % 2;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    image[8 * piece + ((group % 2 * 4 + r) ^ (piece / 2 % 4))] = {row[r][0], row[r][1], row[r][2],
                                                                  row[r][3]};
  }
  __syncthreads();
  auto* const to =
      reinterpret_cast<uint4*>(a.to + static_cast<int64_t>(blockIdx.x) * (kKeys * kWidth));
#pragma unroll 4
  for (int i = threadIdx.x; i < kKeys * kWidth / 16; i += kThreads) {
    to[i ^ (i / 16 % 4)] = image[i];
  }
}

}  // namespace fk::cuda_sm90
