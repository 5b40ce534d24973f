// This is the main kernel of attention's backward on Hopper for heads of 192 with values of 128
// columns. What it computes, and how dQ is added up, is said in sm90/backward/backward.cuh.
//
// Floor: 2 L^2 (3 D + 2 E) flops a head on the tensor cores. What wide heads wait for is the sum of
// dQ: with 64 keys a block, all that registers hold, each product of 64 queries and 64 keys adds a
// whole block of dQ to it. So two blocks, a cluster, own 128 keys, 64 each, and walk over the same
// queries: each gives its dS to the other, and computes one half of dQ's columns for all 128 keys,
// from a copy of that half of K. That halves what is added.
//
// Three warpgroups of a block compute: the first S, P and dV, the second dP, dS and dK, as in
// sm90/backward/wide.cuh, with K and V in registers as the first operand; the third dQ, whose
// rows are queries here, so that all its columns are made of one reading of dS.
#pragma once

#include <cstdint>

#include "ops/attention/sm90/backward/wide.cuh"

namespace fk::cuda_sm90::backward {

template <int kHeadSize, int kValueSize>
struct alignas(1024) PairTiles {
  static constexpr bool kWide = true, kPair = true;
  static constexpr int kThreads = 512, kWarps = 12, kServeRegisters = 40;
  static constexpr int kD = kHeadSize, kM = 64, kN = kPairKeys, kRows = kN / 2, kPanels = kD / 64;
  static constexpr int kE = kValueSize, kValuePanels = kE / 64;
  static constexpr int kKeyPlaces = 1, kDoutPlaces = 2;
  static constexpr int kHalf = kD / 2, kHalfPanels = (kHalf + 63) / 64;
  uint16_t k[kKeyPlaces][kRows * kD];
  uint16_t v[kRows * kE];
  uint16_t k_half[kN * kHalfPanels * 64];  // this block's columns of dQ, the keys of both
  uint16_t q[2][kM * kD];
  uint16_t dout[2][kM * kE];
  uint16_t ds[2][kM * kN];     // by keys: those of the first block, of the second
  uint4 p[2][kM * kRows / 8];  // weights of dP - delta: float16, in the order of the registers
  float stats[2][2 * kM];      // -lse * log2(e), delta
  // stage_empty says that the second warpgroup, which needs a query block last, is done with it.
  uint64_t q_full[2], stage_empty[2], dout_full[2], dout_empty[2];
  uint64_t k_full[1], k_empty[1], v_full, v_empty, half_full, half_empty;
  // ds_came belongs to the dS of the other block, and ds_empty says that both blocks are done with
  // this one's.
  uint64_t p_full[2], p_empty[2], ds_full[2], ds_empty[2], ds_came[2];
  uint64_t tile_full[2], tile_empty[2], tile_read, number_full[2], number_empty[2];
  int number[2];  // of a tile: the first block takes it for both
  Tile tile[2];
  int pending[kWarps];
  DqBlock dq_block[kThreads / 32 - 1];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int kD, int kE>
__device__ __forceinline__ void init_barriers(PairTiles<kD, kE>& shared) {
  constexpr int kGroupWarps = 4;
  for (int i = 0; i < 2; ++i) {
    barrier_init(&shared.q_full[i], 1);
    barrier_init_for_warps(&shared.stage_empty[i], kGroupWarps);
    barrier_init(&shared.dout_full[i], 1);
    barrier_init_for_warps(&shared.dout_empty[i], 2 * kGroupWarps);
    barrier_init_for_warps(&shared.p_full[i], kGroupWarps);
    barrier_init_for_warps(&shared.p_empty[i], kGroupWarps);
    barrier_init_for_warps(&shared.ds_full[i], kGroupWarps);
    barrier_init_for_warps(&shared.ds_empty[i], 2 * kGroupWarps);
    barrier_init(&shared.ds_came[i], 1);
    barrier_init(&shared.tile_full[i], 1);
    barrier_init_for_warps(&shared.tile_empty[i], 3 * kGroupWarps);
    barrier_init(&shared.number_full[i], 1);
    barrier_init(&shared.number_empty[i], 1);
  }
  barrier_init(&shared.k_full[0], 1);
  barrier_init_for_warps(&shared.k_empty[0], kGroupWarps);
  barrier_init(&shared.v_full, 1);
  barrier_init_for_warps(&shared.v_empty, kGroupWarps);
  barrier_init(&shared.tile_read, 1);
  barrier_init(&shared.half_full, 1);
  barrier_init_for_warps(&shared.half_empty, kGroupWarps);
  fence_barrier_init();
  fence_barrier_init_cluster();
}

// Returns the number of the next tile, the same for both blocks.
template <int kD, int kE>
__device__ __forceinline__ int next_number(const Params& p, PairTiles<kD, kE>& shared,
                                           const Turn& turn) {
  const int i = turn.index();
  if (cluster_rank() == 0) {
    const int t = atomicAdd(&p.counters->tile, 1);
    barrier_wait(&shared.number_empty[i], turn.phase() ^ 1);
    store_remote(remote_address(&shared.number[i], 1), t,
                 remote_address(&shared.number_full[i], 1));
    return t;
  }
  barrier_arrive_expect(&shared.number_full[i], sizeof(int));
  barrier_wait(&shared.number_full[i], turn.phase());
  const int t = *static_cast<volatile int*>(&shared.number[i]);
  barrier_arrive_remote(&shared.number_empty[i], 0);
  return t;
}

// Loads half of the columns of the tile's K, from row `key` of entry `entry` of the map on.
template <int kD, int kE>
__device__ __forceinline__ void load_half(const Params& p, PairTiles<kD, kE>& shared,
                                          const volatile Tile& tile, int key, int entry) {
  using Shared = PairTiles<kD, kE>;
  barrier_wait(&shared.half_empty, tile.loads % 2 ^ 1);
  barrier_arrive_expect(&shared.half_full, sizeof(shared.k_half));
  for (int i = 0; i < 2 * Shared::kHalfPanels; ++i) {
    tensor_load(shared.k_half + i * Shared::kRows * 64, &p.maps[kMapK], &shared.half_full,
                cluster_rank() * Shared::kHalf + i / 2 * 64, tile.kv_head,
                key + i % 2 * Shared::kRows, entry);
  }
}

// Adds four floats to global memory, each atomically. (atomicAdd of a float4 would bring back what
// was there, and take much longer.)
__device__ __forceinline__ void add_floats(float* to, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
}

// Copies to another block's shared memory, and completes on a barrier there.
__device__ __forceinline__ void bulk_copy_remote(uint32_t to, const void* from, uint32_t bytes,
                                                 uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(shared_address(from)), "r"(bytes), "r"(barrier)
      : "memory");
}

// The first two warpgroups do this.
template <class T, class SharedMemory, Kind kKind, bool kSecond>
struct PairConsumer : WideProducts<T, SharedMemory, kKind, kSecond> {
  using Base = WideProducts<T, SharedMemory, kKind, kSecond>;
  using Base::kM, Base::kWidth, Base::kHeld, Base::kDepth;
  using Base::p, Base::shared, Base::warp, Base::lane, Base::stage;
  using Base::release, Base::load_keys, Base::multiply_next;
  using typename Base::Keys;
  using typename Base::Walk;

