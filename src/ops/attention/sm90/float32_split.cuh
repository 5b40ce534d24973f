// This file says how the float32 forward on Hopper (sm90/float32.cuh) cuts its work, and holds the
// warps that bring float32 into shared memory as two terms.
#pragma once

#include "cuda/tma.cuh"
#include "ops/attention/cuda/forward.cuh"
#include "ops/attention/sm90/float32_parts.cuh"

namespace fk::cuda::attention {

template <int kDim_>
struct FloatTile {
  static constexpr int kDim = kDim_, kRows = 128, kKeys = 128, kTerms = 2;
  static constexpr int kThreads = 256;    // that multiply
  static constexpr int kSplitters = 256;  // that split
  static constexpr int kBlockThreads = kThreads + kSplitters;
  static constexpr int kAhead = 8;                            // rows that a warp's copies are ahead
  static constexpr int kQueryBytes = 64 * kDim * 2 * kTerms;  // of a warpgroup
  static constexpr int kKeyBytes = kKeys * kDim * 2 * kTerms;
  static constexpr int kKOffset = 2 * kQueryBytes, kVOffset = kKOffset + kKeyBytes;
  static constexpr int kAheadOffset = kVOffset + kKeyBytes;
  static constexpr int kTileBytes = kAheadOffset + kAhead * kSplitters * 16;
};

struct FloatBarriers {
  uint64_t k_full, k_empty, v_full, v_empty;
  float k_scale, v_scale;
  int keys_begin;
  uint32_t largest[3][2][8];  // by who splits, in turns, and warp
};

// The launch is described by this.
template <class Tile>
struct FloatBlock {
  static constexpr int kThreads = Tile::kBlockThreads;
  static constexpr int kSharedBytes =
      Tile::kTileBytes + sizeof(FloatBarriers) + sizeof(ForwardBlock);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// Brings tiles of float32 into two terms, as wgmma takes them: columns of 64 elements one after
// another, first of the high terms. A warp has 16 rows, and takes kAtOnce of them in one access, a
// lane four elements.
template <int kDim, int kWarps>
struct TileSplitter {
  static constexpr int kWarpRows = 16, kAtOnce = 128 / kDim, kAccesses = kWarpRows / kAtOnce;
  static constexpr int kColumnBytes = kWarps * kWarpRows * 128;
  static constexpr int kTermBytes = kDim / 64 * kColumnBytes;

  const int barrier;  // a named one for these warps alone
  uint32_t* const slots;
  const int warp;
  int turn = 0;

  // A lane reads these rows, from the warp's first row on.
  struct Source {
    const float* from;
    int64_t stride;
    int valid;  // rows

    __device__ __forceinline__ Source(const Operand& x, const void* rows, int row, int valid_) {
      const int lane = thread_index() % 32, column = lane % (kDim / 4) * 4;
      row += lane / (kDim / 4);
      from = static_cast<const float*>(rows) + row * x.row + column;
      stride = kAtOnce * x.row;
      valid = column < x.columns ? valid_ - row : 0;
    }
    // Copies the next rows to shared memory.
    __device__ __forceinline__ void copy_next(uint32_t to) {
      copy_16_bytes(to, from, valid > 0);
      from += stride;
      valid -= kAtOnce;
    }
    // Returns the lane's part of the next rows.
    __device__ __forceinline__ float4 next() {
      float4 x = {0.f, 0.f, 0.f, 0.f};
      if (valid > 0) {
        asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                     : "l"(from));
      }
      from += stride;
      valid -= kAtOnce;
      return x;
    }
  };

  // Returns the lane's place in the warp's first rows.
  __device__ __forceinline__ uint32_t place(uint32_t tile) const {
    const int lane = thread_index() % 32, piece = lane % (kDim / 4), row = lane / (kDim / 4);
    return tile + piece / 16 * kColumnBytes + (warp * kWarpRows + row) * 128 +
           ((piece % 16 * 8) ^ (row << 4));
  }

