// This file computes matrix products of weights in blocks (cpu/gemm/blocks.h) with one token or
// several.
//
// The floor for one token is the weights' bytes at memory bandwidth; 16 rows by 32 columns of Q4_1
// are 320 bytes and about 30 instructions. For many tokens it is one integer dot product
// instruction per token and 64 codes.
//
// A lane is a row. A block's codes are unpacked to eight vectors of unsigned bytes, four columns a
// lane; each token's four columns are broadcast against them. Sums of products are exact integers
// within a block; float sums run over the blocks in order, the same for one token as for many.
// Where a vector holds fewer than 16 rows, 16 rows are several parts. With one token, all parts of
// a block are multiplied before the next block, so that memory is read in order; with many tokens,
// a whole group is multiplied part by part, since its bytes are in the first-level cache by then.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/gemm/multiply_blocks.cc"
#include "cpu/foreach_target.h"
#include "cpu/gemm/blocks.h"
#include "cpu/gemm/bytes.h"
#include "cpu/gemm/tiles.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {

// Codes are unsigned. A code stands for the weight (code - offset) * scale, plus a minimum if the
// type has one. This is the offset's logarithm to base 2, or 0 for types without an offset.
constexpr int log_offset(Packing p) {
  switch (p) {
    case Packing::kQ8_0:
    case Packing::kQ8_Float:
      return 7;
    case Packing::kQ4_0:
      return 3;
    case Packing::kQ5_0:
      return 4;
    case Packing::kQ6_K:
      return 5;
    default:
      return 0;
  }
}
constexpr int largest_code(Packing p) {
  return p == Packing::kQ8_0 || p == Packing::kQ8_Float                      ? 255
         : p == Packing::kQ6_K                                               ? 63
         : p == Packing::kQ5_0 || p == Packing::kQ5_1 || p == Packing::kQ5_K ? 31
                                                                             : 15;
}
constexpr bool has_minimum(Packing p) {
  return p == Packing::kQ4_1 || p == Packing::kQ5_1 || p == Packing::kQ4_K || p == Packing::kQ5_K;
}

// Weights are prefetched this many bytes ahead: far enough to cover the latency of memory, and near
// enough that they are still in the cache when they are read.
constexpr int64_t kAhead = 3072;

// This many tokens are multiplied at once, as the number of registers allows.
constexpr int kManyTokens = HWY_TARGET == HWY_AVX3 ? 8 : 4;

// Loads a vector of float16 parameters.
HWY_INLINE hn::Vec<F32> load_halves(const uint8_t* p) {
  return LoadF32(F32(), reinterpret_cast<const float16_t*>(p));
}

// Loads a vector of parameters of one byte each; T is int8_t or uint8_t.
template <class T>
HWY_INLINE hn::Vec<F32> load_small(const uint8_t* p) {
  const F32 d;
  const hn::Rebind<T, F32> d8;
  const hn::Rebind<int32_t, F32> di;
  return hn::ConvertTo(d, hn::PromoteTo(di, hn::LoadU(d8, reinterpret_cast<const T*>(p))));
}

// Unpacks the 32 columns of a block's codes into the eight vectors q[0] to q[7], a quad of columns
// each. `p` is where the block's high bits begin, or its nibbles or 8-bit codes where it has no
// high bits. Without VNNI, 8-bit codes come out signed, 128 less.
template <Packing kPacking, bool kVnni>
HWY_INLINE void unpack(const uint8_t* p, hn::Vec<Bytes>* q) {
  const Bytes d;
  const hn::Repartition<uint16_t, Bytes> d16;
  if constexpr (largest_code(kPacking) == 255) {
    detail::repeat<8>([&](auto j) FK_MATRIX_BODY {
      q[j] = hn::LoadU(d, p + 64 * j);
      if constexpr (!kVnni) q[j] = hn::Xor(q[j], hn::Set(d, 0x80));
    });
    return;
  }
  constexpr int64_t kHigh = largest_code(kPacking) == 63   ? 128
                            : largest_code(kPacking) == 31 ? 64
                                                           : 0;
  const auto low = hn::Set(d, 15);
  detail::repeat<4>([&](auto i) FK_MATRIX_BODY {
    const auto both = hn::LoadU(d, p + kHigh + 64 * i);
    q[i] = hn::And(both, low);
    q[i + 4] = hn::And(hn::BitCast(d, hn::ShiftRight<4>(hn::BitCast(d16, both))), low);
  });
  if constexpr (kHigh == 64) {
    const auto high = hn::BitCast(d16, hn::LoadU(d, p));
    const auto bit = hn::Set(d, 0x10);
    detail::repeat<8>([&](auto j) FK_MATRIX_BODY {
      auto h = high;
      if constexpr (j < 4) h = hn::ShiftLeft<4 - j>(high);
      if constexpr (j > 4) h = hn::ShiftRight<j - 4>(high);
      q[j] = hn::Or(q[j], hn::And(hn::BitCast(d, h), bit));
    });
  } else if constexpr (kHigh == 128) {
    const auto bits = hn::Set(d, 0x30);
    detail::repeat<8>([&](auto j) FK_MATRIX_BODY {
      const auto high = hn::BitCast(d16, hn::LoadU(d, p + j / 4 * 64));
      auto h = high;
      if constexpr (j % 4 < 2) h = hn::ShiftLeft<4 - j % 4 * 2>(high);
      if constexpr (j % 4 == 3) h = hn::ShiftRight<2>(high);
      q[j] = hn::Or(q[j], hn::And(hn::BitCast(d, h), bits));
    });
  }
}

