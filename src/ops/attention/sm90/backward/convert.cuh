// This file is a part of attention's backward on Hopper: it brings dQ from sums of floats in the
// order of the registers to rows of q's type, beside the multiplications, by warps that have
// nothing else to do. Reads and clears 4 bytes and writes 2 for each element; the sums hardly ever
// leave the L2 cache.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/convert.cuh"
#include "ops/attention/sm90/backward/load.cuh"

namespace fk::cuda_sm90::backward {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using cuda::pack_pair;

// Returns the lane. Neither it nor what follows from it is kept in a register from one use to the
// next.
__device__ __forceinline__ int lane_now() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
__device__ __forceinline__ int thread_now() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Transposes an 8 x 8 matrix of 2-byte elements, a row in four lanes.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t w) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(w));
  return result;
}

// Returns the last packed sequence that begins at `place` or before it and is not before `from`.
// Most often it is `from` itself.
template <class Begin>
__device__ __forceinline__ int sequence_at(const Params& p, int from, int place, Begin begin) {
  int step = 1;
  while (from + step < p.problem.batch && begin(from + step) <= place) {
    from += step;
    step *= 2;
  }
  while (step > 1) {
    step /= 2;
    if (from + step < p.problem.batch && begin(from + step) <= place) from += step;
  }
  return from;
}

// Four lanes hold 32 columns of a row in words of two; each gets 8 neighbours of its own here.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int lane) {
#pragma unroll
  for (int step = 2; step >= 1; step /= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      if (a & step) continue;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? w[a] : w[a + step], step);
      if (upper) {
        w[a] = got;
      } else {
        w[a + step] = got;
      }
    }
  }
}

// Finds the next block of dQ to bring into its final form and waits until all its key blocks are
// added. One thread calls it; `block` is in shared memory, since registers are few.
template <class T, class Shared, Kind kKind>
__device__ __forceinline__ void find_block(const Params& p, volatile DqBlock& block) {
  constexpr int kD = Shared::kD, kM = Shared::kM, kN = Shared::kN;
  const int heads = p.kv_heads * p.group;
  while (true) {
    const int i = atomicAdd(&p.counters->block, 1);
    block.rows = 0;
    if (i >= p.beside) return;
    block.segment = i / p.segment;
    block.again = i + p.ring < heads * p.slots;
    int b, row = 0, blocks = p.m_blocks, tiles = p.n_blocks, place = i;
    if (is_packed<kKind>(p)) {
      b = sequence_at(p, block.sequence, i / heads,
                      [&](int b) { return query_begin(p.problem, b) / kM + b; });
      block.sequence = b;
      row = query_begin(p.problem, b);
      const int end = query_begin(p.problem, b + 1);
      place -= (row / kM + b) * heads;
      blocks = end / kM + 1 - row / kM;
      block.rows = end - row;
      tiles = ceil_div(key_begin(p.problem, b + 1) - key_begin(p.problem, b), kN);
    } else {
      block.rows = static_cast<int>(p.problem.q_len);
      b = i / (heads * blocks);
      place -= b * heads * blocks;
    }
    blocks *= p.group;
    int head = place / blocks;
    place -= head * blocks;
    const int* done = p.done + b * p.kv_heads + head;
    block.sum = p.sum + static_cast<int64_t>((i - place) % p.ring + place) * (kM * kD);
    const int m = place / p.group;
    head = head * p.group + place - m * p.group;
    block.rows = block.rows - m * kM;
    if (block.rows <= 0 || head >= heads) {  // nothing is there
      add_release(p.converted + block.segment);
      continue;
    }
    block.to = static_cast<T*>(p.dq.data) + (is_packed<kKind>(p) ? 0 : b * p.dq.batch) +
               static_cast<int64_t>(row + m * kM) * p.dq.row + head * p.dq.head;
    while (load_acquire(done) < tiles * kConsumerWarps) __nanosleep(300);
    return;
  }
}

