// This is attention's forward of float32 on Hopper, at float32 accuracy: operands become two
// float16 terms (cuda/tiles.cuh), of whose products wgmma makes three, and sums over keys are added
// up outside the tensor cores, which truncate.
//
// Floor: 12 Lq Lk D FLOPs a head on the tensor cores (half of it causal). A step of 128 queries and
// 128 keys at D 128 takes 6144 clocks of them; splitting its keys and values takes the schedulers
// about 1500 (by instructions) and the softmax as much, so a block splits what it needs itself:
// nothing has to be prepared, and where there are few tiles that saves more time than splitting
// once.
//
// A block has two warpgroups that multiply, each with 64 queries, and two that split keys and
// values on their way to where they are multiplied, of which there is one place for each: the one
// is refilled while the other is multiplied. Each tile has a scale of its own.
#pragma once

#include "cuda/wgmma.cuh"
#include "ops/attention/sm90/float32_split.cuh"

namespace fk::cuda::attention {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// Computes s = q k^T, the cross terms first, as the tensor cores truncate.
template <class Tile>
__device__ __forceinline__ void issue_scores(float (&s)[Tile::kKeys / 2], const void* q,
                                             const void* k) {
  const uint64_t q_at = k_major(q), k_at = k_major(k);
  constexpr int kQueryColumn = 64 * 128, kKeyColumn = Tile::kKeys * 128;
  warpgroup_fence();
#pragma unroll
  for (int product = 0; product < 3; ++product) {
    const int of_q = product == 0 ? Tile::kDim / 64 * kQueryColumn : 0;
    const int of_k = product == 1 ? Tile::kDim / 64 * kKeyColumn : 0;
#pragma unroll
    for (int d = 0; d < Tile::kDim / 16; ++d) {
      multiply<__half>(s, advance(q_at, of_q + d / 4 * kQueryColumn + d % 4 * 32),
                       advance(k_at, of_k + d / 4 * kKeyColumn + d % 4 * 32), product + d > 0);
    }
  }
  warpgroup_commit();
}

// Computes out = weights v, the cross terms first.
template <class Tile>
__device__ __forceinline__ void issue_values(float (&out)[Tile::kDim / 2],
                                             const uint32_t (&weights)[2][Tile::kKeys / 16][4],
                                             const void* v) {
  constexpr int kKeyColumn = Tile::kKeys * 128;
  const uint64_t v_at = outer_major(v, kKeyColumn);
  warpgroup_fence();
#pragma unroll
  for (int product = 0; product < 3; ++product) {
#pragma unroll
    for (int j = 0; j < Tile::kKeys / 16; ++j) {
      multiply<__half, Major::kOuter>(
          out, weights[product == 0][j],
          advance(v_at, (product == 1 ? Tile::kDim / 64 * kKeyColumn : 0) + j * 2048),
          product + j > 0);
    }
  }
  warpgroup_commit();
}

// A thread sees two rows of the softmax of a warpgroup, and a quarter of the columns of each
// (wgmma.cuh says where).
struct FloatSoftmax {
  float maximum[2] = {-INFINITY, -INFINITY};  // as exponents of 2
  float sum[2] = {0.f, 0.f};                  // of this thread's columns
};

// Turns scores times `exponent` into weights, in two terms. The sums so far follow the maximum.
template <class Tile>
__device__ __forceinline__ void find_weights(float (&s)[Tile::kKeys / 2], float exponent,
                                             FloatSoftmax& softmax, float (&out)[Tile::kDim / 2],
                                             uint32_t (&weights)[2][Tile::kKeys / 16][4]) {
  float larger[2];
  bool grew = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float x = -INFINITY;
#pragma unroll
    for (int i = 2 * r; i < Tile::kKeys / 2; i += 4) x = fmaxf(x, fmaxf(s[i], s[i + 1]));
    larger[r] = fmaxf(softmax.maximum[r], quad_max(x) * exponent);
    grew = grew || larger[r] - softmax.maximum[r] > kSlack;
  }
  if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float base = larger[r] == -INFINITY ? 0.f : larger[r];
      const float factor = exp2_fast(softmax.maximum[r] - base);
      softmax.maximum[r] = larger[r];
      softmax.sum[r] *= factor;
#pragma unroll
      for (int i = 2 * r; i < Tile::kDim / 2; i += 4) {
        out[i] *= factor;
        out[i + 1] *= factor;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float base = softmax.maximum[r] == -INFINITY ? 0.f : kLift<Tile> - softmax.maximum[r];
    float tile_sum = 0.f;
#pragma unroll
    for (int i = 2 * r; i < Tile::kKeys / 2; i += 4) {
      const float x = exp2_fast(fmaf(s[i], exponent, base));
      const float y = exp2_fast(fmaf(s[i + 1], exponent, base));
      tile_sum += x + y;
      uint32_t words[2];
      split_pair<__half>(words, x, y);
      weights[0][i / 8][i / 2 % 4] = words[0];
      weights[1][i / 8][i / 2 % 4] = words[1];
    }
    softmax.sum[r] += tile_sum;
  }
}

