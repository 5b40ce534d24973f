// The main kernel of attention's backward on Hopper. For each pair of query block and key block:
//
//   S^T = K Q^T,  dP^T = V dO^T,  P = exp(scale S - lse),  dS = P (dP - delta),
//   dV += P^T dO,  dK += dS^T Q,  dQ^T = K^T dS^T.
//
// Floor: 10 L^2 D flops a head on the tensor cores. Products that read both operands from shared
// memory keep it busy for longer than the tensor cores unless they have many columns; hence as many
// queries a block as registers allow. A block owns 128 keys of one key head and walks over the
// queries that see them. One thread loads; two warpgroups of 64 keys each compute. Scores are
// transposed (keys are rows), so that P^T and dS^T, as they come out of one product, are the
// register operand of the next; dV and dK stay in registers. dS goes through shared memory once,
// for dQ, which the copy engine adds to a sum in the workspace, float, in an order of elements that
// suits the registers. The warps that neither load nor compute turn sums into dQ, head by head, as
// they are complete (cuda_sm90_backward_convert.cuh).
//
// The tensor cores are kept busy in three ways. The warpgroups are free to drift half a step apart,
// so that one computes exponentials while the other multiplies: dQ of a pair needs dS of both, but
// its product is issued one step later. dV and dK are issued in parts, between parts of the
// arithmetic that makes their operands. S of the next pair is queued before the end of a step.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/convert.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/math.cuh"
#include "cuda/wgmma.cuh"
#include "ops/attention/cuda_sm90_backward_convert.cuh"
#include "ops/attention/cuda_sm90_backward_tiles.cuh"

namespace fk::cuda_sm90::backward {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using namespace fk::cuda;  // NOLINT: the instructions

// Tiles in shared memory as multiplications take them (cuda/wgmma.cuh): the low words of their
// descriptors. The high words are all the same, and offsets never carry into them; with sums of 64
// bits the compiler would leave the uniform registers.
__device__ __forceinline__ uint32_t low_word(uint64_t descriptor) {
  return static_cast<uint32_t>(descriptor);
}
__device__ __forceinline__ uint64_t descriptor(uint32_t low, uint32_t bytes) {
  return static_cast<uint64_t>(0x40000040u) << 32 | (low + (bytes >> 4));
}
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }

// One warpgroup's part of a block: 64 keys, and a part of dQ.
template <class T, int kD, int kM, Kind kKind>
struct Consumer {
  static constexpr bool kFeatures = kKind == Kind::kFeatures;
  // dQ^T is D x kM: its rows are shared out where there are enough of them, else its columns.
  static constexpr int kDqQueries = kD == 64 ? kM / 2 : kM;
  static constexpr int kParts = kM == 80 ? 5 : 4;
  using Shared = SharedTiles<kD, kM>;

  // Where the warpgroup is among the query blocks of its tile.
  struct Walk {
    int m, block, last_block;  // blocks: places in the workspace
    int cut;                   // the query block that a packed sequence ends in, or -1
  };

  // Low words of descriptors: this warpgroup's 64 keys of K and V, and its part of K^T for dQ.
  struct Keys {
    uint32_t k, k_transposed, v;
  };

  const Params& p;
  Shared& shared;
  const int group, warp, lane;  // warpgroup, warp in it
  Turn stage, tile_turn, kv_turn;

