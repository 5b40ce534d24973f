// This is attention's forward on Hopper for 8-bit floats (e4m3): out = softmax(scale q k^T) v in
// bfloat16, with a scale for each head's q, k and v.
//
// Floor: 4 Lq Lk D FLOPs per head, 8192 a clock and multiprocessor: twice the rate of bfloat16, so
// that at D = 128 the exponentials (16 a clock) take as long as the multiplications.
//
// The plan is that of sm90/forward.cuh: a producer warp, warpgroups of 64 queries that take
// turns, scores of the next block and the product with the values of the present one in flight
// together. Long rows take larger blocks, with turns at exponentials instead of products. What 8
// bits change:
// - Both operands of a product have K along their rows. Values come the other way round, so a pass
//   ahead of this one (pack_values) transposes them into blocks as shared memory wants them: a
//   block is one copy without a tensor map.
// - A thread's scores are pairs of neighbouring columns, but its part of the left operand is four.
//   The probabilities stay where they are; the keys of each 16 are reordered in the packed values.
// - Probabilities are multiplied by 2^8, to use e4m3's range (to 448; full precision from 2^-6).
#pragma once

#include "cuda/dependent_launch.cuh"
#include "cuda/wgmma.cuh"
#include "ops/attention/sm90/float8_producer.cuh"
#include "ops/attention/sm90/float8_softmax.cuh"
#include "ops/attention/sm90/float8_values.cuh"
#include "ops/attention/sm90/rows.cuh"

namespace fk::cuda_sm90 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// Runs one warpgroup, which owns 64 queries of every tile.
template <class Tile>
struct Float8Consumer {
  using T = __nv_fp8_e4m3;
  static constexpr int kScores = Tile::kKeys / 2;
  static constexpr int kSteps = Tile::kKeys / 32;

  const Float8Arguments& a;
  char* const shared;
  Float8Barriers* const barriers;
  const Float8Head* const shared_heads;
  const int warpgroup;
  const int thread = threadIdx.x % 128;
  const int warp = thread / 32, lane = thread % 32;

  int block = 0;  // of keys since the start whose scores were taken, or that were skipped

  __device__ __forceinline__ const TileOfQueries& tile(int round) const {
    return shared_heads[round % 2].tile;
  }
  __device__ __forceinline__ float scale_log2(int round) const {
    return shared_heads[round % 2].scale_log2;
  }
  __device__ __forceinline__ char* queries(int round) const {
    return shared + round % 2 * Tile::kTileBytes + warpgroup * Tile::kQueryBytes;
  }
  static __device__ __forceinline__ int stage_of(int i) { return cuda::stage_of<Tile::kStages>(i); }
  __device__ __forceinline__ void wait(uint64_t* full, int i) const {
    cuda::barrier_wait(full + stage_of(i), cuda::phase_of<Tile::kStages>(i));
  }
  __device__ __forceinline__ void release(uint64_t* empty, int i) const {
    if (lane == 0) cuda::barrier_arrive(empty + stage_of(i));
  }

  // Named barrier 1 + w is for when it is warpgroup w's turn, and 4 + w for w alone. `zero` is
  // something that has to be known before the turn is passed on.
  __device__ __forceinline__ void wait_for_turn() const {
    cuda::named_barrier_sync(1 + warpgroup, 256);
  }
  __device__ __forceinline__ void pass_turn(int zero = 0) const {
    cuda::named_barrier_arrive(1 + zero + (warpgroup + 1) % Tile::kWarpgroups, 256);
  }
  __device__ __forceinline__ void sync() const { cuda::named_barrier_sync(4 + warpgroup, 128); }

  // Returns the blocks of keys that this warpgroup needs.
  __device__ __forceinline__ const BlocksOfKeys& blocks(int round) const {
    return tile(round).blocks[warpgroup];
  }
  __device__ __forceinline__ int end_block(int round) const {
    return (blocks(round).end_halves + 1) / 2;
  }