template <class Tile>
__device__ __forceinline__ void mask_scores(float (&s)[Tile::kKeys / 2], const ForwardBlock& block,
                                            int row, int j0) {
  const Window window = block.window;
  const int first_key = j0 + thread_index() % 4 * 2;
  const int queries = static_cast<int>(block.sequence.q_len);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = row + r * 8;
    const int first = window.first(i) - first_key,
              end = (i < queries ? window.end(i) : 0) - first_key;
#pragma unroll
    for (int n = 2 * r; n < Tile::kKeys / 2; n += 4) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int j = n / 4 * 8 + c;
        if (j < first || j >= end) s[n + c] = -INFINITY;
      }
    }
  }
}

// Runs one warpgroup that multiplies.
template <class Tile>
__device__ __forceinline__ void multiply_rows(const Forward& p, uint8_t* shared,
                                              const ForwardBlock& block, FloatBarriers* barriers,
                                              int warpgroup) {
  constexpr int kDim = Tile::kDim;
  uint8_t* const queries = shared + warpgroup * Tile::kQueryBytes;
  const float q_scale = split_queries<Tile>(p, block, shared_address(queries), barriers, warpgroup);
  float out[kDim / 2];
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) out[i] = 0.f;
  FloatSoftmax softmax;
  uint32_t phase = 0;
#pragma unroll 1
  for (int j0 = barriers->keys_begin; j0 < block.keys_end; j0 += Tile::kKeys) {
    uint32_t weights[2][Tile::kKeys / 16][4];
    {
      float s[Tile::kKeys / 2];
      barrier_wait(&barriers->k_full, phase);
      const float exponent = kLog2e * p.change.scale * product_scale(q_scale, barriers->k_scale);
      issue_scores<Tile>(s, queries, shared + Tile::kKOffset);
      warpgroup_wait<0>();
      keep_registers(s);
      const int thread = thread_index();
      if (thread % 32 == 0) barrier_arrive(&barriers->k_empty);
      if (j0 < block.whole_begin || j0 + Tile::kKeys > block.whole_end) {
        mask_scores<Tile>(s, block, block.place.begin + thread / 32 * 16 + thread % 32 / 4, j0);
      }
      find_weights<Tile>(s, exponent, softmax, out, weights);
    }
    float sums[kDim / 2];
    barrier_wait(&barriers->v_full, phase);
    const float v_scale = barriers->v_scale;
    issue_values<Tile>(sums, weights, shared + Tile::kVOffset);
    warpgroup_wait<0>();
    keep_registers(sums);
    if (thread_index() % 32 == 0) barrier_arrive(&barriers->v_empty);
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) out[i] = fmaf(sums[i], v_scale, out[i]);
    phase ^= 1;
  }

  const BlockRows place = block.place;
  const Sequence sequence = block.sequence;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  const int first_row = warp * 16 + lane / 4;  // in the tile
  const uint32_t k_tile = shared_address(shared + Tile::kKOffset);
  const uint32_t v_tile = shared_address(shared + Tile::kVOffset);
  const bool parts = part_count() > 1;
  float sums[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) sums[r] = quad_sum(softmax.sum[r]);
  if (parts) {
    __syncthreads();  // nobody multiplies keys any more
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (lane % 4 == 0) {
        store_shared(k_tile + (first_row + r * 8) * 16, softmax.maximum[r], sums[r]);
      }
    }
    merge_rows<Tile>(k_tile, v_tile);
  } else {
    named_barrier_sync(1 + warpgroup, 128);  // nobody multiplies these queries any more
  }
  const uint32_t stage = shared_address(queries);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = place.begin + first_row + r * 8;
    float highest = softmax.maximum[r], keys_sum = sums[r], factor = 1.f;
    if (parts) {
      const uint4 x = load_shared(v_tile + (first_row + r * 8) * 16);
      highest = __uint_as_float(x.x);
      keys_sum = __uint_as_float(x.y);
      factor = __uint_as_float(x.z);
    }
    const RowEnd end = end_row<Tile>(p, place.head, highest, keys_sum, factor);
    if (p.lse.data != nullptr && lane % 4 == 0 && i < sequence.q_len && blockIdx.z == 0) {
      lse_of_row(p, place, sequence, i) =
          end.none ? -INFINITY : fmaf(end.highest, kLn2, logf(end.sum * exp2f(-kLift<Tile>)));
    }
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      store_shared(float_place<kDim>(stage, first_row % 64 + r * 8, n * 8 + lane % 4 * 2),
                   out[4 * n + 2 * r] * end.factor, out[4 * n + 2 * r + 1] * end.factor);
    }
  }
  if (parts) {
    write_parts<Tile>(p.out, shared_address(shared), place.batch, sequence.q_begin + place.begin,
                      place.head, static_cast<int>(sequence.q_len) - place.begin);
    return;
  }
  if (p.out.data == nullptr) return;
  __syncwarp();
  const int first = place.begin + warp * 16;
  p.out.template write_tile<kDim, 16, 32, Result::kFromFloats>(
      stage + warp % 4 * 16 * kDim * 4, lane, place.batch, sequence.q_begin + first, place.head,
      static_cast<int>(sequence.q_len) - first);
}

