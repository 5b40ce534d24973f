// This file computes the gradients of causal_conv1d on the CPU.
//
// Floor: memory, x and dy read, dx written.
//
// As the forward does, threads take a tile of 64 steps and a vector of channels at a time. The
// gradient of an input takes those of the W-1 sums after it, so a tile computes these again: 3 of
// 64 for W = 4. dweight and dbias are summed over tiles by a fixed number of items, each in memory
// of its own, so that nothing depends on the number of threads.

#include "ops/causal_conv1d/causal_conv1d.h"

#ifndef FK_OPS_CAUSAL_CONV1D_CPU_BACKWARD_ONCE_
#define FK_OPS_CAUSAL_CONV1D_CPU_BACKWARD_ONCE_

#include "ops/causal_conv1d/cpu/plan.h"

namespace fk::conv {
namespace {

constexpr int64_t kItems = 32;

struct BackwardJob {
  Input in;
  StepView dy, dx;
  Tensor dfinal_state, dinitial_state, dweight, dbias;
  int64_t items;
  float* sums;  // [item, W + 1, padded channels]

  int64_t padded() const { return in.channels + cpu::kMaxLanes; }
  float* sum(int64_t item, int64_t k, int64_t channel) const {
    return sums + (item * (in.width + 1) + k) * padded() + channel;
  }
};

}  // namespace
}  // namespace fk::conv

#endif  // FK_OPS_CAUSAL_CONV1D_CPU_BACKWARD_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/causal_conv1d/cpu/backward.cc"
#include "cpu/foreach_target.h"
#include "ops/causal_conv1d/cpu/conv_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

// Holds a tile with W-1 steps before it and after it.
struct GradientTile {
  alignas(64) float x[(kSteps + 2 * kHistory) * kMaxLanes];
  alignas(64) float dsum[(kSteps + kHistory) * kMaxLanes];
  alignas(64) float sum[(kSteps + kHistory) * kMaxLanes];
  alignas(64) float dx[(kSteps + kHistory) * kMaxLanes];
  alignas(64) float dfinal[kHistory * kMaxLanes];
};

// Computes the gradients of the sums of steps [step, end + W-1), with 0 after the sequence.
HWY_INLINE void load_sum_gradients(const conv::BackwardJob& job, const conv::Tile& tile,
                                   const Taps& taps, int64_t c, int64_t channels, GradientTile& g) {
  const F32 d;
  const conv::Input& in = job.in;
  const int64_t lanes = hn::Lanes(d), history = in.width - 1;
  const int64_t last = std::min(tile.end + history, tile.sequence.end);
  const int64_t count = last - tile.step, all = tile.end + history - tile.step;
  load_tile(cpu::tile_rows(job.dy, tile.sequence.batch, tile.step, c), count, channels, g.dsum);
  std::fill_n(g.dsum + count * lanes, (all - count) * lanes, 0.0f);
  if (in.activation != kSilu) return;
  convolve(in.width, taps, g.x, count, g.sum);
  const Vec one = hn::Set(d, 1.0f);
  for (int64_t i = 0; i < count * lanes; i += lanes) {
    const Vec x = hn::Load(d, g.sum + i), gate = Sigmoid(d, x);
    const Vec slope = hn::Mul(gate, hn::MulAdd(x, hn::Sub(one, gate), one));
    hn::Store(hn::Mul(hn::Load(d, g.dsum + i), slope), d, g.dsum + i);
  }
}

// Computes dx of the inputs [from, step) before the tile, which have no steps of their own there.
HWY_INLINE void history_gradients(const conv::Input& in, const conv::Tile& tile, const Taps& taps,
                                  int64_t from, GradientTile& g) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), history = in.width - 1;
  for (int64_t p = from; p < tile.step; ++p) {
    Vec dx = hn::Zero(d);
    // Step t takes input p with tap p - t + W-1.
    const int64_t last = std::min(p + history, tile.sequence.end - 1);
    for (int64_t t = tile.step; t <= last; ++t) {
      const float* weight = taps.weight + (p - t + history) * lanes;
      dx = hn::MulAdd(hn::Load(d, weight), hn::Load(d, g.dsum + (t - tile.step) * lanes), dx);
    }
    hn::Store(dx, d, g.dx + (p - from) * lanes);
  }
}

// Computes dx of the tile's own `count` steps, and their share of dweight and dbias in `sums`, the
// rows of which are `row` apart. `ahead` steps are left in the sequence: past them no tap is
// multiplied, not even with 0, since it may be infinite.
template <int kWidth>
HWY_INLINE void step_gradients(const Taps& taps, int64_t count, int64_t ahead,
                               const GradientTile& g, float* dx, float* sums, int64_t row) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  Vec weight[kWidth], dweight[kWidth];
  for (int k = 0; k < kWidth; ++k) {
    weight[k] = hn::Load(d, taps.weight + k * lanes);
    dweight[k] = hn::LoadU(d, sums + k * row);
  }
  Vec dbias = hn::LoadU(d, sums + kWidth * row);
  for (int64_t t = 0; t < count; ++t) {
    const float* at = g.dsum + t * lanes;
    const Vec dsum = hn::Load(d, at);
    Vec sum = hn::Mul(weight[kWidth - 1], dsum);
    if (t + kWidth <= ahead) {
      for (int k = 1; k < kWidth; ++k) {
        sum = hn::MulAdd(weight[kWidth - 1 - k], hn::Load(d, at + k * lanes), sum);
      }
    } else {
      for (int k = 1; t + k < ahead; ++k) {
        sum = hn::MulAdd(weight[kWidth - 1 - k], hn::Load(d, at + k * lanes), sum);
      }
    }
    hn::Store(sum, d, dx + t * lanes);
    for (int k = 0; k < kWidth; ++k) {
      dweight[k] = hn::MulAdd(dsum, hn::Load(d, g.x + (t + k) * lanes), dweight[k]);
    }
    dbias = hn::Add(dbias, dsum);
  }
  for (int k = 0; k < kWidth; ++k) hn::StoreU(dweight[k], d, sums + k * row);
  hn::StoreU(dbias, d, sums + kWidth * row);
}