  // Its number among those that compute, not kept in a register.
  __device__ __forceinline__ int thread_now() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread - (kThreads - kConsumerWarps * 32);
  }

  __device__ __forceinline__ void release(uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  }

  // The rows behind a packed sequence are another one's, and 0 times what is there may be NaN. Both
  // warpgroups clear what both read, so they need not wait for each other.
  template <int kRows>
  __device__ __forceinline__ void clear_behind([[maybe_unused]] uint16_t* tile,
                                               [[maybe_unused]] int rows) {
    if constexpr (kKind != Kind::kDense) {
      for (int i = 8 * rows + thread_now() % 128; i < 8 * kRows; i += 128) {
#pragma unroll
        for (int c = 0; c < kD / 64; ++c) {
          *reinterpret_cast<uint4*>(tile + c * kRows * 64 + i * 8) = uint4{};
        }
      }
      fence_async_shared();
      named_barrier_sync(1 + group, 128);
    }
  }
  // The same for query block m, if it is the one that holds a packed sequence's end.
  __device__ __forceinline__ void clear_queries(uint16_t* block, const Tile& tile, const Walk& walk,
                                                int m) {
    if (kKind != Kind::kDense && m == walk.cut) clear_behind<kM>(block, tile.q_len - m * kM);
  }
  // ... and for this tile's keys.
  __device__ __forceinline__ void clear_keys(uint16_t* block, const Tile& tile) {
    const int rows = tile.k_len - tile.n * kN;
    if (kKind != Kind::kDense && p.problem.packed && rows < kN) clear_behind<kN>(block, rows);
  }

  // a: this warpgroup's 64 rows of K or V; b: Q or dO.
  __device__ __forceinline__ void multiply_scores(float (&s)[kM / 2], uint32_t a,
                                                  const uint16_t* b) {
    const uint32_t b0 = low_word(k_major(b));
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      multiply<T>(s, descriptor(a, k / 4 * kN * 128 + k % 4 * 32),
                  descriptor(b0, k / 4 * kM * 128 + k % 4 * 32), k > 0);
    }
  }

  // kSteps times 16 queries from number 16 * first on.
  template <int kSteps>
  __device__ __forceinline__ void multiply_dkv(float (&d)[kD / 2], const uint32_t (&a)[kSteps][4],
                                               const uint16_t* b, int first) {
    const uint32_t b0 = low_word(outer_major(b, kM * 128));
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      multiply<T, Major::kOuter>(d, a[k], descriptor(b0, (first + k) * 2048), true);
    }
  }

  __device__ __forceinline__ void multiply_dq(float (&dq)[kDqQueries / 2], uint32_t a,
                                              const uint16_t* ds) {
    const uint32_t b0 = low_word(k_major(ds + (kD == 64 ? group * kDqQueries * 64 : 0)));
#pragma unroll
    for (int k = 0; k < kN / 16; ++k) {
      multiply<T, Major::kOuter, Major::kK>(dq, descriptor(a, k * 2048),
                                            descriptor(b0, k / 4 * kM * 128 + k % 4 * 32), k > 0);
    }
  }

  // log2(e) times the slope of the head whose blocks in the workspace `block` is one of.
  __device__ __forceinline__ float slope_at(const Tile& tile, int block) {
    if (p.slopes.data == nullptr) return 0.f;
    const int head = tile.kv_head * p.group + (block - tile.sum) / p.sum_stride;
    const int64_t i = tile.batch * p.slopes.batch + head * p.slopes.head;
    return static_cast<const float*>(p.slopes.data)[i] * kLog2E;
  }

  // s becomes P. With features it is not used further, for want of registers: `packed` gets P in
  // pairs of T, `weights` P times the derivative of the softcap in pairs of float16. The thread's
  // elements are rows (keys) g and g + 8, columns (queries) 8 i + 2 t + e.
  template <bool kMasked>
  __device__ __forceinline__ void exponentials(float (&s)[kM / 2],
                                               [[maybe_unused]] uint32_t (&packed)[kM / 4],
                                               [[maybe_unused]] uint32_t (&weights)[kM / 4],
                                               const float* stats, const Tile& tile, int q0,
                                               [[maybe_unused]] float slope) {
    const float2* neg_lse = reinterpret_cast<const float2*>(stats) + lane % 4;
    [[maybe_unused]] int low[2], place[2];
    [[maybe_unused]] uint32_t span[2];
    if constexpr (kMasked || kFeatures) {
      const int offset = tile.k_len - tile.q_len;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int key = tile.n * kN + group * 64 + warp * 16 + lane / 4 + 8 * j;
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
          x *= p.scale_log2;
          factor[j] = 1.f;
          if (p.softcap > 0) {
            // tanh(y) = 1 - 2 / (exp(2 y) + 1), as exact as its float.
            const float t = 1.f - __fdividef(2.f, exp2_fast(x * (2.f / p.softcap)) + 1.f);
            x = p.softcap * kLog2E * t;
            factor[j] = 1.f - t * t;
          }
          x -= slope * fabsf(static_cast<float>(place[j / 2] + 8 * i + j % 2));
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

  // Each warp has its own part of the sum, so warps need not wait for each other.
  __device__ __forceinline__ void add_dq(const float (&dq)[kDqQueries / 2], const Tile& tile,
                                         int block) {
    if (p.sum == nullptr) return;
    const int part = group * 4 + warp;
    float* own = shared.dq[part];
    if (lane == 0) bulk_wait_read<0>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kDqQueries / 8; ++i) {
      *reinterpret_cast<float4*>(own + (i * 32 + lane) * 4) =
          make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
    fence_async_shared();
    __syncwarp();
    if (lane == 0) {
      constexpr int kBytes = sizeof(shared.dq[0]);
      int* turn = p.turns + (static_cast<int64_t>(block) * kConsumerWarps + part);
      if (kM != 80 && p.turns != nullptr) {
        // The sum over key blocks in their order: this warp of the one before has to be done.
        const int m = block % p.m_blocks;
        const int offset = tile.k_len - tile.q_len;
        const int first = max(0, m * kM + offset - p.left) / kN;
        const int last_query = min(m * kM + kM, tile.q_len) - 1;
        const int last = min(tile.k_len - 1, last_query + offset + p.right) / kN;
        const int earlier = p.descending ? last - tile.n : tile.n - first;
        while (load_acquire(turn) != earlier) {
        }
      }
      bulk_reduce_add(p.sum + static_cast<int64_t>(block) * (kM * kD) + part * (kBytes / 4), own,
                      kBytes);
      bulk_commit();
      if (kM != 80 && p.turns != nullptr) {
        bulk_wait<0>();
        __threadfence();
        atomicAdd(turn, 1);
      }
    }
  }

  // One pair of blocks. S of this one is there; at the end S of the next is, and dQ of the one
  // before is added up.
  template <bool kFirst>
  __device__ __forceinline__ void step(const Tile& tile, Walk& walk, const Keys& keys, bool last,
                                       float (&s)[kM / 2], float (&dk)[kD / 2],
                                       float (&dv)[kD / 2]) {
    const int now = stage.index();
    float dp[kM / 2];
    const auto multiply_dp = [&] {
      barrier_wait(&shared.dout_full[now], stage.phase());
      clear_queries(shared.dout[now], tile, walk, walk.m);
      warpgroup_fence();
      multiply_scores(dp, keys.v, shared.dout[now]);
      warpgroup_commit();
    };
    // With features there are no registers for it during the exponentials.
    if constexpr (!kFeatures) multiply_dp();

    [[maybe_unused]] uint32_t packed[kM / 4], weights[kM / 4];
    const float slope = kFeatures ? slope_at(tile, walk.block) : 0.f;
    if (kM == 80 || (walk.m >= tile.plain_first && walk.m < tile.plain_end)) {
      exponentials<false>(s, packed, weights, shared.stats[now], tile, walk.m * kM, slope);
    } else {
      exponentials<true>(s, packed, weights, shared.stats[now], tile, walk.m * kM, slope);
    }
    if constexpr (kM == 80 && kKind == Kind::kPacked) {
      // Keys behind the end, of which there are no registers to take care any earlier.
      if (tile.plain_end == 0) {
        const int left = tile.k_len - tile.n * kN - thread_now() / 32 * 16 - lane_now() / 4;
#pragma unroll
        for (int i = 0; i < kM / 2; ++i) {
          if (i % 4 / 2 * 8 >= left) s[i] = 0.f;
        }
      }
    }
    if constexpr (kFeatures) multiply_dp();
    barrier_wait(&shared.ds_empty[now], stage.phase() ^ 1);
    warpgroup_wait<0>();
    keep_registers(dp);
    if (last) release(&shared.v_empty);

    // dS is stored as queries x keys: lane l gives row l % 8 of matrix l / 8.
    uint16_t* ds_row = shared.ds[now] + group * kM * 64 + (lane / 16 * 8 + lane % 8) * 64 +
                       (((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 8);
    const float2* delta = reinterpret_cast<const float2*>(shared.stats[now] + kM) + lane % 4;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      constexpr int kSteps = kM / 16 / kParts;
      uint32_t pt[kSteps][4], dst[kSteps][4];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const int i = 8 * (part * kSteps + k);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          pt[k][j] = kFeatures ? packed[i / 2 + j] : pack_pair<T>(s[i + 2 * j], s[i + 2 * j + 1]);
        }
      }
      warpgroup_fence();
      multiply_dkv<kSteps>(dv, pt, shared.dout[now], part * kSteps);
      warpgroup_commit();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int i = 8 * (part * kSteps + k) + 4 * h;
          const float2 d = delta[i];
          float x[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            float weight = s[i + j];
            if constexpr (kFeatures) {
              const __half2 pair = *reinterpret_cast<const __half2*>(&weights[(i + j) / 2]);
              weight = j % 2 ? __high2float(pair) : __low2float(pair);
            }
            x[j] = weight * (dp[i + j] - (j % 2 ? d.y : d.x));
          }
          dst[k][2 * h] = pack_pair<T>(x[0], x[1]);
          dst[k][2 * h + 1] = pack_pair<T>(x[2], x[3]);
        }
        store_matrices_transposed(ds_row + (part * kSteps + k) * 16 * 64, dst[k][0], dst[k][1],
                                  dst[k][2], dst[k][3]);
      }
      warpgroup_fence();
      multiply_dkv<kSteps>(dk, dst, shared.q[now], part * kSteps);
      warpgroup_commit();
    }
    fence_async_shared();
    release(&shared.ds_full[now]);

    [[maybe_unused]] float dq[kDqQueries / 2];
    if constexpr (!kFirst) {
      barrier_wait(&shared.ds_full[now ^ 1], Turn{stage.number - 1}.phase());
      if constexpr (kM == 80) {
        // What dV and dK read has to be free: there are no other registers for dQ.
        warpgroup_wait<0>();
        keep_registers(dk);
        keep_registers(dv);
      }
      warpgroup_fence();
      multiply_dq(dq, keys.k_transposed, shared.ds[now ^ 1]);
      warpgroup_commit();
      warpgroup_wait<1>();
    } else {
      warpgroup_wait<0>();
    }
    keep_registers(dk);
    keep_registers(dv);
    release(&shared.stage_empty[now]);
    ++stage.number;
    // S of the step after the last is of whatever stands in the buffer, and not used: the compiler
    // would have multiplications under a condition wait for each other.
    if (!last) {
      barrier_wait(&shared.q_full[stage.index()], stage.phase());
      const int next = walk.m + 1 == tile.m_end ? tile.m_first : walk.m + 1;
      clear_queries(shared.q[stage.index()], tile, walk, next);
    }
    warpgroup_fence();
    multiply_scores(s, keys.k, shared.q[stage.index()]);
    warpgroup_commit();
    if constexpr (!kFirst) {
      warpgroup_wait<1>();
      keep_registers(dq);
      release(&shared.ds_empty[now ^ 1]);
      add_dq(dq, tile, walk.last_block);
    }
    walk.last_block = walk.block;
    ++walk.block;
    if (++walk.m == tile.m_end) {
      walk.block += p.sum_stride - (tile.m_end - tile.m_first);
      walk.m = tile.m_first;
    }
    warpgroup_wait<0>();
    keep_registers(s);
  }

  // Says that this warp's part of dQ of a whole tile is added up. That of the tile before
  // (`pending`; -1: none) is by then, so that it costs no time.
  __device__ __forceinline__ void say_done(int& pending) {
    if (lane != 0 || pending < 0) return;
    bulk_wait<0>();
    fence_async();
    add_release(p.done + pending);
    if (p.problem.packed) add_release(&p.counters->done);
    pending = -1;
  }

  __device__ __forceinline__ void run_tile(const Tile& tile, int& pending, float (&dk)[kD / 2],
                                           float (&dv)[kD / 2]) {
    const int count = uniform(tile.steps);
    Walk walk;
    walk.m = tile.m_first;
    walk.block = tile.sum + walk.m;
    if constexpr (kKind != Kind::kDense) {
      walk.m = uniform(walk.m);
      walk.cut = uniform(p.problem.packed && tile.q_len % kM != 0 ? tile.q_len / kM : -1);
    }
    const int kv = kv_turn.number % Shared::kKeyPlaces;
    const uint16_t* k_tile = shared.k[kv];
    const Keys keys = {
        uniform(low_word(k_major(k_tile + group * 64 * 64))),
        uniform(low_word(outer_major(k_tile + (kD == 64 ? 0 : group * kN * 64), kN * 128))),
        uniform(low_word(k_major(shared.v + group * 64 * 64)))};
    float s[kM / 2];
    barrier_wait(&shared.k_full[kv], kv_turn.number / Shared::kKeyPlaces % 2);
    clear_keys(shared.k[kv], tile);
    barrier_wait(&shared.q_full[stage.index()], stage.phase());
    clear_queries(shared.q[stage.index()], tile, walk, walk.m);
    warpgroup_fence();
    multiply_scores(s, keys.k, shared.q[stage.index()]);
    warpgroup_commit();
    barrier_wait(&shared.v_full, kv_turn.number % 2);
    clear_keys(shared.v, tile);
    ++kv_turn.number;
    warpgroup_wait<0>();
    keep_registers(s);
    step<true>(tile, walk, keys, count == 1, s, dk, dv);
    say_done(pending);
    __syncwarp();
#pragma unroll 1
    for (int i = 2; i <= count; ++i) step<false>(tile, walk, keys, i == count, s, dk, dv);

    const int last_ds = stage.index() ^ 1;
    float dq[kDqQueries / 2];
    barrier_wait(&shared.ds_full[last_ds], Turn{stage.number - 1}.phase());
    warpgroup_fence();
    multiply_dq(dq, keys.k_transposed, shared.ds[last_ds]);
    warpgroup_commit();
    warpgroup_wait<0>();
    keep_registers(dq);
    release(&shared.ds_empty[last_ds]);
    release(&shared.k_empty[kv]);
    add_dq(dq, tile, walk.last_block);
  }

  // Four lanes hold 32 columns of a row in words of two; here each gets 8 neighbours of its own.
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

  __device__ __forceinline__ void store_rows(const float (&d)[kD / 2], float scale,
                                             const attention::View& to, const Tile& tile) {
    if (to.data == nullptr) return;
    const int lane = lane_now();
    const int batch = p.problem.packed ? 0 : tile.batch;
    T* base = static_cast<T*>(to.data) + batch * to.batch + tile.kv_head * to.head;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int key = tile.n * kN + group * 64 + warp * 16 + lane / 4 + 8 * j;
      T* row = base + (static_cast<int64_t>(tile.k_begin) + key) * to.row + lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < kD / 8; i += 4) {
        uint32_t w[4];
#pragma unroll
        for (int a = 0; a < 4; ++a) {
          w[a] = pack_pair<T>(d[4 * (i + a) + 2 * j] * scale, d[4 * (i + a) + 2 * j + 1] * scale);
        }
        transpose_quad(w, lane);
        if (key < tile.k_len) {
          *reinterpret_cast<uint4*>(row + i * 8) = make_uint4(w[0], w[1], w[2], w[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    int pending = -1;  // in the first lane
    while (true) {
      // The next tile may wait for what is pending.
      uint64_t* full = &shared.tile_full[tile_turn.index()];
      if (!barrier_try_wait(full, tile_turn.phase())) say_done(pending);
      __syncwarp();
      barrier_wait(full, tile_turn.phase());
      const Tile& tile = shared.tile[tile_turn.index()];
      if (static_cast<int>(uniform(tile.number)) >= p.tiles) break;
      float dk[kD / 2], dv[kD / 2];
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) dk[i] = dv[i] = 0;
      if (uniform(tile.steps) != 0) run_tile(tile, pending, dk, dv);
      store_rows(dv, 1.f, p.dv, tile);
      store_rows(dk, p.scale, p.dk, tile);
      say_done(pending);
      __syncwarp();
      if (p.done != nullptr) pending = tile.head;
      release(&shared.tile_empty[tile_turn.index()]);
      ++tile_turn.number;
    }
    say_done(pending);
    if (lane == 0) bulk_wait<0>();
    __syncwarp();
  }
};

#endif

template <class T, int kD, int kM, Kind kKind>
__global__ void __launch_bounds__(kThreads, 1)
    attention_backward_kernel([[maybe_unused]] const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t storage[];
  auto& shared = *reinterpret_cast<SharedTiles<kD, kM>*>(storage);
  static_assert(sizeof(shared) <= 227 * 1024);
  int warp = static_cast<int>(threadIdx.x) / 32;
  warp = static_cast<int>(uniform(warp));
  if (threadIdx.x == 0) {
    init_barriers(shared);
    prefetch_tensor_map(&p.q);
    prefetch_tensor_map(&p.k);
    prefetch_tensor_map(&p.dout);
    prefetch_tensor_map(&p.v);
  }
  __syncthreads();
  let_next_kernel_start();
  wait_for_earlier_kernels();
  if (warp < 4) {
    give_registers<24>();
    if (threadIdx.x == 0) {
      produce(p, shared);
    } else if (warp > 0 && p.done != nullptr) {
      convert_blocks<T, kD, kM, 2>(p, shared.dq_block[warp - 1]);
    }
  } else {
    take_registers<240>();
    Consumer<T, kD, kM, kKind> consumer{p, shared, warp / 4 - 1, warp % 4,
                                        static_cast<int>(threadIdx.x) % 32};
    consumer.run();
    if (p.done != nullptr)
      convert_blocks<T, kD, kM, kM == 80 ? 5 : 4>(p, shared.dq_block[warp - 1]);
  }
#endif
}

}  // namespace fk::cuda_sm90::backward
