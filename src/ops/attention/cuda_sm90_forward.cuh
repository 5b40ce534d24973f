// Attention forward on Hopper: out = softmax(scale q k^T) v, tile by tile.
//
// Floor: 4 Lq Lk D FLOPs per head on the tensor cores (half of it causal). With 16 exponentials a
// clock and multiprocessor against 4096 FLOPs, the exponentials take as long as the
// multiplications at D = 64 and half as long at D = 128, so both must run at once.
//
// A block has one producer warp, which feeds shared memory by the copy engine, and two or three
// warpgroups that each own 64 queries. Keys and values come in blocks of kKeys, two of each in
// shared memory (or four). A warpgroup issues the scores of the next block, then the product of the
// present probabilities with their values, and does the softmax of the next block while the latter
// runs. The warpgroups take turns in issuing (named barriers), so that one multiplies while another
// does its softmax. Scores, probabilities and output stay in registers: the accumulators of the
// first product, rounded, are the left operand of the second.
//
// Blocks are persistent: they take tiles of queries from a list (cuda_sm90_schedule.cuh). Queries
// are in shared memory twice where they fit, so that the next tile's keys and values load while
// this one ends; a tile's output leaves through the place of its queries.
#pragma once

#include <type_traits>

#include "cuda/dependent_launch.cuh"
#include "cuda/wgmma.cuh"
#include "ops/attention/cuda_sm90_schedule.cuh"
#include "ops/attention/cuda_sm90_softmax.cuh"