// Brings 16 columns and all queries (half of them at a head size of 64) of a block of dQ from their
// sum into their final form.
template <class T, class Shared, int kAtOnce>
__device__ __forceinline__ void convert_columns(const Params& p, const volatile DqBlock& block,
                                                int part) {
  constexpr int kD = Shared::kD, kM = Shared::kM;
  constexpr int kGroups = kD == 64 ? kM / 16 : kM / 8;  // of 8 queries, in a warp's part
  static_assert(kGroups % kAtOnce == 0);
  if ((kD == 64 ? part % 4 : part) * 16 >= p.columns) return;
  const int lane = lane_now();
  float4* sum = reinterpret_cast<float4*>(block.sum) + part * kGroups * 32 + lane;
  int row = (kD == 64 ? part / 4 * (kM / 2) : 0) + lane / 4;
  T* to =
      static_cast<T*>(block.to) + row * p.dq.row + (kD == 64 ? part % 4 : part) * 16 + lane % 4 * 2;
  row -= block.rows;
  const bool again = block.again;
#pragma unroll 1
  for (int g = 0; g < kGroups; g += kAtOnce) {
    float4 x[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) x[j] = __ldcg(sum + j * 32);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const uint32_t low = transpose_matrix(pack_pair<T>(x[j].x * p.scale, x[j].y * p.scale));
      const uint32_t high = transpose_matrix(pack_pair<T>(x[j].z * p.scale, x[j].w * p.scale));
      if (row < 0) {
        *reinterpret_cast<uint32_t*>(to) = low;
        *reinterpret_cast<uint32_t*>(to + 8) = high;
      }
      row += 8;
      to += 8 * p.dq.row;
      if (again) __stcg(sum, make_float4(0.f, 0.f, 0.f, 0.f));
      sum += 32;
    }
  }
}

// Does so for the sums of pairs: 16 queries and half of the columns.
template <class T, class Shared>
__device__ __forceinline__ void convert_queries(const Params& p, const volatile DqBlock& block,
                                                int part) {
  constexpr int kD = Shared::kD;
  const int lane = lane_now();
  float4* sum = reinterpret_cast<float4*>(block.sum) + part * (kD / 16 * 32) + lane;
  int row = part % 4 * 16 + lane / 4, column = part / 4 * (kD / 2) + lane % 4 * 8;
  T* to = static_cast<T*>(block.to) + row * p.dq.row + column;
  row -= block.rows;
  const bool again = block.again;
#pragma unroll 1
  for (int i = 0; i < kD / 2; i += 32) {
    float4 x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = __ldcg(sum + j * 32);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        w[j] = h == 0 ? pack_pair<T>(x[j].x * p.scale, x[j].y * p.scale)
                      : pack_pair<T>(x[j].z * p.scale, x[j].w * p.scale);
      }
      transpose_quad(w, lane);
      if (row + 8 * h < 0 && column + i < p.columns) {
        *reinterpret_cast<uint4*>(to + 8 * h * p.dq.row + i) = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
    if (again) {
#pragma unroll
      for (int j = 0; j < 4; ++j) __stcg(sum + j * 32, make_float4(0.f, 0.f, 0.f, 0.f));
    }
    sum += 4 * 32;
  }
}

// A warp brings blocks of dQ from their sum of floats, in the order of the registers
// (Consumer::add_dq) to rows of q's type, and zeroes the sum if another head takes its place.
template <class T, Kind kKind, int kAtOnce, class Shared>
__device__ __forceinline__ void convert_blocks(const Params& p, Shared& shared) {
  // If offsets do not rise to the end, no tile is listed, and nobody would say that one is done.
  if (is_packed<kKind>(p) && p.list[p.tiles].number != p.tiles) return;
  volatile DqBlock& block = shared.dq_block[thread_now() / 32 - 1];
  while (true) {
    if (lane_now() == 0) find_block<T, Shared, kKind>(p, block);
    __syncwarp();
    if (block.rows <= 0) return;
#pragma unroll 1
    for (int part = 0; part < (Shared::kPair ? kConsumerWarps : dq_parts(Shared::kD)); ++part) {
      if constexpr (Shared::kPair) {
        convert_queries<T, Shared>(p, block, part);
      } else {
        convert_columns<T, Shared, kAtOnce>(p, block, part);
      }
    }
    fence_async();
    __syncwarp();
    if (lane_now() == 0) add_release(p.converted + block.segment);
  }
}

#endif

}  // namespace fk::cuda_sm90::backward
