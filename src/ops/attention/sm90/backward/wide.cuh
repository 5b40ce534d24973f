// This is the main kernel of attention's backward on Hopper for head sizes above 128, where one
// warpgroup cannot keep both dK and dV. What it computes, and how dQ is added up, is said in
// sm90/backward/backward.cuh.
//
// Floor: 10 L^2 D flops a head on the tensor cores. A block owns 64 keys of one key head and walks
// over the queries that see them, 64 at a time. The first warpgroup computes S^T = K Q^T and P,
// keeps dV and gives P to the second through shared memory; the second computes dP^T = V dO^T and
// dS, keeps dK and gives dS to both, which share out the columns of dQ. So both have as much to
// multiply, and each product of 64 keys and 64 queries is made once. Shared memory is what is
// busiest; at D 192, K and V are in registers as far as these go.
//
// A step has the same form in both: what the last one multiplied becomes P or dS, the register
// operand of dV or dK; then dQ of the step before; then S or dP of the next step, queued while dQ
// is stored.
#pragma once

#include <cstdint>

#include "cuda/dependent_launch.cuh"
#include "cuda/mma.cuh"
#include "ops/attention/sm90/backward/warpgroup.cuh"

namespace fk::cuda_sm90::backward {

// Lists what a block has in shared memory, in the form of SharedTiles (sm90/backward/backward.cuh).
// Rings have as many places as there is room for.
template <int kHeadSize>
struct alignas(1024) WideTiles {
  static constexpr bool kWide = true, kPair = false;
  static constexpr int kThreads = backward::kThreads, kWarps = kConsumerWarps;
  static constexpr int kServeRegisters = 24;
  static constexpr int kD = kHeadSize, kM = 64, kN = keys_a_block(kD), kRows = kN;
  static constexpr int kPanels = kD / 64, kValuePanels = kPanels;
  static constexpr int kKeyPlaces = 1, kDoutPlaces = kD > 192 ? 1 : 2;
  // Each part of dQ has a place of its own if there is room, or else each warp has one.
  static constexpr int kDqPlaces = kD > 192 ? kConsumerWarps : dq_parts(kD);
  uint16_t k[kKeyPlaces][kN * kD];
  uint16_t v[kN * kD];
  uint16_t q[2][kM * kD];
  uint16_t dout[kDoutPlaces][kM * kD];
  uint16_t ds[2][kM * kN];
  uint4 p[2][kM * kN / 8];  // weights of dP - delta: float16, in the order of the registers
  float dq[kDqPlaces][kM * 16];
  float stats[2][2 * kM];  // -lse * log2(e), delta
  // stage_empty says that the second warpgroup, which needs a query block last, is done with it.
  uint64_t q_full[2], stage_empty[2], dout_full[2], dout_empty[2];
  uint64_t k_full[2], k_empty[2], v_full, v_empty;
  uint64_t p_full[2], p_empty[2], ds_full[2], ds_empty[2];
  uint64_t tile_full[2], tile_empty[2], tile_read;
  Tile tile[2];
  int pending[kConsumerWarps];  // the head whose dQ this warp has added to; -1: it has been said
  DqBlock dq_block[kThreads / 32 - 1];  // by warp, but for the one that loads
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int kD>
__device__ __forceinline__ void init_barriers(WideTiles<kD>& shared) {
  constexpr int kGroupWarps = kConsumerWarps / 2;
  for (int i = 0; i < 2; ++i) {
    cuda::barrier_init(&shared.q_full[i], 1);
    cuda::barrier_init_for_warps(&shared.stage_empty[i], kGroupWarps);
    cuda::barrier_init(&shared.dout_full[i], 1);
    cuda::barrier_init(&shared.k_full[i], 1);
    cuda::barrier_init_for_warps(&shared.k_empty[i], kConsumerWarps);
    cuda::barrier_init_for_warps(&shared.dout_empty[i], kConsumerWarps);
    cuda::barrier_init_for_warps(&shared.p_full[i], kGroupWarps);
    cuda::barrier_init_for_warps(&shared.p_empty[i], kGroupWarps);
    cuda::barrier_init_for_warps(&shared.ds_full[i], kGroupWarps);
    cuda::barrier_init_for_warps(&shared.ds_empty[i], kConsumerWarps);
    cuda::barrier_init(&shared.tile_full[i], 1);
    cuda::barrier_init_for_warps(&shared.tile_empty[i], kConsumerWarps);
  }
  cuda::barrier_init(&shared.v_full, 1);
  cuda::barrier_init_for_warps(&shared.v_empty, kGroupWarps);
  cuda::barrier_init(&shared.tile_read, 1);
  cuda::fence_barrier_init();
}

template <class T, class SharedMemory, Kind kKind, bool kSecond>
struct WideConsumer;

#endif

template <class T, int kD, Kind kKind>
__global__ void __launch_bounds__(kThreads, 1)
    attention_backward_wide_kernel([[maybe_unused]] const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shared = WideTiles<kD>;
  Shared& shared = begin_block<Shared>(p);
  const int warp = static_cast<int>(uniform(threadIdx.x / 32));
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (warp < 4) {
    serve_block<T, kKind>(p, shared);
  } else {
    take_registers<240>();
    if (warp < 8) {
      WideConsumer<T, Shared, kKind, false>{{{p, shared, 0, warp % 4, lane}}}.run();
    } else {
      WideConsumer<T, Shared, kKind, true>{{{p, shared, 1, warp % 4, lane}}}.run();
    }
    if (p.done != nullptr) convert_blocks<T, kKind, 4>(p, shared);
  }
#endif
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// kSecond says which of the two warpgroups this is. SharedMemory is WideTiles, or PairTiles
// (sm90/backward/pair.cuh).
template <class T, class SharedMemory, Kind kKind, bool kSecond>
struct WideProducts : Warpgroup<T, SharedMemory, kKind> {
  using Base = Warpgroup<T, SharedMemory, kKind>;
  using Base::kM, Base::kN, Base::kFeatures;
  using Base::next_tile, Base::finish_tile, Base::finish_block;
  using Base::p, Base::shared, Base::group, Base::warp, Base::lane;
  using Base::release, Base::say_done, Base::store_rows;
  using Base::stage;
  using typename Base::Shared;
  using typename Base::Walk;
  static constexpr int kD = Shared::kD, kE = Shared::kValuePanels * 64, kRows = Shared::kRows;
  static constexpr int kDepth = kSecond ? kE : kD;  // of the product of keys and queries
  static constexpr int kWidth = kSecond ? kD : kE;  // of dK or dV
  // So many times 16 columns of K or V are in registers.
  static constexpr int kHeld = Shared::kPair ? (kSecond ? 5 : 12) : kD > 192 ? 0 : 8;
  using DoutRing = Ring<Shared::kDoutPlaces>;

  // The tile's K or V is the first operand of S or dP. It is given by the low word of its
  // descriptor, and by as many columns as there is room for in registers, since shared memory is
  // what is busiest.
  struct Keys {
    uint32_t low;
    uint32_t rows[kHeld == 0 ? 1 : kHeld][4];
  };
  __device__ __forceinline__ void load_keys(Keys& keys, const uint16_t* tile) {
    keys.low = uniform(low_word(k_major(tile)));
    const int row = warp * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int piece = k % 4 * 2 + lane / 16;
      load_matrices(keys.rows[k],
                    shared_address(tile + k / 4 * kRows * 64 + row * 64 + (piece ^ row % 8) * 8));
    }
  }

  // Computes K Q^T or V dO^T.
  __device__ __forceinline__ void multiply_scores(float (&s)[kM / 2], const Keys& keys,
                                                  const uint16_t* b) {
    const uint32_t b0 = low_word(k_major(b));
    // This adds 0, but without it all descriptors would be kept in registers.
    const uint32_t a0 = keys.low + (stage.number >> 31);
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      const uint64_t queries = descriptor(b0, k / 4 * kM * 128 + k % 4 * 32);
      if (k < kHeld) {
        multiply<T>(s, keys.rows[k < kHeld ? k : 0], queries, k > 0);
      } else {
        multiply<T>(s, descriptor(a0, k / 4 * kRows * 128 + k % 4 * 32), queries, k > 0);
      }
    }
    warpgroup_commit();
  }

