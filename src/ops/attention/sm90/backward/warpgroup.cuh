// This file is a part of attention's backward on Hopper: what warpgroups that compute have in
// common, whatever the head size: probabilities from scores, adding to the sum of dQ, storing dK
// and dV.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/convert.cuh"
#include "cuda/math.cuh"
#include "cuda/wgmma.cuh"
#include "ops/attention/cuda/score_change.cuh"
#include "ops/attention/sm90/backward/convert.cuh"
#include "ops/attention/sm90/backward/load.cuh"

namespace fk::cuda_sm90::backward {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using namespace fk::cuda;  // NOLINT: the instructions

// Returns the low word of the descriptor of a tile in shared memory, as multiplications take them
// (cuda/wgmma.cuh). The high words are all the same, and offsets never carry into them; with sums
// of 64 bits the compiler would leave the uniform registers.
__device__ __forceinline__ uint32_t low_word(uint64_t descriptor) {
  return static_cast<uint32_t>(descriptor);
}
__device__ __forceinline__ uint64_t descriptor(uint32_t low, uint32_t bytes) {
  return static_cast<uint64_t>(0x40000040u) << 32 | (low + (bytes >> 4));
}
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }

template <class T, class SharedMemory, Kind kKind>
struct Warpgroup {
  using Shared = SharedMemory;
  static constexpr int kD = Shared::kD, kM = Shared::kM, kN = Shared::kN;
  static constexpr bool kFeatures = kKind == Kind::kFeatures;
  // Registers are so few that there are none for masks and turns, nor for dQ beside dV and dK.
  static constexpr bool kTight = kD == 128 && kM == 80;

  // Says where the warpgroup is among the query blocks of its tile.
  struct Walk {
    int m, block, last_block;  // blocks: places in the workspace
  };

  const Params& p;
  Shared& shared;
  const int group, warp, lane;  // warpgroup, warp in it
  Turn stage, tile_turn;

  // Returns this warp's first row in a tile of keys. Wide heads leave both warpgroups the same
  // keys.
  __device__ __forceinline__ int first_row() const {
    const int part = Shared::kPair ? static_cast<int>(cluster_rank()) : Shared::kWide ? 0 : group;
    return part * 64 + warp * 16;
  }

  __device__ __forceinline__ void release(uint64_t* barrier) {
    __syncwarp();
    if (lane == 0 || kEveryLaneArrives) barrier_arrive(barrier);
  }

  // Returns log2(e) times the slope of the head whose blocks in the workspace `block` is one of.
  __device__ __forceinline__ float slope_at(const Tile& tile, int block) {
    if (p.slopes.data == nullptr) return 0.f;
    const int head = tile.kv_head * p.group + (block - tile.sum) % p.group;
    const int64_t i = tile.batch * p.slopes.batch + head * p.slopes.head;
    return static_cast<const float*>(p.slopes.data)[i] * kLog2E;
  }

  // Makes scores with features, in units of log 2: scaled, and cut by the softcap. All of them go
  // under one condition, ahead of the two forms of the exponentials.
  __device__ __forceinline__ void finish_scores(float (&s)[kM / 2]) {
    if (p.softcap > 0) {
      const cuda::attention::Softcap<true> softcap(p.scale, p.softcap, kLog2E);
#pragma unroll
      for (float& x : s) x = softcap(x);
    } else {
#pragma unroll
      for (float& x : s) x *= p.scale_log2;
    }
  }