  static __device__ __forceinline__ void store(uint32_t at, const __half2 (&pair)[2]) {
    uint32_t words[2];
    memcpy(words, pair, sizeof(words));
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(words[0]), "r"(words[1])
                 : "memory");
  }

  // A number that is not finite gets no low term if kGuarded, and else is found in `largest`.
  template <bool kGuarded>
  static __device__ __forceinline__ void split(const float4& x, uint32_t place, int access,
                                               float factor, __half2& largest) {
    const float v[4] = {x.x, x.y, x.z, x.w};
    __half2 high[2], low[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      high[e] = __floats2half2_rn(v[2 * e] * factor, v[2 * e + 1] * factor);
      const float2 h = __half22float2(high[e]);
      float a = fmaf(v[2 * e], factor, -h.x), b = fmaf(v[2 * e + 1], factor, -h.y);
      if constexpr (kGuarded) {
        a = isfinite(h.x) ? a : 0.f;
        b = isfinite(h.y) ? b : 0.f;
      } else {
        largest = __hmax2(largest, __habs2(high[e]));
      }
      low[e] = __floats2half2_rn(a, b);
    }
    const int row = access * kAtOnce;
    const uint32_t at = (place ^ (row % 8 << 4)) + row * 128;
    store(at, high);
    store(at + kTermBytes, low);
  }

  // Returns the largest of all warps. After this all of them have written their rows.
  __device__ __forceinline__ uint32_t all(uint32_t x) {
    const int lane = thread_index() % 32;
    x = __reduce_max_sync(0xffffffffu, x);
    turn ^= 8;
    if (lane == 0) slots[turn + warp] = x;
    fence_async_shared();
    named_barrier_sync(barrier, kWarps * 32);
    return __reduce_max_sync(0xffffffffu, slots[turn + lane % kWarps]);
  }

  // Returns whether the scale fits what is split, with the largest magnitude that this thread has
  // found: from 4 to 2^15 the two terms are exact enough.
  __device__ __forceinline__ bool fits(__half2 largest) {
    const uint32_t bits =
        all(max(__half_as_ushort(__low2half(largest)), __half_as_ushort(__high2half(largest))));
    return bits == 0 || (bits >= 0x4400 && bits < 0x7800);
  }

