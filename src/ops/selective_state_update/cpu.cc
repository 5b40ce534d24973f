// This file computes selective_state_update on the CPU.
//
// Floor: memory, the state read and written once; one exponential per state.
//
// A lane is a state of a channel, which is how they lie in memory. Threads take vectors of
// channels, whose dt, x, D and z are made ready together; B and C are kept while their group lasts.
// The terms of C . state cancel, so they are added in double precision.

#include "core/integers.h"
#include "ops/selective_state_update/selective_state_update.h"

#ifndef FK_OPS_SELECTIVE_STATE_UPDATE_CPU_ONCE_
#define FK_OPS_SELECTIVE_STATE_UPDATE_CPU_ONCE_

#include <algorithm>

#include "cpu/tile_rows.h"
#include "ops/selective_state_update/heads.h"

#endif  // FK_OPS_SELECTIVE_STATE_UPDATE_CPU_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/selective_state_update/cpu.cc"
#include "cpu/foreach_target.h"
#include "cpu/simd.h"
#include "cpu/simd_activations.h"
#include "cpu/simd_tiles.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using state_update::HeadView;
using state_update::Problem;
using Vec = hn::Vec<F32>;
using F64 = hn::Repartition<double, F32>;

constexpr float kLog2e = 1.44269504f;
constexpr int64_t kStates = 256;  // of B and C that are kept at a time

// Loads `count` <= lanes entries from `offset` on, `stride` apart, with 0 beyond.
HWY_INLINE Vec load_entries(const HeadView& v, int64_t offset, int64_t stride, int64_t count) {
  const F32 d;
  const float* p = static_cast<const float*>(v.data) + offset;
  if (v.dtype == DType::kFloat32 && count == static_cast<int64_t>(hn::Lanes(d))) {
    if (stride == 1) return hn::LoadU(d, p);
    if (stride == 0) return hn::Set(d, *p);
  }
  alignas(64) float out[kMaxLanes];
  const TileRows rows{v.data, v.dtype, 0, stride};
  load_tile(rows.at(offset), 1, count, out);
  return hn::Load(d, out);
}

HWY_INLINE hn::Vec<F64> lower(Vec x) {
  return hn::PromoteTo(F64(), hn::LowerHalf(hn::Half<F32>(), x));
}
HWY_INLINE hn::Vec<F64> upper(Vec x) {
  return hn::PromoteTo(F64(), hn::UpperHalf(hn::Half<F32>(), x));
}

HWY_INLINE void store_entries(Vec x, const HeadView& v, int64_t offset, int64_t stride,
                              int64_t count) {
  const F32 d;
  if (v.dtype == DType::kFloat32 && stride == 1 && count == static_cast<int64_t>(hn::Lanes(d))) {
    hn::StoreU(x, d, static_cast<float*>(v.data) + offset);
    return;
  }
  alignas(64) float in[kMaxLanes];
  hn::Store(x, d, in);
  const TileRows rows{v.data, v.dtype, 0, stride};
  store_tile(in, 1, count, rows.at(offset));
}

// Holds B and C of one group, states [first, first + count).
struct Shared {
  alignas(64) float B[kStates];
  alignas(64) double C[kStates];
  int64_t batch = -1, group = -1, first = -1;

  void load(const Problem& p, int64_t b, int64_t g, int64_t n, int64_t count) {
    if (b == batch && g == group && n == first) return;
    batch = b;
    group = g;
    first = n;
    const F32 d;
    const int64_t lanes = hn::Lanes(d);
    for (int64_t i = 0; i < count; i += lanes) {
      const int64_t few = std::min(lanes, count - i);
      const int64_t at = b * p.B.batch + g * p.B.head + (n + i) * p.B.state;
      hn::Store(load_entries(p.B, at, p.B.state, few), d, B + i);
      const int64_t to = b * p.C.batch + g * p.C.head + (n + i) * p.C.state;
      const Vec c = load_entries(p.C, to, p.C.state, few);
      hn::Store(lower(c), F64(), C + i);
      hn::Store(upper(c), F64(), C + i + lanes / 2);
    }
  }
};

