// This file holds the vector code that causal_conv1d, its backward and its update share: some steps
// of one vector of channels, in float, with the W-1 inputs before them.

// Highway includes this file once for each target.
#if defined(FK_OPS_CAUSAL_CONV1D_CPU_SIMD_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_OPS_CAUSAL_CONV1D_CPU_SIMD_PER_TARGET
#undef FK_OPS_CAUSAL_CONV1D_CPU_SIMD_PER_TARGET
#else
#define FK_OPS_CAUSAL_CONV1D_CPU_SIMD_PER_TARGET
#endif

#include "cpu/simd.h"
#include "cpu/simd_activations.h"
#include "cpu/simd_tiles.h"
#include "ops/causal_conv1d/cpu/plan.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using conv::kHistory;
using conv::kSteps;
using Vec = hn::Vec<F32>;

// Holds the taps and the bias of a vector of channels.
struct Taps {
  alignas(64) float weight[kMaxConvWidth * kMaxLanes];
  alignas(64) float bias[kMaxLanes] = {};

  Taps(const Tensor& w, const Tensor& b, int64_t channel, int64_t channels) {
    const TileRows rows{w.data, w.dtype, w.stride(1), w.stride(0)};
    load_tile(rows.at(channel * w.stride(0)), w.size(1), channels, weight);
    if (!b) return;
    const TileRows values{b.data, b.dtype, 0, b.stride(0)};
    load_tile(values.at(channel * b.stride(0)), 1, channels, bias);
  }
};

// Calls body with the width as a compile-time constant, so that loops over taps unroll.
template <class Body>
HWY_INLINE void for_width(int64_t width, const Body& body) {
  switch (width) {
    case 2:
      return body(std::integral_constant<int, 2>());
    case 3:
      return body(std::integral_constant<int, 3>());
    case 4:
      return body(std::integral_constant<int, 4>());
    case 5:
      return body(std::integral_constant<int, 5>());
    case 6:
      return body(std::integral_constant<int, 6>());
    case 7:
      return body(std::integral_constant<int, 7>());
    default:
      return body(std::integral_constant<int, 8>());
  }
}

// Computes out[t] = bias + sum over k of weight[k] x[t + k], for `count` steps. x begins with the
// history.
template <int kWidth>
HWY_INLINE void convolve_width(const Taps& taps, const float* x, int64_t count, float* out) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  Vec weight[kWidth];
  for (int k = 0; k < kWidth; ++k) weight[k] = hn::Load(d, taps.weight + k * lanes);
  const Vec bias = hn::Load(d, taps.bias);
  for (int64_t t = 0; t < count; ++t) {
    Vec sum = bias;
    for (int k = 0; k < kWidth; ++k) {
      sum = hn::MulAdd(weight[k], hn::Load(d, x + (t + k) * lanes), sum);
    }
    hn::Store(sum, d, out + t * lanes);
  }
}

HWY_INLINE void convolve(int64_t width, const Taps& taps, const float* x, int64_t count,
                         float* out) {
  for_width(width, [&](auto w) HWY_ATTR { convolve_width<w>(taps, x, count, out); });
}

HWY_INLINE void activate(int64_t activation, int64_t count, float* y) {
  if (activation != kSilu) return;
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = 0; i < count * lanes; i += lanes) {
    hn::Store(Silu(d, hn::Load(d, y + i)), d, y + i);
  }
}

// Returns the W-1 rows of one sequence's state.
HWY_INLINE TileRows state_rows(const Tensor& t, int64_t sequence, int64_t channel) {
  const TileRows rows{t.data, t.dtype, t.stride(1), t.stride(2)};
  return rows.at(sequence * t.stride(0) + channel * t.stride(2));
}

// Loads the inputs [from, to) of a sequence into out. Those before its first come from the initial
// state, and those after its last are 0.
HWY_INLINE void load_steps(const conv::Input& in, int64_t s, const SequenceSteps& sequence,
                           int64_t from, int64_t to, int64_t channel, int64_t channels,
                           float* out) {
  const int64_t lanes = hn::Lanes(F32()), history = in.width - 1;
  const int64_t first = std::min(std::max(from, sequence.begin), to);
  const int64_t last = std::max(std::min(to, sequence.end), first);
  if (from < first) {
    if (in.initial_state) {
      const int64_t row = from - sequence.begin + history;
      const TileRows rows = state_rows(in.initial_state, s, channel);
      load_tile(rows.at(row * rows.step), first - from, channels, out);
    } else {
      std::fill_n(out, (first - from) * lanes, 0.0f);
    }
  }
  if (first < last) {
    load_tile(cpu::tile_rows(in.x, sequence.batch, first, channel), last - first, channels,
              out + (first - from) * lanes);
  }
  std::fill_n(out + (last - from) * lanes, (to - last) * lanes, 0.0f);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_OPS_CAUSAL_CONV1D_CPU_SIMD_PER_TARGET