  // Replaces s by P. With features s is what finish_scores has made; it is not used further, for
  // want of registers: `packed` gets P in pairs of T, `weights` P times the derivative of the
  // softcap in pairs of float16. The thread's elements are rows (keys) g and g + 8, columns
  // (queries) 8 i + 2 t + e.
  template <bool kMasked>
  __device__ __forceinline__ void exponentials(float (&s)[kM / 2],
                                               [[maybe_unused]] uint32_t (&packed)[kM / 4],
                                               [[maybe_unused]] uint32_t (&weights)[kM / 4],
                                               const float* stats, const Tile& tile, int q0,
                                               [[maybe_unused]] float slope) {
    const float2* neg_lse = reinterpret_cast<const float2*>(stats) + lane % 4;
    [[maybe_unused]] int low[2], place[2];
    [[maybe_unused]] uint32_t span[2];
    [[maybe_unused]] const float to_tanh = p.softcap > 0 ? 1.f / (p.softcap * kLog2E) : 0.f;
    if constexpr (kMasked || kFeatures) {
      const int offset = tile.k_len - tile.q_len;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int key = tile.n * kN + first_row() + lane / 4 + 8 * j;
        const int first = max(key - p.right - offset, -kFar);
        const int last = min(key + p.left - offset, kFar);
        const bool seen = key < tile.k_len && first <= last;
        low[j] = seen ? first - q0 - lane % 4 * 2 : kFar;
        span[j] = seen ? last - first : 0;
        place[j] = q0 + lane % 4 * 2 + offset - key;
      }
    }
#pragma unroll
    for (int i = 0; i < kM / 8; ++i) {
      const float2 l = neg_lse[4 * i];
      [[maybe_unused]] float factor[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float x = s[4 * i + j];
        if constexpr (kFeatures) {
          factor[j] = cuda::attention::softcap_slope(x * to_tanh);
          x -= cuda::attention::alibi(slope, place[j / 2] + 8 * i + j % 2);
          x += j % 2 ? l.y : l.x;
        } else {
          x = fmaf(x, p.scale_log2, j % 2 ? l.y : l.x);
        }
        if constexpr (kMasked) {
          if (static_cast<uint32_t>(8 * i + j % 2 - low[j / 2]) > span[j / 2]) x = -INFINITY;
        }
        s[4 * i + j] = exp2_fast(x);
      }
      if constexpr (kFeatures) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float low = s[4 * i + 2 * j], high = s[4 * i + 2 * j + 1];
          packed[2 * i + j] = pack_pair<T>(low, high);
          weights[2 * i + j] = pack_pair<__half>(low * factor[2 * j], high * factor[2 * j + 1]);
        }
      }
    }
  }

  // Goes on to the next pair of blocks.
  __device__ __forceinline__ void advance(Walk& walk, const Tile& tile) {
    walk.last_block = walk.block++;
    if (walk.block == tile.sum + (walk.m + 1) * p.group) {
      walk.block += (p.m_step - 1) * p.group;
      walk.m += p.m_step;
    }
  }

  // Waits until the key block before has added this part, where the sum goes over key blocks in
  // their order.
  __device__ __forceinline__ void wait_for_turn(const int* turn, const Tile& tile, int block) {
    const int m = (block - tile.sum) / p.group;
    const int offset = tile.k_len - tile.q_len;
    const int first = max(0, m * kM + offset - p.left) / kN;
    const int last_query = min(m * kM + kM, tile.q_len) - 1;
    const int last = min(tile.k_len - 1, last_query + offset + p.right) / kN;
    const int earlier = p.descending ? last - tile.n : tile.n - first;
    while (load_acquire(turn) != earlier) {
    }
  }

  // Adds a part of dQ^T to the sum through a place in shared memory of this warp's own, so warps
  // need not wait for each other; kInUse: how many of the last additions may still read other
  // places.
  template <int kInUse, int kSize>
  __device__ __forceinline__ void add_dq(const float (&dq)[kSize], const Tile& tile, int block,
                                         int part, float* own) {
    if (p.sum == nullptr) return;
    if (lane == 0) bulk_wait_read<kInUse>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kSize / 4; ++i) {
      *reinterpret_cast<float4*>(own + (i * 32 + lane) * 4) =
          make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
    fence_async_shared();
    __syncwarp();
    if (lane == 0) {
      constexpr int kBytes = kSize * 32 * 4;
      int* turn = p.turns + (static_cast<int64_t>(block) * dq_parts(kD) + part);
      if (!kTight && p.turns != nullptr) wait_for_turn(turn, tile, block);
      bulk_reduce_add(p.sum + static_cast<int64_t>(block) * (kM * kD) + part * (kBytes / 4), own,
                      kBytes);
      bulk_commit();
      if (!kTight && p.turns != nullptr) {
        bulk_wait<0>();
        __threadfence();
        atomicAdd(turn, 1);
      }
    }
  }

  // Says that this warp's part of dQ of a whole tile is added up. That of the tile before is by
  // then, so that it costs no time.
  __device__ __forceinline__ void say_done() {
    if (lane != 0) return;
    volatile int& pending = shared.pending[group * 4 + warp];
    if (pending < 0) return;
    bulk_wait<0>();
    fence_async();
    add_release(p.done + pending);
    pending = -1;
  }

  __device__ __forceinline__ const Tile& next_tile() {
    // The next tile may wait for what is pending.
    uint64_t* full = &shared.tile_full[tile_turn.index()];
    if (!barrier_try_wait(full, tile_turn.phase())) say_done();
    __syncwarp();
    barrier_wait(full, tile_turn.phase());
    return shared.tile[tile_turn.index()];
  }
  __device__ __forceinline__ void finish_tile(const Tile& tile) {
    say_done();
    __syncwarp();
    const bool adds = !Shared::kPair || group == 2;  // to dQ
    if (lane == 0 && p.done != nullptr && adds) shared.pending[group * 4 + warp] = tile.head;
    release(&shared.tile_empty[tile_turn.index()]);
    ++tile_turn.number;
  }
  __device__ __forceinline__ void finish_block() {
    say_done();
    if (lane == 0) bulk_wait<0>();
    __syncwarp();
  }

  template <int kSize>
  __device__ __forceinline__ void store_rows(const float (&d)[kSize], float scale,
                                             const attention::View& to, int columns,
                                             const Tile& tile) {
    if (to.data == nullptr) return;
    const int lane = lane_now();
    const int batch = is_packed<kKind>(p) ? 0 : tile.batch;
    T* base = static_cast<T*>(to.data) + batch * to.batch + tile.kv_head * to.head;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int key = tile.n * kN + first_row() + lane / 4 + 8 * j;
      T* row = base + (static_cast<int64_t>(tile.k_begin) + key) * to.row + lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < kSize / 4; i += 4) {
        uint32_t w[4];
#pragma unroll
        for (int a = 0; a < 4; ++a) {
          w[a] = pack_pair<T>(d[4 * (i + a) + 2 * j] * scale, d[4 * (i + a) + 2 * j + 1] * scale);
        }
        transpose_quad(w, lane);
        if (key < tile.k_len && i * 8 + lane % 4 * 8 < columns) {
          *reinterpret_cast<uint4*>(row + i * 8) = make_uint4(w[0], w[1], w[2], w[3]);
        }
      }
    }
  }
};

