// The scan of few channels in parallel over time, for 2-byte elements and 16 states on sm_90.
//
// Floor: per (step, channel) 16 exponentials on units that make 16 a clock and multiprocessor, 4
// more for softplus and silu, 1 for the products of decays; about 120 instructions. Every decay is
// made once, and three scanning warps a scheduler wait for hardly anything but each other: what
// limits them is that exponentials and shared memory go through one queue.
//
// A thread has a chunk of 16 steps of one channel, with all states, one after another. It makes the
// decays and inputs, which stay in registers, and from them what the chunk makes of nothing and of
// one; two other warps chain those over a tile's chunks, a lane for each channel; from what then
// enters the chunk the thread walks through it once more. Meanwhile it makes those of the next
// state. The remaining two warps bring inputs, three tiles ahead, and take y, which lies where z
// was.
//
// The two blocks of a cluster have the same channels and take turns with the tiles of a sequence:
// each hands its last state to the other's shared memory.
#pragma once

#include "cuda/mma.cuh"
#include "cuda/wgmma.cuh"
#include "ops/selective_scan/cuda/forward_chunks_stage.cuh"

namespace fk::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// Some threads chain chunks: a warp does so for even states, one for odd ones.
__device__ __forceinline__ void chain_chunks(const ScanArgs& a, const BlockChannels& place,
                                             const ChunkTurns& turns, ChunkTile::Shared& s,
                                             int thread) {
  using Tile = ChunkTile;
  constexpr int kC = Tile::kChannels;
  const int warp = thread / 32, lane = thread % 32;
  const bool active = lane < kC;
  const int own = active ? lane : 0;  // idle lanes do what another one does
  const bool leads = lane == 0;
  if (leads) {
    for (int n = warp; n < Tile::kStates; n += 2) barrier_arrive_expect(&s.came[n], 4 * kC);
  }
  const uint32_t next = turns.first + 1 == Tile::kTurns ? 0 : turns.first + 1;
  const uint32_t next_came = remote_address(&s.came[0], next);
  const uint32_t next_entering = remote_address(&s.entering[0][own], next);
  const float4* made = reinterpret_cast<const float4*>(s.made[warp][own]);
  float4* entered = reinterpret_cast<float4*>(s.entered[warp][own]);
#pragma unroll 1
  for (int i = 0; i < turns.count; ++i) {
    const int tile = turns.tile(i);
#pragma unroll 1
    for (int n = warp; n < Tile::kStates; n += 2) {
      // This comes from the block before, and is mostly here already.
      if (tile > 0) {
        barrier_wait(&s.came[n], (turns.first == 0 ? i - 1 : i) & 1);
        if (leads) barrier_arrive_expect(&s.came[n], 4 * kC);
      }
      float h = s.entering[n][own];
      __syncwarp();
      named_barrier_sync(1 + warp, Tile::kScan + 32);
      float4 v[Tile::kChunks / 2];
#pragma unroll
      for (int j = 0; j < Tile::kChunks / 2; ++j) v[j] = made[j];
#pragma unroll
      for (int j = 0; j < Tile::kChunks / 2; j += 2) {
        float4 four;
        four.x = h;
        four.y = h = fmaf(v[j].x, h, v[j].y);
        four.z = h = fmaf(v[j].z, h, v[j].w);
        four.w = h = fmaf(v[j + 1].x, h, v[j + 1].y);
        h = fmaf(v[j + 1].z, h, v[j + 1].w);
        entered[j / 2] = four;
      }
      barrier_arrive(&s.ready[warp]);
      const bool last = tile + 1 == turns.tiles;
      if (!last && active) store_remote(next_entering + 4 * kC * n, h, next_came + 8 * n);
      if ((last || a.kept.data != nullptr) && lane < place.channels && active) {
        const int64_t channel = place.channel + lane;
        if (a.kept.data != nullptr) {
          // The state after step t - 1 is the one that enters at t.
          const int spacing = static_cast<int>(a.kept.spacing);
          const int begin = tile * Tile::kT, end = min(begin + Tile::kT, turns.steps);
          int row = max(ceil_div(begin, spacing), 1);
          const int64_t apart = Tile::kStates * a.channels;
          float* to = a.kept.data + (a.kept.base(a.segments, place.segment) + row) * apart +
                      int64_t{n} * a.channels + channel;
          int t = row * spacing;
          for (; t < end; t += spacing, to += apart) {
            *to = s.entered[warp][own][(t - begin) / Tile::kK];
          }
          if (last && t == end && a.kept.rows_per_batch >= 0) *to = h;
        }
        if (last && a.last_state.data != nullptr) {
          const StateView& to = a.last_state;
          static_cast<float*>(
              to.data)[place.segment.sequence * to.sequence + channel * to.channel + n * to.state] =
              h;
        }
      }
    }
  }
}

