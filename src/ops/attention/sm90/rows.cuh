// This file says what a warpgroup of the Hopper forwards, of 16-bit elements and of 8-bit floats,
// does with its 64 rows beside the products: it masks scores, and brings the output to memory.
#pragma once

#include "cuda/wgmma.cuh"
#include "ops/attention/sm90/forward_arguments.h"
#include "ops/attention/sm90/schedule.cuh"
#include "ops/attention/sm90/softmax.cuh"

namespace fk::cuda_sm90 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// Sets scores to -inf where a query does not see a key of block n of `kKeys` keys. The warpgroup's
// rows begin with `first_row` of the sequence; blocks within [inner_first, inner_end) need no mask.
template <int kKeys, int N>
__device__ __forceinline__ void mask_block(float (&s)[N], const ForwardArguments& a,
                                           const TileOfQueries& t, int n, int inner_first,
                                           int inner_end, int first_row, int warp, int lane) {
  if (n < inner_end && n >= inner_first) return;
  const int first_key = n * kKeys + 2 * (lane % 4);
  const int place = first_row + 16 * warp + lane / 4 + t.k_len - t.q_len - first_key;
  if (n >= inner_end) {
    const int limit = t.k_len - first_key, end = place + a.right + 1;
    mask_from(s, {min(limit, end), min(limit, end + 8)});
  }
  if (n < inner_first) mask_before(s, {place - a.left, place + 8 - a.left});
}

// Puts a thread's part of the output, times a factor for each of its two rows, into the warpgroup's
// shared memory as the copy engine takes it: in columns of 64 elements, `kColumnBytes` apart.
template <class T, int kColumnBytes, int N>
__device__ __forceinline__ void put_rows(char* out, const float (&o)[N], const float (&factor)[2],
                                         int warp, int lane) {
  const int r = 16 * warp + lane % 16;
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
    const int piece = 2 * (i % 4) + lane / 16;
    char* const to = out + i / 4 * kColumnBytes + r * 128 + (piece ^ (r % 8)) * 16;
    const float* x = o + 8 * i;
    cuda::store_matrices(to, cuda::pack_pair<T>(x[0] * factor[0], x[1] * factor[0]),
                         cuda::pack_pair<T>(x[2] * factor[1], x[3] * factor[1]),
                         cuda::pack_pair<T>(x[4] * factor[0], x[5] * factor[0]),
                         cuda::pack_pair<T>(x[6] * factor[1], x[7] * factor[1]));
  }
}

// Sends whole columns of rows from shared memory by the copy engine. One thread does it.
template <int kColumns, int kColumnBytes>
__device__ __forceinline__ void send_rows(const char* out, const ForwardArguments& a,
                                          const TileOfQueries& t, int first_row) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    cuda::tensor_store(&a.out, out + c * kColumnBytes, 64 * c, t.q_begin + first_row, t.head,
                       a.packed ? 0 : t.batch);
  }
  cuda::bulk_commit();
}

// Copies `rows` rows of a packed sequence, where those behind them belong to another sequence. The
// copy engine would overwrite these. `thread` is one of the warpgroup's 128.
template <class T, int kColumnBytes>
__device__ __forceinline__ void copy_last_rows(const char* out, const ForwardArguments& a,
                                               const TileOfQueries& t, int first_row, int rows,
                                               int thread) {
  for (int i = thread; i < rows * a.value_pieces; i += 128) {
    const int row = i / a.value_pieces, piece = i % a.value_pieces;
    const uint4 x = *reinterpret_cast<const uint4*>(out + piece / 8 * kColumnBytes + row * 128 +
                                                    ((piece % 8) ^ (row % 8)) * 16);
    const int64_t at =
        (t.q_begin + first_row + row) * a.out_view.row + t.head * a.out_view.head + piece * 8;
    *reinterpret_cast<uint4*>(static_cast<T*>(a.out_view.data) + at) = x;
  }
}

#endif

}  // namespace fk::cuda_sm90