// Begins a block, with all its threads, and returns its shared memory.
template <class Shared>
__device__ __forceinline__ Shared& begin_block(const Params& p) {
  extern __shared__ __align__(1024) uint8_t storage[];
  auto& shared = *reinterpret_cast<Shared*>(storage);
  static_assert(sizeof(shared) <= 227 * 1024);
  if (threadIdx.x == 0) {
    init_barriers(shared);
    for (const CUtensorMap& map : p.maps) prefetch_tensor_map(&map);
    shared.tile[1].loads = shared.tile[1].steps = 0;
    fence_async_shared();  // the tiles themselves are copied there
  }
  if (threadIdx.x < Shared::kThreads / 32 - 1) shared.dq_block[threadIdx.x].sequence = 0;
  if (threadIdx.x < Shared::kWarps) shared.pending[threadIdx.x] = -1;
  __syncthreads();
  if (Shared::kPair || p.parts > 1) {  // the other block's barriers
    cluster_arrive();
    cluster_wait();
  }
  let_next_kernel_start();
  wait_for_earlier_kernels();
  return shared;
}

// The first warpgroup does this: one thread brings tiles, and other warps make dq of finished sums.
template <class T, Kind kKind, class Shared>
__device__ __forceinline__ void serve_block(const Params& p, Shared& shared) {
  give_registers<Shared::kServeRegisters>();
  if (threadIdx.x == 0) {
    produce<kKind>(p, shared);
  } else if (threadIdx.x >= 32 && p.done != nullptr) {
    convert_blocks<T, kKind, 2>(p, shared);
  }
}

#endif

}  // namespace fk::cuda_sm90::backward