// Returns what an integer sum starts from, so that it comes out as if the offset had been
// subtracted from each code: minus offset times the sum of the activations, which is *minus <<
// log_offset.
template <Packing kPacking, bool kVnni>
HWY_INLINE hn::Vec<I32> start_of(const int32_t* minus) {
  const I32 d;
  if constexpr (log_offset(kPacking) == 0 || (largest_code(kPacking) == 255 && !kVnni)) {
    return hn::Zero(d);
  } else {
    return hn::ShiftLeft<log_offset(kPacking)>(hn::Set(d, *minus));
  }
}

// Adds to `sum` the products of one group's rows with the tokens [token, token + kTokens), for a
// packing of integers. The rows are kParts vectors of the group, from its vector `part` on; the
// sums of a part's tokens lie together in `sum`. `w` is where the group begins.
template <Packing kPacking, bool kVnni, int kTokens, int kParts>
HWY_INLINE void multiply_integers(const uint8_t* w, int64_t part, const Activations& x,
                                  int64_t token, hn::Vec<F32>* sum) {
  const F32 d;
  using V = hn::Vec<F32>;
  constexpr bool kSuper = super_bytes(kPacking) > 0;
  constexpr bool kFloatScale = kPacking == Packing::kQ8_Float;
  constexpr int64_t kParameters = kSuper || (!has_minimum(kPacking) && !kFloatScale) ? 32 : 64;
  const int64_t lanes = hn::Lanes(d);
  const int64_t blocks = x.columns / 32;
  const int8_t* xq = x.q + token * x.columns;
  const float* scale = x.scale + token * blocks;
  const float* xsum = x.sum + token * blocks;
  const int32_t* minus32 = x.minus32 + token * blocks;
  const int32_t* minus16 = x.minus16 + token * blocks * 2;
  const uint8_t* super = w;
  for (int64_t b = 0; b < blocks; ++b) {
    if constexpr (kSuper) {
      if (b % 8 == 0) {
        super = w;
        w += super_bytes(kPacking);
      }
    }
    if (kTokens == 1 && part == 0) {
      for (int64_t i = 0; i < block_bytes(kPacking); i += 64) hwy::Prefetch(w + kAhead + i);
    }
    detail::repeat<kParts>([&](auto p) FK_MATRIX_BODY {
      const int64_t rows = (part + p) * lanes;
      V* sums = sum + p * kTokens;
      hn::Vec<Bytes> q[8];
      unpack<kPacking, kVnni>(w + kParameters + 4 * rows, q);
      V factor, factor1 = hn::Zero(d), minimum = hn::Zero(d);
      if constexpr (kPacking == Packing::kQ6_K) {
        const V super_d = load_halves(super + 2 * rows);
        factor = hn::Mul(super_d, load_small<int8_t>(w + rows));
        factor1 = hn::Mul(super_d, load_small<int8_t>(w + 16 + rows));
      } else if constexpr (kSuper) {
        const V super_m = load_halves(super + 32 + 2 * rows);
        factor = hn::Mul(load_halves(super + 2 * rows), load_small<uint8_t>(w + rows));
        minimum = hn::Neg(hn::Mul(super_m, load_small<uint8_t>(w + 16 + rows)));
      } else if constexpr (kFloatScale) {
        factor = hn::LoadU(d, reinterpret_cast<const float*>(w) + rows);
      } else {
        factor = load_halves(w + 2 * rows);
        if constexpr (has_minimum(kPacking)) minimum = load_halves(w + 32 + 2 * rows);
      }
      constexpr int kLargest = largest_code(kPacking);
      detail::repeat<kTokens>([&](auto t) FK_MATRIX_BODY {
        const int8_t* quads = xq + t * x.columns + b * 32;
        const V xscale = hn::Set(d, scale[t * blocks + b]);
        if constexpr (kPacking == Packing::kQ6_K) {
          const int32_t* minus = minus16 + (t * blocks + b) * 2;
          const auto first = dot<kVnni, kLargest, 4>(start_of<kPacking, kVnni>(minus), q, quads);
          const auto second =
              dot<kVnni, kLargest, 4>(start_of<kPacking, kVnni>(minus + 1), q + 4, quads + 16);
          const V both = hn::MulAdd(hn::ConvertTo(d, first), factor,
                                    hn::Mul(hn::ConvertTo(d, second), factor1));
          sums[t] = hn::MulAdd(both, xscale, sums[t]);
        } else {
          const auto start = start_of<kPacking, kVnni>(minus32 + t * blocks + b);
          const auto product = dot<kVnni, kLargest, 8>(start, q, quads);
          sums[t] = hn::MulAdd(hn::Mul(hn::ConvertTo(d, product), xscale), factor, sums[t]);
          if constexpr (has_minimum(kPacking)) {
            sums[t] = hn::MulAdd(minimum, hn::Set(d, xsum[t * blocks + b]), sums[t]);
          }
        }
      });
    });
    w += block_bytes(kPacking);
  }
}