  __device__ __forceinline__ void turn_signs(int round) const {
    for (int i = thread; i < Tile::kQueryBytes / 16; i += 128) {
      uint4& x = reinterpret_cast<uint4*>(queries(round))[i];
      constexpr uint32_t kSigns = 0x80808080;
      x = {x.x ^ kSigns, x.y ^ kSigns, x.z ^ kSigns, x.w ^ kSigns};
    }
    cuda::fence_async_shared();
    sync();
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

  __device__ __forceinline__ void issue_scores(float (&s)[kScores], int round) const {
    const uint64_t q = cuda::k_major(queries(round));
    const uint64_t k = cuda::k_major(shared + Tile::kKOffset + stage_of(block) * Tile::kKBytes);
#pragma unroll
    for (int i = 0; i < Tile::kWidth / 32; ++i) {
      cuda::multiply<T>(s, cuda::advance(q, i / 4 * Tile::kQueryColumnBytes + i % 4 * 32),
                        cuda::advance(k, i / 4 * Tile::kKeyColumnBytes + i % 4 * 32), i > 0);
    }
    cuda::warpgroup_commit();
  }

  __device__ __forceinline__ void issue_values(float (&o)[Tile::kWidth / 2],
                                               const uint32_t (&p)[kSteps][4], int i) const {
    const uint64_t v =
        cuda::in_pieces(shared + Tile::kVOffset + stage_of(i) * Tile::kVBytes, 128, 256);
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      cuda::multiply<T>(o, p[j], cuda::advance(v, j * kValueStepBytes<Tile::kWidth>), true);
    }
    cuda::warpgroup_commit();
  }

  __device__ __forceinline__ bool masked(int n, int round) const {
    return n >= blocks(round).inner_end || n < blocks(round).inner_first;
  }
  // Sets scores to -inf where a query does not see a key of block n.
  __device__ __forceinline__ void mask(float (&s)[kScores], int n, int round) const {
    const TileOfQueries& t = tile(round);
    mask_block<Tile::kKeys>(s, a.forward, t, n, blocks(round).inner_first, blocks(round).inner_end,
                            t.query + 64 * warpgroup, warp, lane);
  }

  static __device__ __forceinline__ float sink_of(const void* data, DType type, int64_t at) {
    if (type == DType::kBFloat16) {
      return cuda::to_float(static_cast<const __nv_bfloat16*>(data)[at]);
    }
    return static_cast<const float*>(data)[at];
  }

