// Vector code that the forward and the backward of the selective scan share: a tile of time steps,
// a channel per lane.

// Highway includes this file once for each target.
#if defined(FK_OPS_SELECTIVE_SCAN_CPU_SIMD_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_OPS_SELECTIVE_SCAN_CPU_SIMD_PER_TARGET
#undef FK_OPS_SELECTIVE_SCAN_CPU_SIMD_PER_TARGET
#else
#define FK_OPS_SELECTIVE_SCAN_CPU_SIMD_PER_TARGET
#endif

#include "cpu/simd.h"
#include "cpu/simd_activations.h"
#include "cpu/simd_tiles.h"
#include "ops/selective_scan/cpu/plan.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using scan::Block;
using scan::Inputs;
using scan::kTile;
using scan::kTileSteps;
using Vec = hn::Vec<F32>;

// Holds the inputs of some steps of a block of channels.
struct InputTile {
  alignas(64) float u[kTile];
  alignas(64) float dt[kTile];
  alignas(64) float dtu[kTile];  // dt * u
};

// Loads a parameter of a block's channels, or 0 where it is absent.
HWY_INLINE Vec load_parameter(const Tensor& t, const Block& block) {
  const F32 d;
  if (!t) return hn::Zero(d);
  alignas(64) float out[kMaxLanes];
  const TileRows rows{t.data, t.dtype, 0, t.stride(0)};
  load_tile(rows.at(block.first * t.stride(0)), 1, block.count, out);
  return hn::Load(d, out);
}

// Loads log2(e) A of a block's channels and one state, with 0 in lanes without a channel.
HWY_INLINE Vec load_decay(const Inputs& in, const Block& block, int64_t n) {
  const F32 d;
  const float* p = in.A + n * in.A_stride + block.first;
  if (block.count == static_cast<int64_t>(hn::Lanes(d))) return hn::LoadU(d, p);
  return LoadNF32(d, p, static_cast<size_t>(block.count));
}

// Asks for the rows that the channels after a block's have in a tile: a row is a cache line of a
// page of its own, which the processor does not foresee.
HWY_INLINE void prefetch_next(const TileRows& r, int64_t steps) {
  if (r.channel != 1) return;
  const int64_t size = r.dtype == DType::kFloat32 ? 4 : 2;
  const char* p = static_cast<const char*>(r.data) + hn::Lanes(F32()) * size;
  for (int64_t t = 0; t < steps; ++t) hwy::Prefetch(p + t * r.step * size);
}

// Loads `steps` steps from `step` on, delta through bias and softplus. `slope` gets softplus's
// slope as well, unless it is NULL.
HWY_INLINE void load_inputs(const Inputs& in, const Block& block, int64_t batch, int64_t step,
                            int64_t steps, InputTile* tile, float* slope = nullptr) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  load_tile(cpu::tile_rows(in.u, batch, step, block.first), steps, block.count, tile->u);
  load_tile(cpu::tile_rows(in.delta, batch, step, block.first), steps, block.count, tile->dt);
  const Vec bias = load_parameter(in.delta_bias, block);
  // Lanes without a channel stay 0, so that they add nothing anywhere.
  const auto used = hn::FirstN(d, static_cast<size_t>(block.count));
  for (int64_t i = 0; i < steps * lanes; i += lanes) {
    Vec dt = hn::Add(hn::Load(d, tile->dt + i), bias);
    if (in.softplus && slope != nullptr) {
      Vec own;
      dt = hn::IfThenElseZero(used, Softplus(d, dt, &own));
      hn::Store(own, d, slope + i);
    } else if (in.softplus) {
      dt = hn::IfThenElseZero(used, Softplus(d, dt));
    }
    hn::Store(dt, d, tile->dt + i);
    hn::Store(hn::Mul(dt, hn::Load(d, tile->u + i)), d, tile->dtu + i);
  }
}

// Loads the state before a sequence's first step: state[n * lanes + lane].
HWY_INLINE void load_initial_state(const Inputs& in, const Block& block, int64_t sequence,
                                   float* state) {
  const Tensor& t = in.initial_state;
  if (!t) {
    std::fill_n(state, in.p.states * static_cast<int64_t>(hn::Lanes(F32())), 0.0f);
    return;
  }
  const TileRows rows{t.data, t.dtype, t.stride(2), t.stride(1)};
  load_tile(rows.at(sequence * t.stride(0) + block.first * t.stride(1)), in.p.states, block.count,
            state);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_OPS_SELECTIVE_SCAN_CPU_SIMD_PER_TARGET