// Does the same for a packing of floats, whose elements are of type T.
template <class T, int kTokens, int kParts>
HWY_INLINE void multiply_floats(const uint8_t* w, int64_t part, const Activations& x, int64_t token,
                                hn::Vec<F32>* sum) {
  const F32 d;
  using V = hn::Vec<F32>;
  const int64_t lanes = hn::Lanes(d);
  const T* column = reinterpret_cast<const T*>(w) + part * lanes;
  const float* values = x.x + token * x.columns;
  V odd[kParts * kTokens];  // odd columns have sums of their own: half as long a chain of additions
  detail::repeat<kParts * kTokens>([&](auto i) FK_MATRIX_BODY { odd[i] = hn::Zero(d); });
  int64_t k = 0;
  for (; k + 2 <= x.columns; k += 2, column += 2 * kGroupRows) {
    if (kTokens == 1 && part == 0) {
      hwy::Prefetch(reinterpret_cast<const uint8_t*>(column) + kAhead);
      if (sizeof(T) == 4) hwy::Prefetch(reinterpret_cast<const uint8_t*>(column) + kAhead + 64);
    }
    detail::repeat<kParts>([&](auto p) FK_MATRIX_BODY {
      const V w0 = LoadF32(d, column + p * lanes);
      const V w1 = LoadF32(d, column + kGroupRows + p * lanes);
      detail::repeat<kTokens>([&](auto t) FK_MATRIX_BODY {
        constexpr int i = p * kTokens + t;
        sum[i] = hn::MulAdd(w0, hn::Set(d, values[t * x.columns + k]), sum[i]);
        odd[i] = hn::MulAdd(w1, hn::Set(d, values[t * x.columns + k + 1]), odd[i]);
      });
    });
  }
  if (k < x.columns) {
    detail::repeat<kParts>([&](auto p) FK_MATRIX_BODY {
      const V w0 = LoadF32(d, column + p * lanes);
      detail::repeat<kTokens>([&](auto t) FK_MATRIX_BODY {
        constexpr int i = p * kTokens + t;
        sum[i] = hn::MulAdd(w0, hn::Set(d, values[t * x.columns + k]), sum[i]);
      });
    });
  }
  detail::repeat<kParts * kTokens>([&](auto i)
                                       FK_MATRIX_BODY { sum[i] = hn::Add(sum[i], odd[i]); });
}