  // Multiplies 16 queries from number 16 * k on.
  __device__ __forceinline__ void multiply_sum(float (&d)[kWidth / 2], const uint32_t (&a)[4],
                                               const uint16_t* b, int k) {
    multiply<T, Major::kOuter>(d, a, descriptor(low_word(outer_major(b, kM * 128)), k * 2048),
                               true);
  }

  // Computes S or dP of the stage that is next.
  __device__ __forceinline__ void multiply_next(float (&s)[kM / 2], const Keys& keys, bool there) {
    if constexpr (kSecond) {
      const DoutRing ring{stage.number};
      uint16_t* dout = shared.dout[ring.index()];
      if (there) barrier_wait(&shared.dout_full[ring.index()], ring.phase());
      multiply_scores(s, keys, dout);
    } else {
      uint16_t* q = shared.q[stage.index()];
      if (there) barrier_wait(&shared.q_full[stage.index()], stage.phase());
      multiply_scores(s, keys, q);
    }
  }

  // Makes P of the scores, for the second warpgroup and for dV.
  __device__ __forceinline__ void use_scores(float (&s)[kM / 2], float (&dv)[kWidth / 2],
                                             const Tile& tile, const Walk& walk) {
    const int now = stage.index();
    [[maybe_unused]] uint32_t packed[kM / 4], weights[kM / 4];
    // With features the wait comes early, because weights leave as they are made.
    if constexpr (kFeatures) barrier_wait(&shared.p_empty[now], stage.phase() ^ 1);
    const float slope = kFeatures ? this->slope_at(tile, walk.block) : 0.f;
    if constexpr (kFeatures) this->finish_scores(s);
    if (walk.m >= tile.unmasked_first && walk.m < tile.unmasked_end) {
      this->template exponentials<false>(s, packed, weights, shared.stats[now], tile, walk.m * kM,
                                         slope);
    } else {
      this->template exponentials<true>(s, packed, weights, shared.stats[now], tile, walk.m * kM,
                                        slope);
    }
    if constexpr (!kFeatures) barrier_wait(&shared.p_empty[now], stage.phase() ^ 1);
    uint4* to = shared.p[now] + warp * 32 + lane;
    uint32_t pt[kM / 16][4];
#pragma unroll
    for (int k = 0; k < kM / 16; ++k) {
      uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 8 * k + 2 * j;
        w[j] = kFeatures ? weights[i / 2] : pack_pair<__half>(s[i], s[i + 1]);
        pt[k][j] = kFeatures ? packed[i / 2] : pack_pair<T>(s[i], s[i + 1]);
      }
      to[k * 128] = make_uint4(w[0], w[1], w[2], w[3]);
    }
    release(&shared.p_full[now]);
    const DoutRing ring{stage.number};
    uint16_t* dout = shared.dout[ring.index()];
    barrier_wait(&shared.dout_full[ring.index()], ring.phase());
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < kM / 16; ++k) multiply_sum(dv, pt[k], dout, k);
    warpgroup_commit();
  }

  // Makes dS of dP and P, for both warpgroups and for dK.
  __device__ __forceinline__ void use_gradients(const float (&dp)[kM / 2],
                                                float (&dk)[kWidth / 2]) {
    const int now = stage.index();
    // dS is stored as queries x keys: lane l gives row l % 8 of matrix l / 8.
    const int first_key = Shared::kPair ? cluster_rank() * (kM * kRows) : 0;
    uint16_t* ds_row = shared.ds[now] + first_key + (lane / 16 * 8 + lane % 8) * 64 +
                       (((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 8);
    const float2* delta = reinterpret_cast<const float2*>(shared.stats[now] + kM) + lane % 4;
    const uint4* from = shared.p[now] + warp * 32 + lane;
    barrier_wait(&shared.ds_empty[now], stage.phase() ^ 1);
    barrier_wait(&shared.q_full[now], stage.phase());
    barrier_wait(&shared.p_full[now], stage.phase());
    uint32_t dst[kM / 16][4];
#pragma unroll
    for (int k = 0; k < kM / 16; ++k) {
      const uint4 w = from[k * 128];
      const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 weight = __half22float2(*reinterpret_cast<const __half2*>(&words[j]));
        const float2 d = delta[8 * k + j / 2 * 4];
        const int i = 8 * k + 2 * j;
        dst[k][j] = pack_pair<T>(weight.x * (dp[i] - d.x), weight.y * (dp[i + 1] - d.y));
      }
      store_matrices_transposed(ds_row + k * 16 * 64, dst[k][0], dst[k][1], dst[k][2], dst[k][3]);
      warpgroup_fence();
      multiply_sum(dk, dst[k], shared.q[now], k);
      warpgroup_commit();
    }
    release(&shared.p_empty[now]);
    fence_async_shared();
    release(&shared.ds_full[now]);
  }

  // Takes all tiles, each by `run_tile`.
  template <class RunTile>
  __device__ __forceinline__ void run(const RunTile& run_tile) {
    while (true) {
      const Tile& tile = next_tile();
      if (static_cast<int>(uniform(tile.number)) >= p.tiles) break;
      float sum[kWidth / 2];
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) sum[i] = 0;
      if (uniform(tile.steps) != 0) run_tile(tile, sum);
      if constexpr (kSecond) {
        store_rows(sum, p.scale, p.dk, p.columns, tile);
      } else {
        store_rows(sum, 1.f, p.dv, p.value_columns, tile);
      }
      finish_tile(tile);
    }
    finish_block();
  }
};