// Updates the states of one channel and returns C . state.
float step_channel(const Problem& p, int64_t b, int64_t h, int64_t c, float dt, float x,
                   Shared& shared) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), group = p.group(h, c);
  const int64_t state = p.state.offset(b, h, c), A = p.A.offset(0, h, c);
  const int64_t next = p.new_state.offset(b, h, c);
  const Vec rate = hn::Set(d, dt * kLog2e), input = hn::Set(d, dt * x);
  const F64 dd;
  hn::Vec<F64> low = hn::Zero(dd), high = hn::Zero(dd);
  for (int64_t first = 0; first < p.states; first += kStates) {
    const int64_t count = std::min(kStates, p.states - first);
    shared.load(p, b, group, first, count);
    for (int64_t i = 0; i < count; i += lanes) {
      const int64_t n = first + i, few = std::min(lanes, count - i);
      const Vec decay = load_entries(p.A, A + n * p.A.state, p.A.state, few);
      const Vec before = load_entries(p.state, state + n * p.state.state, p.state.state, few);
      const Vec after = hn::MulAdd(Exp2(d, hn::Mul(rate, decay)), before,
                                   hn::Mul(input, hn::Load(d, shared.B + i)));
      low = hn::MulAdd(lower(after), hn::Load(dd, shared.C + i), low);
      high = hn::MulAdd(upper(after), hn::Load(dd, shared.C + i + lanes / 2), high);
      if (p.new_state.data == nullptr) continue;
      store_entries(after, p.new_state, next + n * p.new_state.state, p.new_state.state, few);
    }
  }
  return static_cast<float>(hn::GetLane(hn::SumOfLanes(dd, hn::Add(low, high))));
}

int64_t update_lanes() { return hn::Lanes(F32()); }

// Updates the vectors of channels [begin, end).
void update_items(const Problem& p, bool softplus, int64_t begin, int64_t end) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), blocks = ceil_div(p.channels, lanes);
  Shared shared;
  alignas(64) float dt[kMaxLanes];
  alignas(64) float x[kMaxLanes];
  alignas(64) float y[kMaxLanes] = {};
  for (int64_t item = begin; item < end; ++item) {
    const int64_t c = item % blocks * lanes, h = item / blocks % p.heads;
    const int64_t b = item / blocks / p.heads, count = std::min(lanes, p.channels - c);
    const auto load = [&](const HeadView& v) HWY_ATTR {
      if (v.data == nullptr) return hn::Zero(d);
      return load_entries(v, v.offset(b, h, c), v.channel, count);
    };
    Vec step = hn::Add(load(p.dt), load(p.dt_bias));
    if (softplus) step = Softplus(d, step);
    const Vec inputs = load(p.x);
    hn::Store(step, d, dt);
    hn::Store(inputs, d, x);
    for (int64_t i = 0; i < count; ++i) y[i] = step_channel(p, b, h, c + i, dt[i], x[i], shared);
    if (p.y.data == nullptr) continue;
    Vec out = hn::MulAdd(load(p.D), inputs, hn::Load(d, y));
    if (p.z.data != nullptr) out = hn::Mul(out, Silu(d, load(p.z)));
    store_entries(out, p.y, p.y.offset(b, h, c), p.y.channel, count);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {
namespace {

FK_CPU_EXPORT(update_lanes);
FK_CPU_EXPORT(update_items);

}  // namespace

Status run(const SelectiveStateUpdateFwd& a, const Exec& exec) {
  const state_update::Problem p = state_update::problem_of(a);
  const int64_t lanes = FK_CPU_DISPATCH(update_lanes)();
  const int64_t items = p.batch * p.heads * ceil_div(p.channels, lanes);
  constexpr int64_t kGrain = 16384;  // states worth waking a thread for
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, p.states * lanes));
  const auto kernel = FK_CPU_DISPATCH(update_items);
  exec.parallel_for(items, grain, [&](int64_t b, int64_t e) { kernel(p, a.dt_softplus, b, e); });
  return {};
}

}  // namespace fk::cpu
#endif  // HWY_ONCE
