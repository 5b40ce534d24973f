// This file is about tiles of the float32 forward on Hopper (sm90/float32.cuh) that several blocks
// share, each with a part of the keys: the blocks of a cluster, counted along z, which read each
// other's sums in shared memory.
#pragma once

#include "cuda/tma.cuh"
#include "ops/attention/cuda/scores.cuh"

namespace fk::cuda::attention {

constexpr int kMostParts = 2;

// Returns how many blocks share a tile, a power of two. It is read anew, or else it would be kept
// in a register.
__device__ __forceinline__ int part_count() {
  int parts;
  asm volatile("mov.u32 %0, %%nctaid.z;" : "=r"(parts));
  return parts;
}

// A block takes these of the keys [begin, end), kKeys at a time.
struct Keys {
  int begin, end;

  template <class Tile>
  static __device__ __forceinline__ Keys of(int begin, int end) {
    constexpr int kKeys = Tile::kKeys;
    begin = begin / kKeys * kKeys;
    const int parts = part_count();
    const int each = (max(end - begin, 0) + kKeys * parts - 1) / (kKeys * parts) * kKeys;
    begin += static_cast<int>(blockIdx.z) * each;
    return {begin, min(begin + each, end)};
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// After this, each block sees what the others have written to their shared memory.
__device__ __forceinline__ void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}
// No block goes on before all have come here.
__device__ __forceinline__ void cluster_rendezvous() {
  cluster_arrive_relaxed();
  cluster_wait();
}

// Returns what block z of the cluster has at the same place in shared memory.
__device__ __forceinline__ float4 load_part(uint32_t address, int z) {
  float4 x;
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}\n"
      : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
      : "r"(address), "r"(z)
      : "memory");
  return x;
}

// `from` has what each row's softmax has in this block, a maximum (an exponent of 2) and a sum, 16
// bytes apart; `to` gets what it has in all, and what this block's out is to be multiplied with.
template <class Tile>
__device__ __forceinline__ void merge_rows(uint32_t from, uint32_t to) {
  static_assert(Tile::kThreads >= Tile::kRows);
  cluster_barrier();
  const int row = thread_index(), parts = part_count();
  if (row < Tile::kRows) {
    float maxima[kMostParts], sums[kMostParts];
    float own = 0.f, highest = -INFINITY, all = 0.f;
#pragma unroll
    for (int z = 0; z < kMostParts; ++z) {
      const float4 x = load_part(from + row * 16, min(z, parts - 1));
      maxima[z] = x.x;
      sums[z] = z < parts ? x.y : 0.f;
      highest = fmaxf(highest, x.x);
      if (z == static_cast<int>(blockIdx.z)) own = x.x;
    }
    const float base = highest == -INFINITY ? 0.f : highest;
#pragma unroll
    for (int z = 0; z < kMostParts; ++z) {
      all += sums[z] * exp2_fast(maxima[z] - base);
    }
    store_shared(to + row * 16, highest, all);
    store_shared(to + row * 16 + 8, exp2_fast(own - base), 0.f);
  }
  __syncthreads();
}

// Adds up out of all parts, which each block has in `tile`, and writes this block's share of the
// `valid` rows from `first_row` on.
template <class Tile>
__device__ __forceinline__ void write_parts(const Result& out, uint32_t tile, int64_t b,
                                            int64_t first_row, int64_t head, int valid) {
  constexpr int kPieces = Tile::kDim / 8, kAtOnce = 2;  // a piece has 8 columns
  const int parts = part_count(), rows = Tile::kRows >> (31 - __clz(parts));
  const int first = static_cast<int>(blockIdx.z) * rows;
  cluster_barrier();
#pragma unroll 1
  for (int i0 = thread_index(); i0 < rows * kPieces; i0 += kAtOnce * Tile::kThreads) {
    float4 sums[kAtOnce][2] = {};
#pragma unroll 2
    for (int z = 0; z < parts; ++z) {
      float4 x[kAtOnce][2];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = min(i0 + i * Tile::kThreads, rows * kPieces - 1);
        const int r = first + at / kPieces, c = at % kPieces * 8;
        x[i][0] = load_part(float_place<Tile::kDim>(tile, r, c), z);
        x[i][1] = load_part(float_place<Tile::kDim>(tile, r, c + 4), z);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          sums[i][e].x += x[i][e].x;
          sums[i][e].y += x[i][e].y;
          sums[i][e].z += x[i][e].z;
          sums[i][e].w += x[i][e].w;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = i0 + i * Tile::kThreads, r = first + at / kPieces, c = at % kPieces * 8;
      if (at >= rows * kPieces || r >= valid || c >= out.columns || out.data == nullptr) continue;
      const float4(&x)[2] = sums[i];
      const float values[8] = {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w};
      out.store_eight(out.at(b, first_row + r, head), c, values);
    }
  }
  cluster_rendezvous();  // what others read must stay
}

#endif

}  // namespace fk::cuda::attention
