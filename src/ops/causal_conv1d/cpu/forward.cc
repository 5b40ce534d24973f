// This file computes causal_conv1d and its update on the CPU.
//
// Floor: memory, one read and one write of x; W multiply-adds and one exponential a step hide
// behind it.
//
// A lane is a channel. Threads take tiles of 64 steps of a sequence and go through the channels a
// vector at a time: the tile is loaded as float, in whichever order it lies in memory, with the W-1
// inputs before it.

#include "core/integers.h"
#include "ops/causal_conv1d/causal_conv1d.h"

#ifndef FK_OPS_CAUSAL_CONV1D_CPU_ONCE_
#define FK_OPS_CAUSAL_CONV1D_CPU_ONCE_

#include "ops/causal_conv1d/cpu/plan.h"

namespace fk::conv {
namespace {

struct ForwardJob {
  Input in;
  StepView y;
  Tensor final_state;
};

// A vector of steps is a tile of L = 1 in the update.
struct UpdateJob {
  StepView x, y;
  Tensor state, weight, bias, new_state;
  int64_t batch, length, channels, width, activation;
};

StepView update_view(const Tensor& t) {
  if (!t || t.ndim == 3) return step_view(t);
  return {t.data, t.dtype, t.stride(0), 0, t.stride(1)};
}

}  // namespace
}  // namespace fk::conv

#endif  // FK_OPS_CAUSAL_CONV1D_CPU_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/causal_conv1d/cpu/forward.cc"
#include "cpu/foreach_target.h"
#include "ops/causal_conv1d/cpu/conv_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

// Computes tiles [begin, end).
void convolve_tiles(const conv::ForwardJob& job, int64_t begin, int64_t end) {
  const conv::Input& in = job.in;
  const int64_t lanes = hn::Lanes(F32()), history = in.width - 1;
  alignas(64) float x[(kSteps + kHistory) * kMaxLanes];
  alignas(64) float y[kSteps * kMaxLanes];
  for (int64_t item = begin; item < end; ++item) {
    const conv::Tile tile(in, item);
    const int64_t count = tile.end - tile.step;
    if (count == 0 || job.y.data == nullptr) continue;
    for (int64_t c = 0; c < in.channels; c += lanes) {
      const int64_t channels = std::min(lanes, in.channels - c);
      const Taps taps(in.weight, in.bias, c, channels);
      load_steps(in, tile.s, tile.sequence, tile.step - history, tile.end, c, channels, x);
      convolve(in.width, taps, x, count, y);
      activate(in.activation, count, y);
      store_tile(y, count, channels, cpu::tile_rows(job.y, tile.sequence.batch, tile.step, c));
    }
  }
}

// Stores the last inputs of sequences [begin, end).
void store_final_states(const conv::ForwardJob& job, int64_t begin, int64_t end) {
  const conv::Input& in = job.in;
  const int64_t lanes = hn::Lanes(F32()), history = in.width - 1;
  alignas(64) float x[kHistory * kMaxLanes];
  for (int64_t s = begin; s < end; ++s) {
    const SequenceSteps sequence = in.sequences[s];
    for (int64_t c = 0; c < in.channels; c += lanes) {
      const int64_t channels = std::min(lanes, in.channels - c);
      load_steps(in, s, sequence, sequence.end - history, sequence.end, c, channels, x);
      store_tile(x, history, channels, state_rows(job.final_state, s, c));
    }
  }
}

// Updates the batch rows and vectors of channels [begin, end). The state is read before it is
// written, which may be in the same place.
void update_items(const conv::UpdateJob& job, int64_t begin, int64_t end) {
  const int64_t lanes = hn::Lanes(F32()), history = job.width - 1;
  const int64_t blocks = ceil_div(job.channels, lanes);
  alignas(64) float x[(kSteps + kHistory) * kMaxLanes];
  alignas(64) float y[kSteps * kMaxLanes];
  for (int64_t item = begin; item < end; ++item) {
    const int64_t b = item / blocks, c = item % blocks * lanes;
    const int64_t channels = std::min(lanes, job.channels - c);
    const Taps taps(job.weight, job.bias, c, channels);
    load_tile(state_rows(job.state, b, c), history, channels, x);
    for (int64_t step = 0; step < job.length; step += kSteps) {
      const int64_t count = std::min(kSteps, job.length - step);
      load_tile(cpu::tile_rows(job.x, b, step, c), count, channels, x + history * lanes);
      if (job.y.data != nullptr) {
        convolve(job.width, taps, x, count, y);
        activate(job.activation, count, y);
        store_tile(y, count, channels, cpu::tile_rows(job.y, b, step, c));
      }
      std::copy_n(x + count * lanes, history * lanes, x);
    }
    if (job.new_state) store_tile(x, history, channels, state_rows(job.new_state, b, c));
  }
}

int64_t conv_lanes() { return hn::Lanes(F32()); }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {
namespace {

FK_CPU_EXPORT(convolve_tiles);
FK_CPU_EXPORT(store_final_states);
FK_CPU_EXPORT(update_items);
FK_CPU_EXPORT(conv_lanes);

// So many elements are worth waking a thread for.
constexpr int64_t kGrain = 16384;

}  // namespace

Status run(const CausalConv1dFwd& a, const Exec& exec) {
  const conv::ForwardJob job{conv::input_of(a), step_view(a.y), a.final_state};
  const int64_t sequences = job.in.sequences.count;
  const int64_t grain =
      std::max<int64_t>(1, kGrain / std::max<int64_t>(1, conv::kSteps * job.in.channels));
  const auto kernel = FK_CPU_DISPATCH(convolve_tiles);
  exec.parallel_for(sequences * job.in.tiles(), grain,
                    [&](int64_t b, int64_t e) { kernel(job, b, e); });
  if (!a.final_state) return {};
  const auto finals = FK_CPU_DISPATCH(store_final_states);
  exec.parallel_for(sequences, 64, [&](int64_t b, int64_t e) { finals(job, b, e); });
  return {};
}

Status run(const CausalConv1dUpdateFwd& a, const Exec& exec) {
  conv::UpdateJob job;
  job.x = conv::update_view(a.x);
  job.y = conv::update_view(a.y);
  job.state = a.state;
  job.weight = a.weight;
  job.bias = a.bias;
  job.new_state = a.new_state;
  job.batch = a.x.size(0);
  job.length = a.x.ndim == 3 ? a.x.size(1) : 1;
  job.channels = a.x.size(-1);
  job.width = a.weight.size(1);
  job.activation = a.activation;
  const int64_t lanes = FK_CPU_DISPATCH(conv_lanes)();
  const int64_t blocks = ceil_div(job.channels, lanes);
  const int64_t grain = std::max<int64_t>(1, kGrain / (lanes * (job.length + job.width)));
  const auto kernel = FK_CPU_DISPATCH(update_items);
  exec.parallel_for(job.batch * blocks, grain, [&](int64_t b, int64_t e) { kernel(job, b, e); });
  return {};
}

}  // namespace fk::cpu
#endif  // HWY_ONCE
