// This file does the CPU engine's work on one row at a time: norms, activation functions, and the
// rounding of a product's inputs to int8. The floor is the latency of a few passes over a row,
// which lies in the first-level cache.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/rows.cc"
#include <cmath>
#include <limits>

#include "cpu/foreach_target.h"
#include "cpu/simd.h"
#include "cpu/simd_activations.h"
#include "engine/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {

using engine::Activations;

// Calls body(i) for the index of each whole vector among n values and returns where the rest
// begins.
template <class Body>
HWY_INLINE int64_t whole_vectors(int64_t n, const Body& body) {
  const int64_t lanes = hn::Lanes(F32());
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) body(i);
  return i;
}

// Rounds blocks of 32 values to int8. A value that is not finite (which a model with broken weights
// makes) has no int8: its block's scale becomes NaN, and so do all products with it. For blocks
// whose largest value is below kSmallest the factor would not be finite: their codes are 0.
void quantize_blocks(const Activations& a, int64_t token, int64_t begin, int64_t end) {
  const F32 d;
  const hn::Rebind<int32_t, F32> di;
  const hn::Rebind<int8_t, F32> d8;
  const int64_t lanes = hn::Lanes(d);
  constexpr float kSmallest = 1e-36f;
  const auto bound = hn::Set(d, 127.5f);
  for (int64_t b = begin; b < end; ++b) {
    const int64_t block = token * (a.columns / 32) + b;
    const float* x = a.x + token * a.columns + b * 32;
    int8_t* q = a.q + token * a.columns + b * 32;
    auto largest = hn::Zero(d);
    for (int64_t i = 0; i < 32; i += lanes) {
      largest = hn::Max(largest, hn::Abs(hn::LoadU(d, x + i)));
    }
    const float top = ReduceMax(d, largest);
    float scale = top / 127.0f;
    const auto factor = hn::Set(d, top > kSmallest ? 127.0f / top : 0.0f);
    auto outside = hn::Lt(largest, hn::Zero(d));  // no lane, so far
    int32_t sums[2];
    for (int half = 0; half < 2; ++half) {
      auto sum = hn::Zero(di);
      for (int64_t i = half * 16; i < half * 16 + 16; i += lanes) {
        const auto scaled = hn::Mul(hn::LoadU(d, x + i), factor);
        const auto fits = hn::Le(hn::Abs(scaled), bound);
        outside = hn::Or(outside, hn::Not(fits));
        const auto rounded = hn::NearestInt(hn::IfThenElseZero(fits, scaled));
        sum = hn::Add(sum, rounded);
        hn::StoreU(hn::DemoteTo(d8, rounded), d8, q + i);
      }
      sums[half] = hn::GetLane(hn::SumOfLanes(di, sum));
      a.minus16[2 * block + half] = -sums[half];
    }
    if (!hn::AllFalse(d, outside)) scale = std::numeric_limits<float>::quiet_NaN();
    a.scale[block] = scale;
    a.minus32[block] = -(sums[0] + sums[1]);
    a.sum[block] = scale * static_cast<float>(sums[0] + sums[1]);
  }
}