  // Sends dS to the same place of the other block.
  __device__ __forceinline__ void send_gradients() {
    named_barrier_sync(1, 128);
    if (warp != 0 || lane != 0) return;
    const int now = stage.index();
    const uint32_t own = cluster_rank(), other = own ^ 1;
    const uint16_t* from = shared.ds[now] + own * (sizeof(shared.ds[now]) / 4);
    bulk_copy_remote(remote_address(from, other), from, sizeof(shared.ds[now]) / 2,
                     remote_address(&shared.ds_came[now], other));
  }

  // Takes one pair of blocks. S or dP of this pair is there at the beginning, and that of the next
  // at the end.
  __device__ __forceinline__ void step(const Tile& tile, Walk& walk, const Keys& keys, bool last,
                                       float (&s)[kM / 2], float (&sum)[kWidth / 2]) {
    const int now = stage.index();
    if constexpr (kSecond) {
      if (last && kHeld < kDepth / 16) release(&shared.v_empty);
      this->use_gradients(s, sum);
      send_gradients();
    } else {
      this->use_scores(s, sum, tile, walk);
      this->advance(walk, tile);
    }
    ++stage.number;
    // What is multiplied after the last step is whatever stands there, and is not used.
    // Multiplications under a condition would have the compiler make them wait for each other.
    multiply_next(s, keys, !last);
    warpgroup_wait<1>();
    keep_registers(sum);
    release(kSecond ? &shared.stage_empty[now] : &shared.dout_empty[now]);
    warpgroup_wait<0>();
    keep_registers(s);
    if (kSecond && !last) release(&shared.dout_empty[stage.index()]);
  }

  __device__ __forceinline__ void run_tile(const Tile& tile, float (&sum)[kWidth / 2]) {
    const int count = uniform(tile.steps);
    Walk walk;
    walk.m = first_block(p, tile);
    walk.block = tile.sum + walk.m * p.group;
    const uint32_t loads = tile.loads;
    float s[kM / 2];
    Keys keys;
    if constexpr (kSecond) {
      barrier_wait(&shared.v_full, loads % 2);
      load_keys(keys, shared.v);
    } else {
      barrier_wait(&shared.k_full[0], loads % 2);
      load_keys(keys, shared.k[0]);
      static_assert(kHeld == kDepth / 16);
      release(&shared.k_empty[0]);
    }
    multiply_next(s, keys, true);
    warpgroup_wait<0>();
    keep_registers(s);
    if constexpr (kSecond) release(&shared.dout_empty[stage.index()]);
#pragma unroll 1
    for (int i = 1; i <= count; ++i) step(tile, walk, keys, i == count, s, sum);
  }