#endif

template <class Tile>
__global__ void __launch_bounds__(Tile::kBlockThreads, 1)
    forward_float(const __grid_constant__ Forward p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  auto* const barriers = reinterpret_cast<FloatBarriers*>(shared + Tile::kTileBytes);
  ForwardBlock& block = *reinterpret_cast<ForwardBlock*>(barriers + 1);
  const BlockRows place = find_block_rows<Tile::kRows, Owned::kQueries>(
      p.problem, p.tiles, static_cast<int>(p.problem.heads), p.together,
      p.problem.mask.right < Mask::kUnlimited);
  if (!place.any) return;
  const Sequence sequence = p.problem.sequence(place.b);
  const Window window(p.problem.mask, sequence);
  const int last_row = min(place.begin + Tile::kRows, static_cast<int>(sequence.q_len)) - 1;
  if (last_row < place.begin) return;
  const Keys keys = Keys::of<Tile>(window.first(place.begin), window.end(last_row));
  if (threadIdx.x == 0) {
    const int kv_head = place.head / p.group;
    const auto rows = [&](const Operand& x) {
      return reinterpret_cast<const uint16_t*>(reinterpret_cast<const float*>(x.data) +
                                               x.offset(place.batch, sequence.k_begin, kv_head));
    };
    block = {{place, sequence, window},
             keys.end,
             window.first(last_row),
             window.end(place.begin),
             rows(p.k),
             rows(p.v),
             1.f};
    barriers->keys_begin = keys.begin;
    barrier_init(&barriers->k_full, 1);
    barrier_init(&barriers->v_full, 1);
    barrier_init(&barriers->k_empty, Tile::kThreads / 32);
    barrier_init(&barriers->v_empty, Tile::kThreads / 32);
    fence_barrier_init();
  }
  __syncthreads();
  // The number comes by a shuffle, for the compiler to see that it is the same in all threads of a
  // warp.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup < 2) {
    take_registers<208>();
    multiply_rows<Tile>(p, shared, block, barriers, warpgroup);
  } else {
    give_registers<48>();
    split_keys<Tile>(p, block, barriers->keys_begin, shared_address(shared), barriers,
                     static_cast<int>(threadIdx.x) - Tile::kThreads);
    if (part_count() > 1) {
      // The warps that multiply meet these barriers in merge_rows and write_parts.
      __syncthreads();
      cluster_barrier();
      __syncthreads();
      cluster_barrier();
      cluster_rendezvous();
    }
  }
#endif
}

}  // namespace fk::cuda::attention