// Adds what the final state's rows give the inputs [from, end).
HWY_INLINE void add_final_gradients(const conv::Input& in, const conv::Tile& tile, int64_t from,
                                    GradientTile& g) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), row = tile.sequence.end - (in.width - 1);
  for (int64_t p = std::max(from, row); p < tile.end; ++p) {
    float* dx = g.dx + (p - from) * lanes;
    hn::Store(hn::Add(hn::Load(d, dx), hn::Load(d, g.dfinal + (p - row) * lanes)), d, dx);
  }
}

void backward_tile(const conv::BackwardJob& job, const conv::Tile& tile, int64_t item,
                   GradientTile& g) {
  const conv::Input& in = job.in;
  const int64_t lanes = hn::Lanes(F32()), history = in.width - 1, count = tile.end - tile.step;
  const bool first = tile.first && job.dinitial_state;
  const int64_t from = first ? tile.step - history : tile.step;
  for (int64_t c = 0; c < in.channels; c += lanes) {
    const int64_t channels = std::min(lanes, in.channels - c);
    const Taps taps(in.weight, in.bias, c, channels);
    load_steps(in, tile.s, tile.sequence, tile.step - history, tile.end + history, c, channels,
               g.x);
    load_sum_gradients(job, tile, taps, c, channels, g);
    history_gradients(in, tile, taps, from, g);
    float* dx = g.dx + (tile.step - from) * lanes;
    for_width(in.width, [&](auto width) HWY_ATTR {
      step_gradients<width>(taps, count, tile.sequence.end - tile.step, g, dx, job.sum(item, 0, c),
                            job.padded());
    });
    if (job.dfinal_state) {
      load_tile(state_rows(job.dfinal_state, tile.s, c), history, channels, g.dfinal);
      add_final_gradients(in, tile, from, g);
    }
    if (first) store_tile(g.dx, history, channels, state_rows(job.dinitial_state, tile.s, c));
    if (job.dx.data != nullptr) {
      store_tile(dx, count, channels, cpu::tile_rows(job.dx, tile.sequence.batch, tile.step, c));
    }
  }
}

void backward_item(const conv::BackwardJob& job, int64_t item) {
  const int64_t tiles = job.in.sequences.count * job.in.tiles();
  std::fill_n(job.sum(item, 0, 0), (job.in.width + 1) * job.padded(), 0.0f);
  GradientTile g;
  for (int64_t i = tiles * item / job.items; i < tiles * (item + 1) / job.items; ++i) {
    const conv::Tile tile(job.in, i);
    if (tile.step < tile.end || tile.first) backward_tile(job, tile, item, g);
  }
}

// Adds the items' sums of dweight and dbias up, in order.
void finish(const conv::BackwardJob& job) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), width = job.in.width;
  alignas(64) float total[(kMaxConvWidth + 1) * kMaxLanes];
  for (int64_t c = 0; c < job.in.channels; c += lanes) {
    const int64_t channels = std::min(lanes, job.in.channels - c);
    for (int64_t k = 0; k <= width; ++k) {
      Vec sum = hn::Zero(d);
      for (int64_t i = 0; i < job.items; ++i) sum = hn::Add(sum, hn::LoadU(d, job.sum(i, k, c)));
      hn::Store(sum, d, total + k * lanes);
    }
    if (const Tensor& t = job.dweight) {
      const TileRows rows{t.data, t.dtype, t.stride(1), t.stride(0)};
      store_tile(total, width, channels, rows.at(c * t.stride(0)));
    }
    if (const Tensor& t = job.dbias) {
      const TileRows rows{t.data, t.dtype, 0, t.stride(0)};
      store_tile(total + width * lanes, 1, channels, rows.at(c * t.stride(0)));
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {
namespace {

FK_CPU_EXPORT(backward_item);
FK_CPU_EXPORT(finish);

conv::BackwardJob job_of(const CausalConv1dBwd& a, WorkspaceParts& parts) {
  conv::BackwardJob job{conv::input_of(a),
                        step_view(a.dy),
                        step_view(a.dx),
                        a.dfinal_state,
                        a.dinitial_state,
                        a.dweight,
                        a.dbias,
                        0,
                        nullptr};
  job.items = std::min(conv::kItems, job.in.sequences.count * job.in.tiles());
  job.sums = parts.take(job.items * (job.in.width + 1) * job.padded());
  return job;
}

}  // namespace

size_t workspace(const CausalConv1dBwd& a) {
  WorkspaceParts parts;
  job_of(a, parts);
  return parts.bytes();
}

Status run(const CausalConv1dBwd& a, const Exec& exec) {
  WorkspaceParts parts(exec.workspace());
  const conv::BackwardJob job = job_of(a, parts);
  constexpr int64_t kInline = 1 << 15;
  const bool small = a.x.numel() < kInline;
  const auto kernel = FK_CPU_DISPATCH(backward_item);
  exec.parallel_for(job.items, small ? job.items : 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) kernel(job, item);
  });
  FK_CPU_DISPATCH(finish)(job);
  return {};
}

}  // namespace fk::cpu
#endif  // HWY_ONCE