  // Returns what a row of the output is to be multiplied by when its tile is done, and stores lse.
  __device__ __forceinline__ void finish_rows(const Float8Softmax& softmax, int round,
                                              float (&factor)[2]) const {
    const ForwardArguments& f = a.forward;
    const TileOfQueries& t = tile(round);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float sum = softmax.sum[j];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      float max = softmax.max[j] * scale_log2(round) - Float8Softmax::kShift;
      factor[j] = sum == 0.f ? 0.f : __frcp_rn(sum);
      if (f.sinks != nullptr && sum != 0.f) {
        const float sink = cuda::kLog2E * sink_of(f.sinks, f.sink_type, t.head * f.sink_stride);
        const float both = fmaxf(max, sink);
        sum = sum * exp2_fast(max - both) + exp2_fast(sink - both);
        factor[j] = __fdividef(exp2_fast(max - both), sum);
        max = both;
      }
      const int row = t.query + 64 * warpgroup + 16 * warp + lane / 4 + 8 * j;
      if (f.lse.data != nullptr && lane % 4 == 0 && row < t.q_len) {
        const float lse = sum == 0.f ? -INFINITY : attention::kLn2 * (max + __log2f(sum));
        static_cast<float*>(f.lse.data)[t.batch * f.lse.batch + t.head * f.lse.head +
                                        (t.q_begin + row) * f.lse.row] = lse;
      }
      factor[j] *= shared_heads[round % 2].v_scale;
    }
  }

  // Sends the rows out, through shared memory.
  __device__ __forceinline__ void store(const float (&o)[Tile::kWidth / 2],
                                        const float (&factor)[2], int round) {
    constexpr int kColumnBytes = 64 * 128;
    const ForwardArguments& f = a.forward;
    const TileOfQueries& t = tile(round);
    const int first_row = t.query + 64 * warpgroup;
    char* const out = shared + Tile::kOutOffset + warpgroup * Tile::kOutBytes;
    if (thread == 0) cuda::bulk_wait_read<0>();
    sync();
    put_rows<__nv_bfloat16, kColumnBytes>(out, o, factor, warp, lane);
    const int rows = min(64, t.q_len - first_row);
    cuda::fence_async_shared();
    sync();
    if (f.out_view.data == nullptr || rows <= 0) return;
    if (!f.packed || rows == 64) {
      if (thread == 0) send_rows<Tile::kWidth / 64, kColumnBytes>(out, f, t, first_row);
    } else {
      copy_last_rows<__nv_bfloat16, kColumnBytes>(out, f, t, first_row, rows, thread);
    }
  }

  // Waits for the product with the values of the block before and puts this block's probabilities
  // in its place. Call this after a branch only: the compiler would move the wait to before the
  // softmax.
  __device__ __forceinline__ void next_probabilities(float (&o)[Tile::kWidth / 2],
                                                     const float (&s)[kScores],
                                                     const uint32_t (&next)[kSteps][4],
                                                     uint32_t (&p)[kSteps][4],
                                                     const Float8Softmax& softmax, bool grown,
                                                     bool release_values) const {
    cuda::warpgroup_wait<0>();
    cuda::keep_registers(o);
    if (release_values) release(barriers->v_empty, block - 2);
    if constexpr (!Tile::kTurnsAtExponentials) {
      grown = __any_sync(0xffffffff, softmax.correction[0] != 1.f || softmax.correction[1] != 1.f);
    }
    if (grown) {
#pragma unroll
      for (int i = 0; i < Tile::kWidth / 2; ++i) o[i] *= softmax.correction[row_of(i)];
    }
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
      if constexpr (Tile::kRoundLate) {
        round_sixteen(s + 16 * c, p[c]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) p[c][i] = next[c][i];
      }
    }
  }

  // Waits for the scores of block n, with kPending later products under way, and makes them
  // probabilities. Returns whether a maximum has grown, where that is known.
  template <int kPending>
  __device__ __forceinline__ bool probabilities(float (&s)[kScores], uint32_t (&next)[kSteps][4],
                                                Float8Softmax& softmax, int n, int round) {
    bool grown = false;
    if constexpr (Tile::kTurnsAtExponentials) {
      const bool with_mask = masked(n, round);
      const float scale = scale_log2(round), slack = shared_heads[round % 2].slack;
      cuda::warpgroup_wait<kPending>();
      cuda::keep_registers(s);
      release(barriers->k_empty, block);
      if (with_mask) mask(s, n, round);
      grown = softmax.grow(s, scale, slack);
      wait_for_turn();
      softmax.exponentiate<Tile::kRoundLate>(s, scale, next);
      pass_turn(softmax.sum[0] + softmax.sum[1] < 0.f);  // never, but known last
    } else {
      cuda::warpgroup_wait<kPending>();
      cuda::keep_registers(s);
      release(barriers->k_empty, block);
      mask(s, n, round);
      softmax.step<Tile::kRoundLate>(s, scale_log2(round), next);
    }
    ++block;
    return grown;
  }

  __device__ __forceinline__ void run() {
    constexpr bool kIssueInTurns = !Tile::kTurnsAtExponentials;
    float o[Tile::kWidth / 2], s[kScores];
    uint32_t p[kSteps][4], next[kSteps][4];
    float factor[2];
    if (warpgroup == Tile::kWarpgroups - 1) pass_turn();
    for (int round = 0;; ++round) {
      cuda::barrier_wait(&barriers->q_full[round % 2], (round / 2) & 1);
      if (tile(round).batch < 0) break;
      if (shared_heads[round % 2].negative) turn_signs(round);
      Float8Softmax softmax;
      const int first_block = blocks(round).first;
      skip(first_block - tile(round).first_block);
#pragma unroll
      for (int i = 0; i < Tile::kWidth / 2; ++i) o[i] = 0.f;
      if (first_block < end_block(round)) {  // else no query here sees a key
        wait(barriers->k_full, block);
        if (kIssueInTurns) wait_for_turn();
        cuda::warpgroup_fence();
        issue_scores(s, round);
        if (kIssueInTurns) pass_turn();
        probabilities<0>(s, next, softmax, first_block, round);
        bool values_read = false, grown = false;
#pragma unroll 1
        for (int n = first_block + 1; n < end_block(round); ++n) {
          wait(barriers->k_full, block);
          // This stands in front of both products. With a branch between them the compiler would
          // keep the probabilities twice.
          if (!kIssueInTurns) wait(barriers->v_full, block - 1);
          next_probabilities(o, s, next, p, softmax, grown, values_read);
          values_read = true;
          if (kIssueInTurns) wait_for_turn();
          cuda::keep_registers(o);
          cuda::warpgroup_fence();
          issue_scores(s, round);
          if (kIssueInTurns) {
            wait(barriers->v_full, block - 1);
            cuda::warpgroup_fence();
          }
          issue_values(o, p, block - 1);
          if (kIssueInTurns) pass_turn();
          grown = probabilities<1>(s, next, softmax, n, round);
        }
        wait(barriers->v_full, block - 1);
        next_probabilities(o, s, next, p, softmax, grown, values_read);
        cuda::warpgroup_fence();
        issue_values(o, p, block - 1);
        finish_rows(softmax, round, factor);
        cuda::warpgroup_wait<0>();
        cuda::keep_registers(o);
        release(barriers->v_empty, block - 1);
      } else {
        finish_rows(softmax, round, factor);
      }
      skip(tile(round).end_block - end_block(round));
      store(o, factor, round);
      if (lane == 0) cuda::barrier_arrive(&barriers->q_empty[round % 2]);
    }
    if (thread == 0) cuda::bulk_wait_read<0>();
  }
};