namespace fk::cuda_sm90 {

// How a head size is cut. kWidth is the head size rounded up to what is multiplied.
template <class T_, int kWidth_, int kKeys_, int kWarpgroups_, bool kScoreChange_, int kStages_ = 2>
struct ForwardTile {
  using T = T_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kKeys = kKeys_;              // of a block
  static constexpr int kWarpgroups = kWarpgroups_;  // that multiply
  static constexpr int kQueries = 64 * kWarpgroups;
  static constexpr bool kScoreChange = kScoreChange_;  // softcap or ALiBi
  static constexpr int kStages = kStages_;             // blocks of keys and values in shared memory
  // Whether the last block may be cut in half. Elsewhere the compiler runs out of registers and
  // makes every multiplication wait for the one before.
  static constexpr bool kHalfBlocks = kWidth == 128 && kKeys == 128 && !kScoreChange;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  // Together what the block starts with.
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 32;
  static constexpr int kRegisters = kWarpgroups == 2 ? 232 : 160;
  // Shared memory: columns of 64 elements (128 bytes, the swizzle's row).
  static constexpr int kColumns = (kWidth + 63) / 64;
  static constexpr int kKeyColumnBytes = kKeys * 128;
  static constexpr int kBlockBytes = kColumns * kKeyColumnBytes;
  static constexpr int kQueryColumnBytes = 64 * 128;  // of one warpgroup
  static constexpr int kQueryBytes = kColumns * kQueryColumnBytes;
  static constexpr int kTileBytes = kWarpgroups * kQueryBytes;
  static constexpr int kQueryStages =
      2 * kTileBytes + 2 * kStages * kBlockBytes <= 226 * 1024 ? 2 : 1;
  static constexpr int kKOffset = kQueryStages * kTileBytes;
  static constexpr int kVOffset = kKOffset + kStages * kBlockBytes;
  static constexpr int kEnd = kVOffset + kStages * kBlockBytes;
  static constexpr int kSharedBytes = kEnd + 384;
  static_assert(kKeys % 16 == 0 && kWidth % 16 == 0 && kSharedBytes <= 227 * 1024);
};

struct ForwardBarriers {
  uint64_t q_full[2], q_empty[2], k_full[4], k_empty[4], v_full[4], v_empty[4];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// The stage of the i-th block or tile since the start, and the phase of its barriers.
template <int kStages>
__device__ __forceinline__ int stage_of(int i) {
  return static_cast<unsigned>(i) % kStages;
}
template <int kStages>
__device__ __forceinline__ uint32_t phase_of(int i) {
  return (static_cast<unsigned>(i) / kStages) & 1;
}

// Loads a tile of queries and its keys and values; `block` counts blocks of keys since the start.
// For one thread.
template <class Tile>
__device__ __forceinline__ void load_tile(const ForwardArguments& a, const TileOfQueries& tile,
                                          int q_stage, char* shared, ForwardBarriers* barriers,
                                          int& block) {
  const int batch = a.packed ? 0 : tile.batch;
  cuda::barrier_arrive_expect(&barriers->q_full[q_stage], Tile::kTileBytes);
#pragma unroll
  for (int i = 0; i < Tile::kWarpgroups * Tile::kColumns; ++i) {
    const int w = i / Tile::kColumns, c = i % Tile::kColumns;
    cuda::tensor_load(shared + q_stage * Tile::kTileBytes + i * Tile::kQueryColumnBytes, &a.q,
                      &barriers->q_full[q_stage], 64 * c, tile.q_begin + tile.query + 64 * w,
                      tile.head, batch);
  }
  const int kv_head = tile.head / a.group;
  const auto load_block = [&](const CUtensorMap* map, char* to, uint64_t* full, uint64_t* empty,
                              int row) {
    cuda::barrier_wait(empty, phase_of<Tile::kStages>(block) ^ 1);
    cuda::barrier_arrive_expect(full, Tile::kBlockBytes);
#pragma unroll
    for (int c = 0; c < Tile::kColumns; ++c) {
      cuda::tensor_load(to + c * Tile::kKeyColumnBytes, map, full, 64 * c, row, kv_head, batch);
    }
  };
  for (int n = tile.first_block; n < tile.end_block; ++n, ++block) {
    const int row = tile.k_begin + n * Tile::kKeys;
    const int s = stage_of<Tile::kStages>(block);
    load_block(&a.k, shared + Tile::kKOffset + s * Tile::kBlockBytes, &barriers->k_full[s],
               &barriers->k_empty[s], row);
    load_block(&a.v, shared + Tile::kVOffset + s * Tile::kBlockBytes, &barriers->v_full[s],
               &barriers->v_empty[s], row);
  }
}

// The warp that finds the tiles and loads them.
template <class Tile>
__device__ __forceinline__ void produce(const ForwardArguments& a, char* shared,
                                        ForwardBarriers* barriers, TileOfQueries* shared_tiles) {
  PackedCursor cursor;
  int block = 0, index = blockIdx.x;
  for (int round = 0;; ++round) {
    TileOfQueries tile;
    const bool more = tile_at<Tile>(a, index, cursor, &tile);
    if (!more) tile.batch = -1;
    index += gridDim.x;
    if (threadIdx.x == 0) {
      if (a.next_tile != nullptr) index = atomicAdd(a.next_tile, 1) + static_cast<int>(gridDim.x);
      const int q_stage = stage_of<Tile::kQueryStages>(round);
      cuda::barrier_wait(&barriers->q_empty[q_stage], phase_of<Tile::kQueryStages>(round) ^ 1);
      shared_tiles[q_stage] = tile;
      if (more) {
        load_tile<Tile>(a, tile, q_stage, shared, barriers, block);
      } else {
        cuda::barrier_arrive(&barriers->q_full[q_stage]);
      }
    }
    if (!more) return;
    index = __shfl_sync(0xffffffff, index, 0);
  }
}

// One element of a tensor whose type only the call knows.
__device__ __forceinline__ float parameter(const void* data, DType type, int64_t at) {
  if (type == DType::kFloat16) return cuda::to_float(static_cast<const __half*>(data)[at]);
  if (type == DType::kBFloat16) return cuda::to_float(static_cast<const __nv_bfloat16*>(data)[at]);
  return static_cast<const float*>(data)[at];
}

// One warpgroup, which owns 64 queries of every tile.
template <class Tile>
struct Consumer {
  using T = typename Tile::T;
  static constexpr int kScores = Tile::kKeys / 2;
  static constexpr int kSteps = Tile::kKeys / 16;

  const ForwardArguments& a;
  char* const shared;
  ForwardBarriers* const barriers;
  const TileOfQueries* const shared_tiles;
  const int warpgroup;
  const int thread = threadIdx.x % 128;
  const int warp = thread / 32, lane = thread % 32;