template <class T, class SharedMemory, Kind kKind, bool kSecond>
struct WideConsumer : WideProducts<T, SharedMemory, kKind, kSecond> {
  using Base = WideProducts<T, SharedMemory, kKind, kSecond>;
  using Base::kD, Base::kM, Base::kN, Base::kWidth, Base::kHeld, Base::kDepth;
  using Base::p, Base::shared, Base::warp, Base::stage;
  using Base::release, Base::say_done, Base::load_keys, Base::multiply_next;
  using typename Base::DoutRing;
  using typename Base::Keys;
  using typename Base::Shared;
  using typename Base::Walk;
  // dQ has panels of 64 columns. Of three, the second warpgroup, which has no exponentials, has
  // two.
  static constexpr int kFirstPanel = kSecond ? kD / 128 : 0;
  static constexpr int kDqPanels = kSecond ? (kD + 64) / 128 : kD / 128;

  // Computes 64 columns of dQ, transposed. a is the low word of the descriptor of K^T.
  __device__ __forceinline__ void multiply_dq(float (&dq)[kM / 2], uint32_t a, const uint16_t* ds,
                                              int panel) {
    const uint32_t b0 = low_word(k_major(ds));
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < kN / 16; ++k) {
      multiply<T, Major::kOuter, Major::kK>(
          dq, descriptor(a, (kFirstPanel + panel) * kN * 128 + k * 2048), descriptor(b0, k * 32),
          k > 0);
    }
    warpgroup_commit();
  }

  __device__ __forceinline__ void add_dq(const float (&dq)[kM / 2], const Tile& tile, int block,
                                         int panel) {
    constexpr bool kOwn = Shared::kDqPlaces == dq_parts(kD);
    const int part = (kFirstPanel + panel) * 4 + warp;
    Base::template add_dq<kOwn ? kDqPanels - 1 : 0>(
        dq, tile, block, part, shared.dq[kOwn ? part : (kSecond ? 4 : 0) + warp]);
  }

  // Takes one pair of blocks. S or dP of this pair is there at the beginning. At the end that of
  // the next is, and dQ of the one before is added up.
  template <bool kFirst>
  __device__ __forceinline__ void step(const Tile& tile, Walk& walk, const Keys& keys,
                                       uint32_t k_transposed, bool last, float (&s)[kM / 2],
                                       float (&sum)[kWidth / 2]) {
    const int now = stage.index();
    if constexpr (kSecond) {
      if (last && kHeld < kDepth / 16) release(&shared.v_empty);
      this->use_gradients(s, sum);
    } else {
      this->use_scores(s, sum, tile, walk);
    }
    [[maybe_unused]] float dq[2][kM / 2];
    if constexpr (!kFirst) {
      barrier_wait(&shared.ds_full[now ^ 1], Turn{stage.number - 1}.phase());
      multiply_dq(dq[0], k_transposed, shared.ds[now ^ 1], 0);
      warpgroup_wait<1>();
    } else {
      warpgroup_wait<0>();
    }
    keep_registers(sum);
    release(kSecond ? &shared.stage_empty[now]
                    : &shared.dout_empty[DoutRing{stage.number}.index()]);
    ++stage.number;
    if constexpr (!kFirst && kDqPanels == 2) {
      multiply_dq(dq[1], k_transposed, shared.ds[now ^ 1], 1);
      warpgroup_wait<1>();
      keep_registers(dq[0]);
      add_dq(dq[0], tile, walk.last_block, 0);
    }
    // What is multiplied after the last step is whatever stands there, and is not used.
    // Multiplications under a condition would have the compiler make them wait for each other.
    multiply_next(s, keys, !last);
    if constexpr (!kFirst) {
      warpgroup_wait<1>();
      keep_registers(dq[kDqPanels - 1]);
      release(&shared.ds_empty[now ^ 1]);
      add_dq(dq[kDqPanels - 1], tile, walk.last_block, kDqPanels - 1);
    }
    this->advance(walk, tile);
    warpgroup_wait<0>();
    keep_registers(s);
    if (kSecond && !last) release(&shared.dout_empty[DoutRing{stage.number}.index()]);
  }

  __device__ __forceinline__ void run_tile(const Tile& tile, float (&sum)[kWidth / 2]) {
    const int count = uniform(tile.steps);
    Walk walk;
    walk.m = first_block(p, tile);
    walk.block = tile.sum + walk.m * p.group;
    const Ring<Shared::kKeyPlaces> place{static_cast<uint32_t>(tile.loads)};
    uint16_t* k = shared.k[place.index()];
    uint64_t* k_full = &shared.k_full[place.index()];
    const uint32_t k_transposed = uniform(low_word(outer_major(k, kN * 128)));
    float s[kM / 2];
    Keys keys;
    if constexpr (kSecond) {
      barrier_wait(&shared.v_full, place.number % 2);
      load_keys(keys, shared.v);
      if (kHeld == kDepth / 16) release(&shared.v_empty);
      barrier_wait(k_full, place.phase());
    } else {
      barrier_wait(k_full, place.phase());
      load_keys(keys, k);
    }
    multiply_next(s, keys, true);
    warpgroup_wait<0>();
    keep_registers(s);
    if constexpr (kSecond) release(&shared.dout_empty[DoutRing{stage.number}.index()]);
    step<true>(tile, walk, keys, k_transposed, count == 1, s, sum);
    say_done();
    __syncwarp();
#pragma unroll 1
    for (int i = 2; i <= count; ++i) {
      step<false>(tile, walk, keys, k_transposed, i == count, s, sum);
    }

    const int last_ds = stage.index() ^ 1;
    float dq[kM / 2];
    barrier_wait(&shared.ds_full[last_ds], Turn{stage.number - 1}.phase());
#pragma unroll
    for (int i = 0; i < kDqPanels; ++i) {
      multiply_dq(dq, k_transposed, shared.ds[last_ds], i);
      warpgroup_wait<0>();
      keep_registers(dq);
      if (i == kDqPanels - 1) {
        release(&shared.ds_empty[last_ds]);
        release(&shared.k_empty[place.index()]);
      }
      add_dq(dq, tile, walk.last_block, i);
    }
  }

  __device__ __forceinline__ void run() {
    Base::run([&](const Tile& tile, float(&sum)[kWidth / 2]) { run_tile(tile, sum); });
  }
};

#endif

}  // namespace fk::cuda_sm90::backward