// Multiplies one group with kTokens tokens and stores the results.
template <Packing kPacking, bool kVnni, int kTokens>
HWY_NOINLINE void multiply_group(const PackedMatrix& w, int64_t group, const Activations& x,
                                 int64_t token, float* out, int64_t stride) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  constexpr int kAll = static_cast<int>(kGroupRows / hn::MaxLanes(F32()));
  constexpr int kParts = kTokens == 1 ? kAll : 1;
  const uint8_t* data = w.group(group);
  for (int64_t part = 0; part < kAll; part += kParts) {
    const int64_t row = group * kGroupRows + part * lanes;
    hn::Vec<F32> sum[kParts * kTokens];
    detail::repeat<kParts * kTokens>([&](auto i) FK_MATRIX_BODY {
      sum[i] = w.bias == nullptr ? hn::Zero(d) : hn::LoadU(d, w.bias + row + i / kTokens * lanes);
    });
    if constexpr (kPacking == Packing::kF32) {
      multiply_floats<float, kTokens, kParts>(data, part, x, token, sum);
    } else if constexpr (kPacking == Packing::kF16) {
      multiply_floats<float16_t, kTokens, kParts>(data, part, x, token, sum);
    } else if constexpr (kPacking == Packing::kBF16) {
      multiply_floats<bfloat16_t, kTokens, kParts>(data, part, x, token, sum);
    } else {
      multiply_integers<kPacking, kVnni, kTokens, kParts>(data, part, x, token, sum);
    }
    detail::repeat<kParts * kTokens>([&](auto i) FK_MATRIX_BODY {
      const int64_t at = row + i / kTokens * lanes;
      hn::StoreU(sum[i], d, out + (token + i % kTokens) * stride + at);
    });
  }
}

template <Packing kPacking, bool kVnni>
void multiply_packing(const PackedMatrix& w, int64_t begin, int64_t end, const Activations& x,
                      int64_t tokens, float* out, int64_t stride) {
  for (int64_t g = begin; g < end; ++g) {
    int64_t t = 0;
    for (; t + kManyTokens <= tokens; t += kManyTokens) {
      multiply_group<kPacking, kVnni, kManyTokens>(w, g, x, t, out, stride);
    }
    for (; t + 2 <= tokens; t += 2) {
      multiply_group<kPacking, kVnni, 2>(w, g, x, t, out, stride);
    }
    if (t < tokens) multiply_group<kPacking, kVnni, 1>(w, g, x, t, out, stride);
  }
}

template <bool kVnni>
void multiply_any(const PackedMatrix& w, int64_t begin, int64_t end, const Activations& x,
                  int64_t tokens, float* out, int64_t stride) {
  switch (w.packing) {
#define FK_CPU_PACKING(name)                 \
  case Packing::name:                        \
    return multiply_packing < Packing::name, \
           kVnni && !is_float(Packing::name) > (w, begin, end, x, tokens, out, stride);
    FK_CPU_PACKING(kF32)
    FK_CPU_PACKING(kF16)
    FK_CPU_PACKING(kBF16)
    FK_CPU_PACKING(kQ8_0)
    FK_CPU_PACKING(kQ4_0)
    FK_CPU_PACKING(kQ4_1)
    FK_CPU_PACKING(kQ5_0)
    FK_CPU_PACKING(kQ5_1)
    FK_CPU_PACKING(kQ4_K)
    FK_CPU_PACKING(kQ5_K)
    FK_CPU_PACKING(kQ6_K)
    FK_CPU_PACKING(kQ8_Float)
#undef FK_CPU_PACKING
  }
}

void multiply_rows16(const PackedMatrix& w, int64_t begin, int64_t end, const Activations& x,
                     int64_t tokens, float* out, int64_t stride) {
  if constexpr (kCanHaveVnni) {
    if (has_vnni()) return multiply_any<true>(w, begin, end, x, tokens, out, stride);
  }
  multiply_any<false>(w, begin, end, x, tokens, out, stride);
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace fk::cpu {

FK_CPU_EXPORT(multiply_rows16);

void multiply(const PackedMatrix& w, int64_t begin, int64_t end, const Activations& x,
              int64_t tokens, float* out, int64_t stride) {
  FK_CPU_DISPATCH(multiply_rows16)(w, begin, end, x, tokens, out, stride);
}

}  // namespace fk::cpu

#endif  // HWY_ONCE
