// This is the main kernel of attention's backward on Hopper. For each pair of query block and key
// block:
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
// they are complete (sm90/backward/convert.cuh).
//
// The tensor cores are kept busy in three ways. The warpgroups are free to drift half a step apart,
// so that one computes exponentials while the other multiplies: dQ of a pair needs dS of both, but
// its product is issued one step later. dV and dK are issued in parts, between parts of the
// arithmetic that makes their operands. S of the next pair is queued before the end of a step.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/dependent_launch.cuh"
#include "ops/attention/sm90/backward/warpgroup.cuh"

namespace fk::cuda_sm90::backward {

// Lists what a block has in shared memory. Tiles are as the copy engine writes them: columns of 64
// elements, rows of 128 bytes, swizzled. Rings have two places.
template <int kHeadSize, int kQueries>
struct alignas(1024) SharedTiles {
  static constexpr bool kWide = false, kPair = false;
  static constexpr int kThreads = backward::kThreads, kWarps = kConsumerWarps;
  static constexpr int kServeRegisters = 24;
  static constexpr int kD = kHeadSize, kM = kQueries, kN = keys_a_block(kD), kRows = kN;
  static constexpr int kPanels = (kD + 63) / 64, kColumns = kPanels * 64;
  static constexpr int kValuePanels = kPanels;
  static constexpr int kKeyPlaces = kM == 80 ? 1 : 2;  // 80 queries leave room for one only
  static constexpr int kDoutPlaces = 2;
  uint16_t k[kKeyPlaces][kN * kColumns];  // of this tile and the next
  uint16_t v[kN * kColumns];              // free once the last dP is there, so one place is enough
  uint16_t q[2][kM * kColumns];
  uint16_t dout[2][kM * kColumns];
  uint16_t ds[2][kM * kN];
  float dq[dq_parts(kD)][kM * kD / dq_parts(kD)];
  float stats[2][2 * kM];  // -lse * log2(e), delta
  uint64_t q_full[2], dout_full[2], stage_empty[2];
  uint64_t k_full[2], k_empty[2], v_full, v_empty;
  uint64_t ds_full[2], ds_empty[2];
  uint64_t tile_full[2], tile_empty[2], tile_read;
  uint64_t other_ready, other_full;  // the other block of the cluster is done, its sums are here
  Tile tile[2];
  int pending[kConsumerWarps];  // the head whose dQ this warp has added to; -1: it has been said
  DqBlock dq_block[kThreads / 32 - 1];  // by warp, but for the one that loads
};

template <int kD, int kM>
constexpr int kSharedBytes = sizeof(SharedTiles<kD, kM>);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int kD, int kM>
__device__ __forceinline__ void init_barriers(SharedTiles<kD, kM>& shared) {
  for (int i = 0; i < 2; ++i) {
    cuda::barrier_init(&shared.q_full[i], 1);
    cuda::barrier_init(&shared.dout_full[i], 1);
    cuda::barrier_init_for_warps(&shared.stage_empty[i], kConsumerWarps);
    cuda::barrier_init(&shared.k_full[i], 1);
    cuda::barrier_init_for_warps(&shared.k_empty[i], kConsumerWarps);
    cuda::barrier_init_for_warps(&shared.ds_full[i], kConsumerWarps);
    cuda::barrier_init_for_warps(&shared.ds_empty[i], kConsumerWarps);
    cuda::barrier_init(&shared.tile_full[i], 1);
    cuda::barrier_init_for_warps(&shared.tile_empty[i], kConsumerWarps);
  }
  cuda::barrier_init(&shared.v_full, 1);
  cuda::barrier_init_for_warps(&shared.v_empty, kConsumerWarps);
  cuda::barrier_init(&shared.tile_read, 1);
  cuda::barrier_init(&shared.other_ready, kConsumerWarps);
  cuda::barrier_init(&shared.other_full, 1);
  cuda::fence_barrier_init();
  cuda::fence_barrier_init_cluster();
  cuda::barrier_arrive_expect(&shared.other_full, kD * shared.kN * sizeof(float));
}

template <class T, int kD, int kM, Kind kKind>
struct Consumer;

#endif

template <class T, int kD, int kM, Kind kKind>
__global__ void __launch_bounds__(kThreads, 1)
    attention_backward_kernel([[maybe_unused]] const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  auto& shared = begin_block<SharedTiles<kD, kM>>(p);
  if (uniform(thread_now() / 32) < 4) {
    serve_block<T, kKind>(p, shared);
  } else {
    take_registers<240>();
    const int warp = static_cast<int>(uniform(thread_now() / 32));
    Consumer<T, kD, kM, kKind> consumer{
        {p, shared, warp / 4 - 1, warp % 4, static_cast<int>(threadIdx.x) % 32}};
    consumer.run();
    if (p.done != nullptr) convert_blocks<T, kKind, kM == 80 ? 5 : 4>(p, shared);
  }
#endif
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// One warpgroup computes its part of a block: 64 keys, and a part of dQ.
template <class T, int kD, int kM, Kind kKind>
struct Consumer : Warpgroup<T, SharedTiles<kD, kM>, kKind> {
  using Base = Warpgroup<T, SharedTiles<kD, kM>, kKind>;
  using Base::kFeatures, Base::kTight, Base::kN;
  using Base::next_tile, Base::finish_tile, Base::finish_block;
  using Base::p, Base::shared, Base::group, Base::warp, Base::lane;
  using Base::release, Base::say_done, Base::store_rows;
  using Base::stage;
  using typename Base::Shared;
  using typename Base::Walk;
  // dQ^T is D x kM: its rows are shared out where there are enough of them, else its columns.
  static constexpr int kDqQueries = kD == 64 ? kM / 2 : kM;
  static constexpr int kParts = kM == 80 ? 5 : 4;

  // These are low words of descriptors: of this warpgroup's 64 keys of K and V, and of its part of
  // K^T for dQ.
  struct Keys {
    uint32_t k, k_transposed, v;
  };

  // a is this warpgroup's 64 rows of K or V, and b is Q or dO.
  __device__ __forceinline__ void multiply_scores(float (&s)[kM / 2], uint32_t a,
                                                  const uint16_t* b) {
    const uint32_t b0 = low_word(k_major(b));
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      multiply<T>(s, descriptor(a, k / 4 * kN * 128 + k % 4 * 32),
                  descriptor(b0, k / 4 * kM * 128 + k % 4 * 32), k > 0);
    }
  }

  // Multiplies kSteps times 16 queries, from number 16 * first on.
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

  __device__ __forceinline__ void add_dq(const float (&dq)[kDqQueries / 2], const Tile& tile,
                                         int block) {
    const int part = group * 4 + warp;
    if (part >= dq_parts(kD)) return;
    Base::template add_dq<0>(dq, tile, block, part, shared.dq[part]);
  }

  // Takes one pair of blocks. S of this pair is there at the beginning. At the end S of the next
  // is, and dQ of the one before is added up.
  template <bool kFirst>
  __device__ __forceinline__ void step(const Tile& tile, Walk& walk, const Keys& keys, bool last,
                                       float (&s)[kM / 2], float (&dk)[kD / 2],
                                       float (&dv)[kD / 2]) {
    const int now = stage.index();
    float dp[kM / 2];
    const auto multiply_dp = [&] {
      barrier_wait(&shared.dout_full[now], stage.phase());
      warpgroup_fence();
      multiply_scores(dp, keys.v, shared.dout[now]);
      warpgroup_commit();
    };
    // With features there are no registers for it during the exponentials.
    if constexpr (!kFeatures) multiply_dp();

    [[maybe_unused]] uint32_t packed[kM / 4], weights[kM / 4];
    const float slope = kFeatures ? this->slope_at(tile, walk.block) : 0.f;
    if constexpr (kFeatures) this->finish_scores(s);
    if (kTight || (walk.m >= tile.unmasked_first && walk.m < tile.unmasked_end)) {
      this->template exponentials<false>(s, packed, weights, shared.stats[now], tile, walk.m * kM,
                                         slope);
    } else {
      this->template exponentials<true>(s, packed, weights, shared.stats[now], tile, walk.m * kM,
                                        slope);
    }
    if constexpr (kTight && kKind == Kind::kPacked) {
      // This masks keys behind the end; there were no registers to do so any earlier.
      if (tile.unmasked_end == 0) {
        const int left = tile.k_len - tile.n * kN - (thread_now() / 32 - 4) * 16 - lane_now() / 4;
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
      if constexpr (kTight) {
        // What dV and dK read has to be free, since there are no other registers for dQ.
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
    // S of the step after the last is made of whatever stands in the buffer, and not used.
    // Multiplications under a condition would have the compiler make them wait for each other.
    if (!last) barrier_wait(&shared.q_full[stage.index()], stage.phase());
    warpgroup_fence();
    multiply_scores(s, keys.k, shared.q[stage.index()]);
    warpgroup_commit();
    if constexpr (!kFirst) {
      warpgroup_wait<1>();
      keep_registers(dq);
      release(&shared.ds_empty[now ^ 1]);
      add_dq(dq, tile, walk.last_block);
    }
    this->advance(walk, tile);
    warpgroup_wait<0>();
    keep_registers(s);
  }

  __device__ __forceinline__ void run_tile(const Tile& tile, float (&dk)[kD / 2],
                                           float (&dv)[kD / 2]) {
    const int count = uniform(tile.steps);
    Walk walk;
    walk.m = first_block(p, tile);
    walk.block = tile.sum + walk.m * p.group;
    const uint32_t loads = tile.loads;
    const int kv = loads % Shared::kKeyPlaces;
    const uint16_t* k_tile = shared.k[kv];
    const Keys keys = {
        uniform(low_word(k_major(k_tile + group * 64 * 64))),
        uniform(low_word(outer_major(k_tile + (kD == 64 ? 0 : group * kN * 64), kN * 128))),
        uniform(low_word(k_major(shared.v + group * 64 * 64)))};
    float s[kM / 2];
    barrier_wait(&shared.k_full[kv], loads / Shared::kKeyPlaces % 2);
    barrier_wait(&shared.q_full[stage.index()], stage.phase());
    warpgroup_fence();
    multiply_scores(s, keys.k, shared.q[stage.index()]);
    warpgroup_commit();
    barrier_wait(&shared.v_full, loads % 2);
    warpgroup_wait<0>();
    keep_registers(s);
    step<true>(tile, walk, keys, count == 1, s, dk, dv);
    say_done();
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

  // In a cluster the first block finishes dV, the second dK: each hands the other what it has of
  // the other sum, through shared memory that held queries.
  __device__ __forceinline__ void exchange(float (&dk)[kD / 2], float (&dv)[kD / 2]) {
    static_assert(sizeof(shared.q) + sizeof(shared.dout) >= kN * kD * sizeof(float));
    const uint32_t other = blockIdx.z ^ 1;
    float4* own = reinterpret_cast<float4*>(shared.q[0]) + (threadIdx.x - 128);
    const uint32_t to = remote_address(own, other);
    const uint32_t full = remote_address(&shared.other_full, other);
    __syncwarp();
    if (lane == 0) barrier_arrive_remote(&shared.other_ready, other);
    barrier_wait(&shared.other_ready, 0);
#pragma unroll
    for (int i = 0; i < kD / 2; i += 4) {
      store_remote(to + i * 1024,
                   other == 0 ? make_float4(dv[i], dv[i + 1], dv[i + 2], dv[i + 3])
                              : make_float4(dk[i], dk[i + 1], dk[i + 2], dk[i + 3]),
                   full);
    }
    barrier_wait(&shared.other_full, 0);
#pragma unroll
    for (int i = 0; i < kD / 2; i += 4) {
      const float4 x = own[i * 64];
      const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        dk[i + j] += other == 0 ? values[j] : 0.f;
        dv[i + j] += other == 0 ? 0.f : values[j];
      }
    }
  }

  __device__ __forceinline__ void run() {
    while (true) {
      const Tile& tile = next_tile();
      if (static_cast<int>(uniform(tile.number)) >= p.tiles) break;
      float dk[kD / 2], dv[kD / 2];
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) dk[i] = dv[i] = 0;
      if (uniform(tile.steps) != 0) run_tile(tile, dk, dv);
      if (p.parts > 1) exchange(dk, dv);
      if (p.parts == 1 || blockIdx.z == 0) store_rows(dv, 1.f, p.dv, p.value_columns, tile);
      if (p.parts == 1 || blockIdx.z == 1) store_rows(dk, p.scale, p.dk, p.columns, tile);
      finish_tile(tile);
    }
    finish_block();
  }
};

#endif

}  // namespace fk::cuda_sm90::backward