// The chunk and channel of a thread, and where its chunk lies in a tensor's tile.
template <bool kTime>
struct ChunkPlace {
  using Tile = ChunkTile;
  int chunk, channel, own;

  __device__ __forceinline__ explicit ChunkPlace(int thread) {
    if constexpr (kTime) {
      chunk = thread / Tile::kChannels;
      channel = thread % Tile::kChannels;
      own = chunk / 4 * Tile::kColumnBytes + channel * 128 + (chunk % 4 * 2 ^ channel % 8) * 16;
    } else {
      // A warp has four pieces, chunks of 8 channels, as matrices are read transposed: two chunks
      // of 16 channels or four of the last 8. Neighbouring lanes with the same chunk read B and C
      // in half as many turns.
      const int warp = thread / 32, lane = thread % 32;
      const bool two = warp < Tile::kChunks / 2;
      const auto chunk_of = [&](int piece) {
        return two ? 2 * warp + piece / 2 : 4 * warp - 2 * Tile::kChunks + piece;
      };
      const auto octet_of = [&](int piece) { return two ? piece % 2 : 2; };
      chunk = chunk_of(lane % 4);
      channel = octet_of(lane % 4) * 8 + lane / 4;
      const int row = lane % 8;
      own = (chunk_of(row / 2) * Tile::kK + lane / 8 * 2 + row % 2) * Tile::kStepBytes +
            octet_of(row / 2) * 16;
    }
  }
};

// Loads a chunk of a channel from shared memory.
template <class T, bool kTime>
__device__ __forceinline__ void load_steps(const unsigned char* tensor, int own,
                                           float (&to)[ChunkTile::kK]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Vec<T, 8> v;
    if constexpr (kTime) {
      v = *reinterpret_cast<const Vec<T, 8>*>(tensor + (own ^ 16 * half));
    } else {
      uint32_t words[4];
      load_matrices_transposed(words,
                               shared_address(tensor) + own + 8 * half * ChunkTile::kStepBytes);
      memcpy(v.data, words, sizeof(v));
    }
    float eight[8];
    unpack(v, eight);
#pragma unroll
    for (int e = 0; e < 8; ++e) to[8 * half + e] = eight[e];
  }
}
template <class T, bool kTime>
__device__ __forceinline__ void store_steps(unsigned char* tensor, int own,
                                            const float (&from)[ChunkTile::kK]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float eight[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) eight[e] = from[8 * half + e];
    const Vec<T, 8> v = pack<T>(eight);
    if constexpr (kTime) {
      *reinterpret_cast<Vec<T, 8>*>(tensor + (own ^ 16 * half)) = v;
    } else {
      uint32_t words[4];
      memcpy(words, v.data, sizeof(v));
      store_matrices_transposed(tensor + own + 8 * half * ChunkTile::kStepBytes, words[0], words[1],
                                words[2], words[3]);
    }
  }
}

// The threads that scan do this.
template <class T, bool kTime>
struct ChunkScanner {
  using Tile = ChunkTile;
  static constexpr int kK = Tile::kK;
  struct Made {  // for one state
    float decay[kK], input[kK];
  };