  // Blocks of keys since the start whose scores were taken, or that were skipped.
  int block = 0;
  // Of the present tile: the blocks [first_block, end_block) of keys that this
  // warpgroup needs, those outside [inner_first, inner_end) with a mask.
  int first_block, end_block, inner_first, inner_end;
  bool half_block;     // the first half of the last block is enough
  int out_round = -1;  // the tile whose output is still leaving shared memory, or -1

  __device__ __forceinline__ int q_stage(int round) const {
    return stage_of<Tile::kQueryStages>(round);
  }
  __device__ __forceinline__ const TileOfQueries& tile(int round) const {
    return shared_tiles[q_stage(round)];
  }
  __device__ __forceinline__ char* queries(int round) const {
    return shared + q_stage(round) * Tile::kTileBytes + warpgroup * Tile::kQueryBytes;
  }
  __device__ __forceinline__ char* k_block(int i) const {
    return shared + Tile::kKOffset + stage_of<Tile::kStages>(i) * Tile::kBlockBytes;
  }
  __device__ __forceinline__ char* v_block(int i) const {
    return shared + Tile::kVOffset + stage_of<Tile::kStages>(i) * Tile::kBlockBytes;
  }
  __device__ __forceinline__ void wait(uint64_t* full, int i) const {
    cuda::barrier_wait(full + stage_of<Tile::kStages>(i), phase_of<Tile::kStages>(i));
  }
  __device__ __forceinline__ void release(uint64_t* empty, int i) const {
    if (lane == 0) cuda::barrier_arrive(empty + stage_of<Tile::kStages>(i));
  }

  // Named barriers: 1 + w for when it is warpgroup w's turn to issue, 4 + w for w alone.
  __device__ __forceinline__ void wait_for_turn() const {
    cuda::named_barrier_sync(1 + warpgroup, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    cuda::named_barrier_arrive(1 + (warpgroup + 1) % Tile::kWarpgroups, 256);
  }
  __device__ __forceinline__ void sync() const { cuda::named_barrier_sync(4 + warpgroup, 128); }

  // Gives the queries' place back once the output has left it.
  __device__ __forceinline__ void finish_out() {
    if (out_round < 0) return;
    if (thread == 0) {
      cuda::bulk_wait_read<0>();
      cuda::barrier_arrive(&barriers->q_empty[q_stage(out_round)]);
    }
    out_round = -1;
  }

  // False if there is no further tile.
  __device__ __forceinline__ bool begin_tile(int round) {
    const int phase = phase_of<Tile::kQueryStages>(round);
    cuda::barrier_wait(&barriers->q_full[q_stage(round)], phase);
    const TileOfQueries& t = tile(round);
    if (t.batch < 0) return false;
    const int first = t.query + 64 * warpgroup + t.k_len - t.q_len, last = first + 63;
    const int end = min(t.k_len, last + a.right + 1);
    inner_end = min(t.k_len, first + a.right + 1) / Tile::kKeys;
    inner_first = (last - a.left + Tile::kKeys - 1) / Tile::kKeys;
    end_block = max(t.first_block, min(t.end_block, (end + Tile::kKeys - 1) / Tile::kKeys));
    first_block = min(end_block, max(t.first_block, (first - a.left) / Tile::kKeys));
    half_block = end <= (end_block - 1) * Tile::kKeys + Tile::kKeys / 2;
    if (t.query + 64 * warpgroup >= t.q_len) end_block = first_block;  // no queries here
    return true;
  }
  // How many blocks before and behind these only others need.
  __device__ __forceinline__ int skip_before(int round) const {
    return first_block - tile(round).first_block;
  }
  __device__ __forceinline__ int skip_behind(int round) const {
    return tile(round).end_block - end_block;
  }

  // Takes part in the others' blocks without doing anything.
  __device__ __forceinline__ void skip(int blocks) {
#pragma unroll 1
    for (; blocks > 0; --blocks, ++block) {
      wait(barriers->k_full, block);
      wait_for_turn();
      pass_turn();
      release(barriers->k_empty, block);
      wait(barriers->v_full, block);
      release(barriers->v_empty, block);
    }
  }

  template <int N>
  __device__ __forceinline__ void issue_scores(float (&s)[N], int round) const {
    const uint64_t q = cuda::k_major(queries(round)), k = cuda::k_major(k_block(block));
    cuda::warpgroup_fence();
#pragma unroll
    for (int i = 0; i < Tile::kWidth / 16; ++i) {
      cuda::multiply<T>(s, cuda::advance(q, i / 4 * Tile::kQueryColumnBytes + i % 4 * 32),
                        cuda::advance(k, i / 4 * Tile::kKeyColumnBytes + i % 4 * 32), i > 0);
    }
    cuda::warpgroup_commit();
  }

  template <int kSteps>
  __device__ __forceinline__ void issue_values(float (&o)[Tile::kWidth / 2],
                                               const uint32_t (&p)[Tile::kKeys / 16][4],
                                               int i) const {
    const uint64_t v = cuda::outer_major(v_block(i), Tile::kKeyColumnBytes);
    cuda::warpgroup_fence();
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      cuda::multiply<T, cuda::Major::kOuter>(o, p[j], cuda::advance(v, j * 2048), true);
    }
    cuda::warpgroup_commit();
  }