  // Splits all rows with a scale that fits, whose exponent is returned.
  __device__ __forceinline__ int split_again(uint32_t place, const Source& source) {
    float magnitude = 0.f;
    Source at = source;
#pragma unroll 1
    for (int i = 0; i < kAccesses; i += 2) {
      const float4 x = at.next(), y = at.next();
      const float eight[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
      magnitude = larger_finite(magnitude, eight);
    }
    const int exponent = scale_exponent(all(__float_as_uint(magnitude)));
    at = source;
    __half2 none;
#pragma unroll 1
    for (int i = 0; i < kAccesses; ++i) {
      split<true>(at.next(), place, i, power_of_two(254 - exponent), none);
    }
    all(0);
    return exponent;
  }
};

// Splits keys and values, in turns.
template <class Tile>
__device__ __forceinline__ void split_keys(const Forward& p, const ForwardBlock& block,
                                           int keys_begin, uint32_t tiles, FloatBarriers* barriers,
                                           int thread) {
  using Splitter = TileSplitter<Tile::kDim, Tile::kSplitters / 32>;
  constexpr int kAhead = Tile::kAhead, kAccesses = Splitter::kAccesses,
                kRowBytes = Tile::kSplitters * 16;
  Splitter splitter{3, barriers->largest[2][0], thread / 32};
  const int count = max(0, ceil_div(block.keys_end - keys_begin, Tile::kKeys)) * 2;
  if (count == 0) return;
  int k_exponent = kUsualExponent, v_exponent = kUsualExponent;
  const auto source = [&](int n) -> typename Splitter::Source {
    return {n & 1 ? p.v : p.k, n & 1 ? block.v_rows : block.k_rows,
            keys_begin + n / 2 * Tile::kKeys + splitter.warp * Splitter::kWarpRows,
            block.window.keys};
  };
  // Rows come through places that only this thread uses, two at a time.
  const uint32_t ahead = tiles + Tile::kAheadOffset + thread * 16;
  typename Splitter::Source at = source(0);
  const auto copy = [&](int r) {
    at.copy_next(ahead + r * kRowBytes);
    at.copy_next(ahead + (r + 1) * kRowBytes);
    copies_commit();
  };
#pragma unroll
  for (int r = 0; r < kAhead; r += 2) copy(r);
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    const bool values = n & 1;
    const uint32_t place = splitter.place(tiles + (values ? Tile::kVOffset : Tile::kKOffset));
    int exponent = values ? v_exponent : k_exponent;
    __half2 largest = __float2half2_rn(0.f);
    barrier_wait(values ? &barriers->v_empty : &barriers->k_empty, (n / 2 & 1) ^ 1);
#pragma unroll 1
    for (int r0 = 0; r0 < kAccesses; r0 += kAhead) {
      if (r0 == kAccesses - kAhead) at = source(n + 1 < count ? n + 1 : n);
#pragma unroll
      for (int r = 0; r < kAhead; r += 2) {
        copies_wait<kAhead / 2 - 1>();
#pragma unroll
        for (int i = r; i < r + 2; ++i) {
          const uint4 x = load_shared(ahead + i * kRowBytes);
          splitter.template split<false>({__uint_as_float(x.x), __uint_as_float(x.y),
                                          __uint_as_float(x.z), __uint_as_float(x.w)},
                                         place + r0 * Splitter::kAtOnce * 128, i,
                                         power_of_two(254 - exponent), largest);
        }
        copy(r);
      }
    }
    if (!splitter.fits(largest)) {
      exponent = splitter.split_again(place, source(n));
      (values ? v_exponent : k_exponent) = exponent;
    }
    if (thread == 0) {
      (values ? barriers->v_scale : barriers->k_scale) = power_of_two(exponent);
      barrier_arrive(values ? &barriers->v_full : &barriers->k_full);
    }
  }
  copies_wait<0>();
}

// Splits 64 queries of a warpgroup, and returns their scale.
template <class Tile>
__device__ __forceinline__ float split_queries(const Forward& p, const ForwardBlock& block,
                                               uint32_t tile, FloatBarriers* barriers,
                                               int warpgroup) {
  using Splitter = TileSplitter<Tile::kDim, 4>;
  constexpr int kWarpRows = Splitter::kWarpRows, kAccesses = Splitter::kAccesses;
  Splitter splitter{1 + warpgroup, barriers->largest[warpgroup][0],
                    static_cast<int>(threadIdx.x) / 32 % 4};
  const BlockRows& tile_place = block.place;
  const int row = tile_place.begin + warpgroup * 64 + splitter.warp * kWarpRows;
  const typename Splitter::Source source(
      p.q,
      reinterpret_cast<const float*>(p.q.data) +
          p.q.offset(tile_place.batch, block.sequence.q_begin, tile_place.head),
      row, static_cast<int>(block.sequence.q_len));
  const uint32_t place = splitter.place(tile);
  __half2 largest = __float2half2_rn(0.f);
  float4 x[kAccesses];
  typename Splitter::Source at = source;
#pragma unroll
  for (int i = 0; i < kAccesses; ++i) x[i] = at.next();
#pragma unroll
  for (int i = 0; i < kAccesses; ++i) {
    splitter.template split<false>(x[i], place, i, power_of_two(254 - kUsualExponent), largest);
  }
  return power_of_two(splitter.fits(largest) ? kUsualExponent
                                             : splitter.split_again(place, source));
}

#endif

}  // namespace fk::cuda::attention
