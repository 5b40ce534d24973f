// This file computes gated_ssm on the CPU, forward and backward.
//
// Floor: memory; the forward reads x and dt and writes y, the backward reads dy and x and writes dx
// and ddt. One factor per token is all the arithmetic.
//
// Threads take tokens. A token's row is read a vector at a time, in whichever order it lies.

#include "ops/gated_ssm/gated_ssm.h"

#ifndef FK_OPS_GATED_SSM_CPU_ONCE_
#define FK_OPS_GATED_SSM_CPU_ONCE_

#include <algorithm>
#include <cmath>

#include "cpu/tile_rows.h"
#include "ops/gated_ssm/weights.h"

namespace fk::gated_ssm {
namespace {

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

float& token(const Tensor& t, int64_t b, int64_t l) {
  return t.ptr<float>()[b * t.stride(0) + l * t.stride(1)];
}

}  // namespace
}  // namespace fk::gated_ssm

#endif  // FK_OPS_GATED_SSM_CPU_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gated_ssm/cpu.cc"
#include "cpu/foreach_target.h"
#include "cpu/simd.h"
#include "cpu/simd_tiles.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using Vec = hn::Vec<F32>;

// Describes one token's row of a tensor (B, L, n).
struct Row {
  TileRows rows;
  int64_t size;

  Row(const Tensor& t, int64_t b, int64_t l)
      : rows(TileRows{t.data, t.dtype, 0, t.stride(2)}.at(b * t.stride(0) + l * t.stride(1))),
        size(t.size(2)) {}

  // Loads the entries from i on, with 0 beyond the end.
  HWY_INLINE Vec load(int64_t i) const {
    alignas(64) float out[kMaxLanes];
    load_tile(rows.at(i * rows.channel), 1, count(i), out);
    return hn::Load(F32(), out);
  }
  HWY_INLINE void store(int64_t i, Vec v) const {
    alignas(64) float in[kMaxLanes];
    hn::Store(v, F32(), in);
    store_tile(in, 1, count(i), rows.at(i * rows.channel));
  }

 private:
  int64_t count(int64_t i) const { return std::min<int64_t>(hn::Lanes(F32()), size - i); }
};

HWY_INLINE float sum_of(const Row& a) {
  const F32 d;
  Vec sum = hn::Zero(d);
  for (int64_t i = 0; i < a.size; i += hn::Lanes(d)) sum = hn::Add(sum, a.load(i));
  return ReduceSum(d, sum);
}

HWY_INLINE float product_of(const Row& a, const Row& b) {
  const F32 d;
  Vec sum = hn::Zero(d);
  for (int64_t i = 0; i < a.size; i += hn::Lanes(d)) sum = hn::MulAdd(a.load(i), b.load(i), sum);
  return ReduceSum(d, sum);
}

HWY_INLINE void scale(const Row& in, float factor, const Row& out) {
  const F32 d;
  for (int64_t i = 0; i < in.size; i += hn::Lanes(d)) {
    out.store(i, hn::Mul(in.load(i), hn::Set(d, factor)));
  }
}

// Computes the tokens [begin, end).
void forward(const GatedSsmFwd& a, int64_t begin, int64_t end) {
  const int64_t length = a.x.size(1);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t b = i / length, l = i % length;
    const float mean =
        sum_of(Row(a.dt, b, l)) / static_cast<float>(std::max<int64_t>(1, a.x.size(2)));
    const float g = gated_ssm::sigmoid(mean);
    const float s = gated_ssm::sigmoid(product_of(Row(a.B, b, l), Row(a.C, b, l)));
    const float w = static_cast<float>(gated_ssm::step_weight(l, length));
    if (a.y) scale(Row(a.x, b, l), g * s * (1 + (1 - g) * w), Row(a.y, b, l));
    if (a.g) gated_ssm::token(a.g, b, l) = g;
    if (a.s) gated_ssm::token(a.s, b, l) = s;
  }
}

void backward(const GatedSsmBwd& a, int64_t begin, int64_t end) {
  const F32 d;
  const int64_t length = a.x.size(1), channels = a.x.size(2);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t b = i / length, l = i % length;
    const float g = gated_ssm::token(a.g, b, l), s = gated_ssm::token(a.s, b, l);
    const float w = static_cast<float>(gated_ssm::step_weight(l, length));
    const Row dy(a.dy, b, l);
    const float dk = product_of(dy, Row(a.x, b, l));
    const float dmean = dk * s * (1 + (1 - 2 * g) * w) * g * (1 - g);
    const float dsum = dk * g * (1 + (1 - g) * w) * s * (1 - s);
    if (a.dx) scale(dy, g * s * (1 + (1 - g) * w), Row(a.dx, b, l));
    if (a.ddt) {
      const Row ddt(a.ddt, b, l);
      const Vec each = hn::Set(d, dmean / static_cast<float>(channels));
      for (int64_t c = 0; c < channels; c += hn::Lanes(d)) ddt.store(c, each);
    }
    if (a.dB) scale(Row(a.C, b, l), dsum, Row(a.dB, b, l));
    if (a.dC) scale(Row(a.B, b, l), dsum, Row(a.dC, b, l));
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {
namespace {

FK_CPU_EXPORT(forward);
FK_CPU_EXPORT(backward);

// Returns how many tokens are worth waking a thread for.
int64_t grain(const Tensor& x) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, x.size(2)));
}

}  // namespace

Status run(const GatedSsmFwd& a, const Exec& exec) {
  const auto kernel = FK_CPU_DISPATCH(forward);
  exec.parallel_for(a.x.size(0) * a.x.size(1), grain(a.x),
                    [&](int64_t b, int64_t e) { kernel(a, b, e); });
  return {};
}

Status run(const GatedSsmBwd& a, const Exec& exec) {
  const auto kernel = FK_CPU_DISPATCH(backward);
  exec.parallel_for(a.x.size(0) * a.x.size(1), grain(a.x),
                    [&](int64_t b, int64_t e) { kernel(a, b, e); });
  return {};
}

}  // namespace fk::cpu
#endif  // HWY_ONCE