  __device__ __forceinline__ void run() {
    Base::run([&](const Tile& tile, float(&sum)[kWidth / 2]) { run_tile(tile, sum); });
  }
};

// The third warpgroup makes dQ.
template <class T, class SharedMemory, Kind kKind>
struct PairQueries : Warpgroup<T, SharedMemory, kKind> {
  using Base = Warpgroup<T, SharedMemory, kKind>;
  using Base::kM, Base::kN;
  using Base::p, Base::shared, Base::warp, Base::lane, Base::stage;
  using Base::release, Base::say_done, Base::next_tile, Base::finish_tile;
  using typename Base::Shared;
  using typename Base::Walk;

  // Adds a part of dQ to the sum, from registers, since there is nothing else to do meanwhile.
  __device__ __forceinline__ void add(const float (&dq)[Shared::kHalf / 2], const Tile& tile,
                                      int block, int part) {
    if (p.sum == nullptr) return;
    int* turn = p.turns + (static_cast<int64_t>(block) * dq_parts(Shared::kD) + part);
    if (p.turns != nullptr) {
      if (lane == 0) this->wait_for_turn(turn, tile, block);
      __syncwarp();
    }
    float* to = p.sum + static_cast<int64_t>(block) * (kM * Shared::kD) +
                part * (16 * Shared::kHalf) + lane * 4;
#pragma unroll
    for (int i = 0; i < Shared::kHalf / 2; i += 4) {
      add_floats(to + i * 32, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
    }
    if (p.turns != nullptr) {
      __threadfence();
      __syncwarp();
      if (lane == 0) atomicAdd(turn, 1);
    }
  }

  __device__ __forceinline__ void run_tile(const Tile& tile) {
    const int count = uniform(tile.steps);
    Walk walk;
    walk.m = first_block(p, tile);
    walk.block = tile.sum + walk.m * p.group;
    const uint32_t own = cluster_rank();
    const uint32_t k = uniform(low_word(outer_major(shared.k_half, kN * 128)));
    barrier_wait(&shared.half_full, tile.loads % 2);
#pragma unroll 1
    for (int i = 1; i <= count; ++i) {
      const int now = stage.index();
      const uint32_t ds = low_word(k_major(shared.ds[now]));
      if (warp == 0 && lane == 0) {
        barrier_arrive_expect(&shared.ds_came[now], sizeof(shared.ds[now]) / 2);
      }
      barrier_wait(&shared.ds_full[now], stage.phase());
      barrier_wait(&shared.ds_came[now], stage.phase());
      float dq[Shared::kHalf / 2];
      warpgroup_fence();
#pragma unroll
      for (int j = 0; j < kN / 16; ++j) {
        multiply<T, Major::kK, Major::kOuter>(dq, descriptor(ds, j / 4 * kM * 128 + j % 4 * 32),
                                              descriptor(k, j * 2048), j > 0);
      }
      warpgroup_commit();
      ++stage.number;
      if (i == 1) say_done();
      __syncwarp();
      warpgroup_wait<0>();
      keep_registers(dq);
      release(&shared.ds_empty[now]);
      if (lane == 0 || kEveryLaneArrives) barrier_arrive_remote(&shared.ds_empty[now], own ^ 1);
      if (i == count) release(&shared.half_empty);
      add(dq, tile, walk.block, own * 4 + warp);
      this->advance(walk, tile);
    }
  }

  __device__ __forceinline__ void run() {
    while (true) {
      const Tile& tile = next_tile();
      if (static_cast<int>(uniform(tile.number)) >= p.tiles) break;
      if (uniform(tile.steps) != 0) run_tile(tile);
      finish_tile(tile);
    }
    this->finish_block();
  }
};

#endif

template <class T, int kD, int kE, Kind kKind>
__global__ void __launch_bounds__(PairTiles<kD, kE>::kThreads, 1)
    attention_backward_pair_kernel([[maybe_unused]] const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shared = PairTiles<kD, kE>;
  Shared& shared = begin_block<Shared>(p);
  const int warp = static_cast<int>(uniform(threadIdx.x / 32));
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (warp < 4) {
    serve_block<T, kKind>(p, shared);
  } else if (warp < 8) {
    take_registers<192>();
    PairConsumer<T, Shared, kKind, false>{{{p, shared, 0, warp % 4, lane}}}.run();
    if (p.done != nullptr) convert_blocks<T, kKind, 4>(p, shared);
  } else if (warp < 12) {
    take_registers<192>();
    PairConsumer<T, Shared, kKind, true>{{{p, shared, 1, warp % 4, lane}}}.run();
    if (p.done != nullptr) convert_blocks<T, kKind, 4>(p, shared);
  } else {
    give_registers<88>();
    PairQueries<T, Shared, kKind>{{p, shared, 2, warp % 4, lane}}.run();
    if (p.done != nullptr) convert_blocks<T, kKind, 4>(p, shared);
  }
  // The other block may still write to this one's shared memory.
  __syncwarp();
  cluster_arrive();
  cluster_wait();
#endif
}

}  // namespace fk::cuda_sm90::backward