// Does what `add_and_norm` in engine/kernels.h says, for one row.
void add_norm_row(float* x, const float* add, const float* weight, const float* bias, float eps,
                  bool rms, int64_t n, float* out) {
  const F32 d;
  auto sum_v = hn::Zero(d), squares_v = hn::Zero(d);
  float sum = 0, squares = 0;
  int64_t i = whole_vectors(n, [&](int64_t j) HWY_ATTR {
    auto v = hn::LoadU(d, x + j);
    if (add != nullptr) {
      v = hn::Add(v, hn::LoadU(d, add + j));
      hn::StoreU(v, d, x + j);
    }
    sum_v = hn::Add(sum_v, v);
    squares_v = hn::MulAdd(v, v, squares_v);
  });
  for (; i < n; ++i) {
    if (add != nullptr) x[i] += add[i];
    sum += x[i];
    squares += x[i] * x[i];
  }
  float mean = 0;
  if (!rms) {
    mean = (sum + ReduceSum(d, sum_v)) / static_cast<float>(n);
    // The squares are taken around the mean: a difference of two large sums would lose digits.
    squares_v = hn::Zero(d);
    squares = 0;
    i = whole_vectors(n, [&](int64_t j) HWY_ATTR {
      const auto v = hn::Sub(hn::LoadU(d, x + j), hn::Set(d, mean));
      squares_v = hn::MulAdd(v, v, squares_v);
    });
    for (; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  }
  const float variance = (squares + ReduceSum(d, squares_v)) / static_cast<float>(n);
  const float factor = 1.0f / std::sqrt(variance + eps);
  i = whole_vectors(n, [&](int64_t j) HWY_ATTR {
    auto v = hn::Mul(hn::Sub(hn::LoadU(d, x + j), hn::Set(d, mean)), hn::Set(d, factor));
    v = hn::Mul(v, hn::LoadU(d, weight + j));
    if (bias != nullptr) v = hn::Add(v, hn::LoadU(d, bias + j));
    hn::StoreU(v, d, out + j);
  });
  for (; i < n; ++i) {
    out[i] = (x[i] - mean) * factor * weight[i] + (bias != nullptr ? bias[i] : 0.0f);
  }
}

// Does what `activate` in engine/kernels.h says, for one row.
void activate_row(const float* gate, const float* up, bool silu, int64_t n, float* out) {
  const F32 d;
  const auto f = [&](auto x) HWY_ATTR {
    return silu ? Activate<Activation::kSilu>(d, x) : Activate<Activation::kGeluTanh>(d, x);
  };
  int64_t i = whole_vectors(n, [&](int64_t j) HWY_ATTR {
    auto v = f(hn::LoadU(d, gate + j));
    if (up != nullptr) v = hn::Mul(v, hn::LoadU(d, up + j));
    hn::StoreU(v, d, out + j);
  });
  if (i < n) {
    const size_t rest = static_cast<size_t>(n - i);
    auto v = f(LoadNF32(d, gate + i, rest));
    if (up != nullptr) v = hn::Mul(v, LoadNF32(d, up + i, rest));
    StoreNF32(d, v, out + i, rest);
  }
}

// Adds up the products of all values with 0: each is 0 where a value is finite, and NaN where not.
bool all_finite_row(const float* x, int64_t n) {
  const F32 d;
  const auto zero = hn::Zero(d);
  auto a = zero, b = zero;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    a = hn::MulAdd(hn::LoadU(d, x + i), zero, a);
    b = hn::MulAdd(hn::LoadU(d, x + i + lanes), zero, b);
  }
  float rest = 0;
  for (; i < n; ++i) rest += x[i] * 0.0f;
  return ReduceSum(d, hn::Add(a, b)) + rest == 0;
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {
FK_CPU_EXPORT(quantize_blocks);
FK_CPU_EXPORT(add_norm_row);
FK_CPU_EXPORT(activate_row);
FK_CPU_EXPORT(all_finite_row);
static auto quantize_now() { return FK_CPU_DISPATCH(quantize_blocks); }
static auto add_norm_now() { return FK_CPU_DISPATCH(add_norm_row); }
static auto activate_now() { return FK_CPU_DISPATCH(activate_row); }
static auto all_finite_now() { return FK_CPU_DISPATCH(all_finite_row); }
}  // namespace fk::cpu

namespace fk::engine {

void quantize(const Activations& a, int64_t token, int64_t begin, int64_t end) {
  cpu::quantize_now()(a, token, begin, end);
}

void add_and_norm(float* x, const float* add, const float* weight, const float* bias, float eps,
                  bool rms, int64_t n, float* out) {
  cpu::add_norm_now()(x, add, weight, bias, eps, rms, n, out);
}

void activate(const float* gate, const float* up, bool silu, int64_t n, float* out) {
  cpu::activate_now()(gate, up, silu, n, out);
}

bool all_finite(const float* x, int64_t n) { return cpu::all_finite_now()(x, n); }

}  // namespace fk::engine
#endif
