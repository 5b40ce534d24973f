// This is attention's backward on mma.sync. With P = exp(s - lse), dP = dout v^T, delta =
// rowsum(dout out) - dlse and dS = P (dP - delta):
//   dv = P^T dout,  dk = scale dS^T q,  dq = scale dS k,  dbias = dS, summed where bias repeats.
//
// FLOPs: 5 products of 2 Lq Lk D a head (half of it causal), three times that for two-term
// operands. Bytes: the tensors once, and dq's float32 sums added to once per tile of keys.
//
// backward_keys: a block takes kKeys keys of a key head and walks along the queries that see them,
// of all query heads that share it, so dk and dv need no atomics. Its warps share the keys and,
// kSplit of them with the same keys, the queries of S and dP and the columns of dk and dv: a piece
// of a product that is about square needs the fewest reads from shared memory. With kSplit 1, P and
// dS go from S and dP to dv and dk in registers, else through shared memory, as dS does to dq. dq
// is added up in float32 by atomics, in the order in which warps hold it (cuda/tiles.cuh).
// backward_queries: a block takes queries and walks along the keys, as the forward does: dq without
// atomics, for 7 products in all.
// dbias is made by the same kernel, whose blocks then take a tile of bias each and walk along all
// that it is repeated over.
#pragma once

#include "ops/attention/cuda/scores.cuh"

namespace fk::cuda::attention {

struct Backward {
  Problem problem;
  Operand q, k, v, dout;
  // Where blocks split two-term operands themselves (kSplitsKeys), these are k and v as they are.
  // Strides are those of `k` and `v`.
  const float *k_floats, *v_floats;
  // Both are (batch, heads, queries): lse / ln 2, which is inf where it was -inf, since such rows
  // have no gradients; and delta.
  const float *exponents, *delta;
  const uint32_t* delta_maxima;  // as Operand::maxima; NULL: not scaled
  ScoreChange change;
  Result dq, dk, dv;
  float* dq_sums;               // patches (cuda/tiles.cuh); NULL: not wanted here
  int64_t dq_rows, dq_columns;  // of a head
  int group;                    // query heads a key head
  int tiles, together;          // see find_block_rows

  Result dbias;                 // (batch, head, row: query; column: key), with strides of 0
  int bias_queries, bias_keys;  // 1 where repeated
  int64_t bias_batch, bias_heads;
};

enum BackwardParts { kValues = 1, kKeysAndQueries = 2, kAllParts = 3 };

// Products of scaled operands are multiplied with these on the way to dS.
struct GradientFactors {
  float dp, delta;
};

// Says whether operands may have a scale (cuda/tiles.cuh).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <class Tile>
constexpr bool kScaledOperands = Tile::kTerms == 2;
#else
template <class Tile>
constexpr bool kScaledOperands = true;
#endif

template <class Tile>
__device__ __forceinline__ float scale_of(const Operand& x, int64_t batch, int kv_head) {
  return kScaledOperands<Tile> ? x.scale(batch, kv_head) : 1.f;
}
// Returns the scale of q.k.
template <class Tile>
__device__ __forceinline__ float product_scale(const Backward& p, int64_t batch, int kv_head) {
  return product_scale(scale_of<Tile>(p.q, batch, kv_head), scale_of<Tile>(p.k, batch, kv_head));
}

// P is lifted by so many powers of two to fill float16 where it has a low term.
template <class Tile>
constexpr int kProbabilityLift = Tile::kTerms == 2 ? 14 : 0;

// Says whether float32 k and v need not be prepared, since each block has its own and splits them
// as they come.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <class Tile>
constexpr bool kSplitsKeys = Tile::kTerms == 2 && !Tile::kFeatures && Tile::kDim <= 128;
#else
template <class Tile>
constexpr bool kSplitsKeys = false;
#endif

// dS is divided by this to be stored in float16: a bound of it that is not too far away.
__device__ __forceinline__ float score_gradient_scale(const Backward& p, int64_t batch, int kv_head,
                                                      float largest_value) {
  const float product =
      p.dout.largest(batch, kv_head) * largest_value * static_cast<float>(p.v.columns);
  const float delta = __uint_as_float(p.delta_maxima[batch * p.problem.kv_heads + kv_head]);
  return power_of_two(scale_exponent(__float_as_uint(product + delta)));
}

template <class Tile>
__device__ __forceinline__ float score_gradient_scale(const Backward& p, int64_t batch,
                                                      int kv_head) {
  return !kScaledOperands<Tile> || p.delta_maxima == nullptr
             ? 1.f
             : score_gradient_scale(p, batch, kv_head, p.v.largest(batch, kv_head));
}

// `scale` is the one of dP.
template <class Tile>
__device__ __forceinline__ GradientFactors gradient_factors(float scale, float ds_scale) {
  const float lift = 1.f / static_cast<float>(1 << kProbabilityLift<Tile>);
  return {scale / ds_scale * lift, lift / ds_scale};
}
template <class Tile>
__device__ __forceinline__ GradientFactors gradient_factors(const Backward& p, int64_t batch,
                                                            int kv_head, float ds_scale) {
  return gradient_factors<Tile>(
      scale_of<Tile>(p.dout, batch, kv_head) * scale_of<Tile>(p.v, batch, kv_head), ds_scale);
}

}  // namespace fk::cuda::attention