  const ScanArgs& a;
  const ChunkTurns& turns;
  Tile::Shared& s;
  const int states, decay, made, entered;  // in bytes, where this thread's are
  float dt[kK], x[kK], y[kK], time;        // log2(e) dt, log2(e) dt u, sum of dt

  __device__ __forceinline__ ChunkScanner(const ScanArgs& args, const ChunkTurns& block_turns,
                                          Tile::Shared& shared, const ChunkPlace<kTime>& place)
      : a(args),
        turns(block_turns),
        s(shared),
        states(4 * Tile::state_at(place.chunk * kK)),
        decay(4 * place.channel),
        made(4 * (place.channel * Tile::kMadePitch + 2 * place.chunk)),
        entered(4 * (place.channel * Tile::kEnteredPitch + place.chunk)) {}

  template <class Element>
  __device__ __forceinline__ static Element* at(const void* base, int bytes) {
    return reinterpret_cast<Element*>(reinterpret_cast<unsigned char*>(const_cast<void*>(base)) +
                                      bytes);
  }
  // The place is made again where it is needed, and not kept.
  __device__ __forceinline__ static ChunkPlace<kTime> place_of_thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return ChunkPlace<kTime>(thread);
  }

  __device__ __forceinline__ void load(int turn) {
    Tile::Stage& stage = s.stage[turn % Tile::kStages];
    barrier_wait(&stage.full, turn / Tile::kStages & 1);
    const ChunkPlace<kTime> place = place_of_thread();
    load_steps<T, kTime>(stage.delta, place.own, dt);
    load_steps<T, kTime>(stage.u, place.own, x);
    const float bias = *at<const float>(s.bias, decay);
#pragma unroll
    for (int k = 0; k < kK; ++k) dt[k] = fmaf(dt[k], kLog2E, bias);
    if (a.softplus) {
#pragma unroll
      for (int k = 0; k < kK; ++k) {
        dt[k] = fmaxf(dt[k], 0.f) + log2_fast(1.f + exp2_fast(-fabsf(dt[k])));
      }
    }
    int left = turns.steps - turns.tile(turn) * Tile::kT;
    if (left < Tile::kT) {
      left -= place.chunk * kK;
#pragma unroll
      for (int k = 0; k < kK; ++k) dt[k] = k < left ? dt[k] : 0.f;
    }
    time = 0;
#pragma unroll
    for (int k = 0; k < kK; ++k) {
      x[k] *= dt[k];
      time += dt[k];
    }
  }

  // Makes what does not depend on the states before.
  __device__ __forceinline__ void make(Made& m, const Tile::Stage& stage, int n, int slot) {
    const float A = *at<const float>(s.A[n], decay);
    const float4* B = at<const float4>(stage.B[n], states);
#pragma unroll
    for (int k = 0; k < kK; k += 4) {
      const float4 v = B[k / 4];
      m.input[k] = x[k] * v.x;
      m.input[k + 1] = x[k + 1] * v.y;
      m.input[k + 2] = x[k + 2] * v.z;
      m.input[k + 3] = x[k + 3] * v.w;
    }
    float h = m.input[0];
#pragma unroll
    for (int k = 0; k < kK; ++k) {
      m.decay[k] = exp2_fast(dt[k] * A);
      if (k > 0) h = fmaf(m.decay[k], h, m.input[k]);
    }
    *at<float2>(s.made[slot], made) = make_float2(exp2_fast(time * A), h);
    named_barrier_arrive(1 + slot, Tile::kScan + 32);
  }

  __device__ __forceinline__ void walk(const Made& m, const Tile::Stage& stage, int n, int slot) {
    const float4* from = at<const float4>(stage.C[n], states);
    float4 C[kK / 4];
#pragma unroll
    for (int k = 0; k < 2; ++k) C[k] = from[k];
    barrier_wait(&s.ready[slot], n / 2 & 1);
    float h = *at<const float>(s.entered[slot], entered);
#pragma unroll
    for (int k = 0; k < kK; ++k) {
      if (k % 4 == 0 && k >= 4 && k < 12) C[k / 4 + 1] = from[k / 4 + 1];
      const float4 v = C[k / 4];
      h = fmaf(m.decay[k], h, m.input[k]);
      y[k] = fmaf(k % 4 == 0 ? v.x : k % 4 == 1 ? v.y : k % 4 == 2 ? v.z : v.w, h, y[k]);
    }
  }

  // Writes y to where z was.
  __device__ __forceinline__ void finish(Tile::Stage& stage, int parity) {
    float other[kK];
    const int own = place_of_thread().own;
    load_steps<T, kTime>(stage.u, own, other);
    const float skip = *at<const float>(s.skip, decay);
#pragma unroll
    for (int k = 0; k < kK; ++k) y[k] = fmaf(skip, other[k], y[k]);
    if (a.z.data != nullptr) {
      barrier_wait(&stage.gate, parity);
      load_steps<T, kTime>(stage.z, own, other);
#pragma unroll
      for (int k = 0; k < kK; ++k) y[k] = gated<T>(y[k], other[k]);
    }
    store_steps<T, kTime>(stage.z, own, y);
  }

  __device__ __forceinline__ void run() {
    constexpr int kLast = Tile::kStates - 2;
    Made even, odd;
    load(0);
    make(even, s.stage[0], 0, 0);
    make(odd, s.stage[0], 1, 1);
#pragma unroll 1
    for (int i = 0; i < turns.count; ++i) {
      Tile::Stage& stage = s.stage[i % Tile::kStages];
      Tile::Stage& next = s.stage[(i + 1) % Tile::kStages];
#pragma unroll
      for (int k = 0; k < kK; ++k) y[k] = 0;
#pragma unroll 1
      for (int n = 0; n < kLast; n += 2) {
        walk(even, stage, n, 0);
        make(even, stage, n + 2, 0);
        walk(odd, stage, n + 1, 1);
        make(odd, stage, n + 3, 1);
      }
      walk(even, stage, kLast, 0);
      if (i + 1 < turns.count) {
        load(i + 1);
        make(even, next, 0, 0);
      }
      walk(odd, stage, kLast + 1, 1);
      if (i + 1 < turns.count) make(odd, next, 1, 1);
      finish(stage, i / Tile::kStages & 1);
      fence_async_shared();
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(&stage.empty);
    }
  }
};