#endif

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_float8(const __grid_constant__ Float8Arguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  auto* barriers = reinterpret_cast<Float8Barriers*>(shared + Tile::kEnd);
  auto* shared_heads = reinterpret_cast<Float8Head*>(barriers + 1);
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * Tile::kWarpgroups;
    for (int i = 0; i < 2; ++i) {
      cuda::barrier_init_for_warps(&barriers->q_full[i], 1);
      cuda::barrier_init(&barriers->q_empty[i], kWarps);
    }
    for (int i = 0; i < Tile::kStages; ++i) {
      cuda::barrier_init(&barriers->k_full[i], 1);
      cuda::barrier_init(&barriers->k_empty[i], kWarps);
      cuda::barrier_init(&barriers->v_full[i], 1);
      cuda::barrier_init(&barriers->v_empty[i], kWarps);
    }
    cuda::fence_barrier_init();
    cuda::prefetch_tensor_map(&a.forward.q);
    cuda::prefetch_tensor_map(&a.forward.k);
    cuda::prefetch_tensor_map(&a.forward.out);
  }
  __syncthreads();
  cuda::wait_for_earlier_kernels();
  // The number comes by a shuffle, for the compiler to see that it is the same in all threads of a
  // warp.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    cuda::give_registers<Tile::kProducerRegisters>();
    if (threadIdx.x < 32) Float8Producer<Tile>{a, shared, barriers, shared_heads}.run();
  } else {
    cuda::take_registers<Tile::kRegisters>();
    Float8Consumer<Tile>{a, shared, barriers, shared_heads, warpgroup - 1}.run();
  }
#endif
}

}  // namespace fk::cuda_sm90