  // Scores of block n as the softmax wants them: changed by softcap and ALiBi (then in units of
  // log 2), and -inf where a query does not see a key.
  template <int N>
  __device__ __forceinline__ void finish_scores(float (&s)[N], int n, int round) const {
    const int first_key = n * Tile::kKeys + 2 * (lane % 4);
    const TileOfQueries& t = tile(round);
    if constexpr (Tile::kScoreChange) {
      const float slope = a.slopes.data == nullptr
                              ? 0.f
                              : parameter(a.slopes.data, a.slope_type,
                                          t.batch * a.slopes.batch + t.head * a.slopes.head);
      const float inner = a.softcap > 0.f ? a.scale / a.softcap : a.scale;
      const int place = t.query + 64 * warpgroup + 16 * warp + lane / 4 + t.k_len - t.q_len;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float x = s[i] * inner;
        if (a.softcap > 0.f) x = a.softcap * tanh_fast(x);
        const int distance = place + 8 * row_of(i) - (first_key + 8 * (i / 4) + i % 2);
        s[i] = cuda::kLog2E * (x - slope * static_cast<float>(abs(distance)));
      }
    }
    if (n < inner_end && n >= inner_first) return;
    const int place =
        t.query + 64 * warpgroup + 16 * warp + lane / 4 + t.k_len - t.q_len - first_key;
    if (n >= inner_end) {
      const int limit = t.k_len - first_key, end = place + a.right + 1;
      mask_from(s, {min(limit, end), min(limit, end + 8)});
    }
    if (n < inner_first) mask_before(s, {place - a.left, place + 8 - a.left});
  }

  // The rows behind a packed sequence are another one's, and 0 times what is there may be NaN.
  __device__ __forceinline__ void clear_values_behind(int round) const {
    const int keys = tile(round).k_len - (end_block - 1) * Tile::kKeys;
    if (!a.packed || keys >= Tile::kKeys) return;
    for (int i = 8 * keys + thread; i < 8 * Tile::kKeys; i += 128) {
#pragma unroll
      for (int c = 0; c < Tile::kColumns; ++c) {
        *reinterpret_cast<uint4*>(v_block(block - 1) + c * Tile::kKeyColumnBytes + 16 * i) =
            uint4{};
      }
    }
    cuda::fence_async_shared();
    sync();
  }

  // What a row of the output is to be multiplied by, when its tile is done; stores lse.
  __device__ __forceinline__ void finish_rows(const Softmax& softmax, float scale_log2, int round,
                                              float (&factor)[2]) const {
    const TileOfQueries& t = tile(round);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float sum = softmax.sum[j];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      float max = softmax.max[j] * scale_log2;
      factor[j] = sum == 0.f ? 0.f : __frcp_rn(sum);
      if (a.sinks != nullptr && sum != 0.f) {
        const float sink = cuda::kLog2E * parameter(a.sinks, a.sink_type, t.head * a.sink_stride);
        const float both = fmaxf(max, sink);
        sum = sum * exp2_fast(max - both) + exp2_fast(sink - both);
        factor[j] = __fdividef(exp2_fast(max - both), sum);
        max = both;
      }
      const int row = t.query + 64 * warpgroup + 16 * warp + lane / 4 + 8 * j;
      if (a.lse.data != nullptr && lane % 4 == 0 && row < t.q_len) {
        constexpr float kLog2 = 0.6931471805599453f;
        const float lse = sum == 0.f ? -INFINITY : kLog2 * (max + __log2f(sum));
        static_cast<float*>(a.lse.data)[t.batch * a.lse.batch + t.head * a.lse.head +
                                        (t.q_begin + row) * a.lse.row] = lse;
      }
    }
  }