#endif

template <class T, bool kTime>
__global__ void __launch_bounds__(ChunkTile::kThreads, 1)
    scan_chunks([[maybe_unused]] const __grid_constant__ ScanArgs a,
                [[maybe_unused]] const __grid_constant__ ChunkMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Tile = ChunkTile;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Tile::Shared& s = *reinterpret_cast<Tile::Shared*>(shared_bytes);
  const int thread = static_cast<int>(threadIdx.x);
  const bool leads = thread == Tile::kScan + Tile::kChain;
  if (leads) {
    prefetch_tensor_map(&maps.delta);
    prefetch_tensor_map(&maps.u);
    if (a.z.data != nullptr) prefetch_tensor_map(&maps.z);
    barrier_init(&s.stage[0].full, Tile::kLoad + 1);
    barrier_init(&s.stage[0].gate, 1);
    fence_barrier_init_cluster();
    fence_barrier_init();
  }
  const BlockChannels place = chunk_channels(a);
  const ChunkTurns turns(a);
  const ChunkLoader<T, kTime> loader{a, maps, place, turns, s, thread % Tile::kLoad};
  if (thread < Tile::kScan) {
    take_registers<152>();
    begin_chunks<T, kTime, true>(loader, thread);
    ChunkScanner<T, kTime>(a, turns, s, ChunkPlace<kTime>(thread)).run();
  } else {
    give_registers<56>();
    begin_chunks<T, kTime, false>(loader, thread);
    if (thread < Tile::kScan + Tile::kChain) {
      chain_chunks(a, place, turns, s, thread - Tile::kScan);
    } else {
      loader.run();
    }
  }
#endif
}

}  // namespace fk::cuda