  // Sends the rows out, through the place of their queries.
  __device__ __forceinline__ void store(const float (&o)[Tile::kWidth / 2],
                                        const float (&factor)[2], int round) {
    const TileOfQueries& t = tile(round);
    const int first_row = t.query + 64 * warpgroup;
    char* const out = queries(round);
    {
      const int r = 16 * warp + lane % 16;
#pragma unroll
      for (int i = 0; i < Tile::kWidth / 16; ++i) {
        const int piece = 2 * (i % 4) + lane / 16;
        char* const to = out + i / 4 * Tile::kQueryColumnBytes + r * 128 + (piece ^ (r % 8)) * 16;
        const float* x = o + 8 * i;
        cuda::store_matrices(to, pack_pair<T>(x[0] * factor[0], x[1] * factor[0]),
                             pack_pair<T>(x[2] * factor[1], x[3] * factor[1]),
                             pack_pair<T>(x[4] * factor[0], x[5] * factor[0]),
                             pack_pair<T>(x[6] * factor[1], x[7] * factor[1]));
      }
    }
    const int rows = min(64, t.q_len - first_row);
    cuda::fence_async_shared();
    sync();
    if (a.out_view.data != nullptr && rows > 0) {
      if (!a.packed || rows == 64) {
        if (thread == 0) {
#pragma unroll
          for (int c = 0; c < Tile::kColumns; ++c) {
            cuda::tensor_store(&a.out, out + c * Tile::kQueryColumnBytes, 64 * c,
                               t.q_begin + first_row, t.head, a.packed ? 0 : t.batch);
          }
          cuda::bulk_commit();
        }
      } else {
        // The rows behind are another sequence's.
        for (int i = thread; i < rows * a.value_pieces; i += 128) {
          const int r = i / a.value_pieces, piece = i % a.value_pieces;
          const uint4 x = *reinterpret_cast<const uint4*>(
              out + piece / 8 * Tile::kQueryColumnBytes + r * 128 + ((piece % 8) ^ (r % 8)) * 16);
          const int64_t at =
              (t.q_begin + first_row + r) * a.out_view.row + t.head * a.out_view.head + piece * 8;
          *reinterpret_cast<uint4*>(static_cast<T*>(a.out_view.data) + at) = x;
        }
        sync();
      }
    }
    out_round = round;
  }

  // Waits for the product with the values of the block before, which takes as long as the softmax
  // of this one, and puts this block's probabilities in its place. Called after a branch only: the
  // compiler would move the wait to before the softmax.
  __device__ __forceinline__ void next_probabilities(float (&o)[Tile::kWidth / 2],
                                                     const float (&s)[kScores],
                                                     uint32_t (&p)[Tile::kKeys / 16][4],
                                                     const float (&correction)[2],
                                                     bool release_values) const {
    cuda::warpgroup_wait<0>();
    cuda::keep_registers(o);
    if (release_values) release(barriers->v_empty, block - 2);
    if (__any_sync(0xffffffff, correction[0] != 1.f || correction[1] != 1.f)) {
#pragma unroll
      for (int i = 0; i < Tile::kWidth / 2; ++i) o[i] *= correction[row_of(i)];
    }
    round_pairs<T>(s, p);
  }

  __device__ __forceinline__ void run() {
    const float scale_log2 = Tile::kScoreChange ? 1.f : a.scale * cuda::kLog2E;
    float o[Tile::kWidth / 2], s[kScores];
    uint32_t p[Tile::kKeys / 16][4];
    float correction[2], factor[2];
    if (warpgroup == Tile::kWarpgroups - 1) pass_turn();
    for (int round = 0; begin_tile(round); ++round) {
      Softmax softmax;
      skip(skip_before(round));
#pragma unroll
      for (int i = 0; i < Tile::kWidth / 2; ++i) o[i] = 0.f;
      if (first_block < end_block) {  // else no query here sees a key
        wait(barriers->k_full, block);
        wait_for_turn();
        issue_scores(s, round);
        pass_turn();
        cuda::warpgroup_wait<0>();
        cuda::keep_registers(s);
        release(barriers->k_empty, block);
        finish_scores(s, first_block, round);
        softmax.step(s, scale_log2, correction);
        finish_out();
        ++block;
        // Of the last block, half the keys may be all that these queries see.
        const bool half = Tile::kHalfBlocks && half_block && end_block - first_block > 1;
        const auto step = [&](auto& scores, int n) {
          wait(barriers->k_full, block);
          next_probabilities(o, s, p, correction, n > first_block + 1);
          wait_for_turn();
          cuda::keep_registers(o);
          issue_scores(scores, round);
          wait(barriers->v_full, block - 1);
          issue_values<kSteps>(o, p, block - 1);
          pass_turn();
          cuda::warpgroup_wait<1>();
          cuda::keep_registers(scores);
          release(barriers->k_empty, block);
          finish_scores(scores, n, round);
          softmax.step(scores, scale_log2, correction);
          ++block;
        };
        const int full_end = end_block - (half ? 1 : 0);
#pragma unroll 1
        for (int n = first_block + 1; n < full_end; ++n) step(s, n);
        const auto last_product = [&](auto steps) {
          wait(barriers->v_full, block - 1);
          next_probabilities(o, s, p, correction, end_block - first_block > 1);
          clear_values_behind(round);
          issue_values<decltype(steps)::value>(o, p, block - 1);
          finish_rows(softmax, scale_log2, round, factor);
          cuda::warpgroup_wait<0>();
          cuda::keep_registers(o);
          release(barriers->v_empty, block - 1);
        };
        // Products under way must not meet where branches join.
        if constexpr (Tile::kHalfBlocks) {
          if (half) {
            step(reinterpret_cast<float(&)[kScores / 2]>(s), end_block - 1);
            last_product(std::integral_constant<int, kSteps / 2>());
          } else {
            last_product(std::integral_constant<int, kSteps>());
          }
        } else {
          last_product(std::integral_constant<int, kSteps>());
        }
      } else {
        finish_rows(softmax, scale_log2, round, factor);
      }
      skip(skip_behind(round));
      finish_out();
      store(o, factor, round);
      if constexpr (Tile::kQueryStages == 1) finish_out();
    }
    finish_out();
  }
};

#endif

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_forward(const __grid_constant__ ForwardArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  auto* barriers = reinterpret_cast<ForwardBarriers*>(shared + Tile::kEnd);
  auto* shared_tiles = reinterpret_cast<TileOfQueries*>(barriers + 1);
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * Tile::kWarpgroups;
    for (int i = 0; i < 2; ++i) {
      cuda::barrier_init(&barriers->q_full[i], 1);
      cuda::barrier_init(&barriers->q_empty[i], Tile::kWarpgroups);
    }
    for (int i = 0; i < Tile::kStages; ++i) {
      cuda::barrier_init(&barriers->k_full[i], 1);
      cuda::barrier_init(&barriers->k_empty[i], kWarps);
      cuda::barrier_init(&barriers->v_full[i], 1);
      cuda::barrier_init(&barriers->v_empty[i], kWarps);
    }
    cuda::fence_barrier_init();
    cuda::prefetch_tensor_map(&a.q);
    cuda::prefetch_tensor_map(&a.k);
    cuda::prefetch_tensor_map(&a.v);
    cuda::prefetch_tensor_map(&a.out);
  }
  __syncthreads();
  cuda::wait_for_earlier_kernels();
  // By a shuffle, for the compiler to see that it is the same in all threads of a warp.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    cuda::give_registers<Tile::kProducerRegisters>();
    if (threadIdx.x < 32) produce<Tile>(a, shared, barriers, shared_tiles);
  } else {
    cuda::take_registers<Tile::kRegisters>();
    Consumer<Tile>{a, shared, barriers, shared_tiles, warpgroup - 1}.run();
  }
#endif
}

}  // namespace fk::cuda_sm90
