// What the CUDA kernels of the selective scan are given, forward and backward.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/status.h"
#include "cuda/segments.h"
#include "ops/selective_scan/problem.h"

namespace fk::cuda {

// Values per channel, of dtype float32 or the activations'.
struct ChannelView {
  void* data = nullptr;  // NULL: not there
  bool is_float = true;
  int64_t stride = 0;
};

// States (sequence, channel, state), of dtype float32 or the activations'.
struct StateView {
  void* data = nullptr;
  bool is_float = true;
  int64_t sequence = 0, channel = 0, state = 0;
};

inline StateView state_view(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.dtype == DType::kFloat32, t.stride(0), t.stride(1), t.stride(2)};
}

inline ChannelView channel_view(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.dtype == DType::kFloat32, t.stride(0)};
}

// States are kept after every `spacing` steps of a sequence, [row][state][channel]. The row of the
// state after step t - 1 is base + (t - begin) / spacing, base being rows_per_batch * batch - 1 or,
// without rows per batch, the sequence's first slot among segments of `spacing` steps.
struct KeptStates {
  float* data = nullptr;
  int64_t spacing = 1;
  int64_t rows_per_batch = -1;
  int64_t strides[4] = {};  // of a tensor that may have gaps: only cuda/named.cu writes to one

  FK_HOST_DEVICE int64_t base(const Segments& segments, const Segment& g) const {
    if (rows_per_batch >= 0) return rows_per_batch * g.batch - 1;
    Segments by_spacing = segments;
    by_spacing.steps = spacing;
    return by_spacing.first_slot(g.sequence);
  }
};

struct ScanArgs {
  StepView u, delta, z, y;
  scan::GroupView B, C;
  const float* A;
  int64_t A_channel, A_state;
  ChannelView D, bias;
  StateView initial_state, last_state;
  int64_t batch, length, channels;
  int states, groups;
  int group_channels;    // channels / groups (kChunks)
  int first_state;       // of those that this launch takes
  int blocks_per_group;  // of channels
  int block_channels;    // that a block takes
  bool quads;            // four elements along the contiguous dimension can be read at once
  bool state_quads;      // four states of B and of C
  bool softplus;
  bool time_contiguous;  // u, delta, z and y have stride 1 along time
  Segments segments;
  KeptStates kept;  // written by the forward, read by the backward
  // Where sequences are cut, these are (slot, channel, state) and (slot, channel).
  float* segment_states;
  float* segment_sums;
  // Where there are more states than a launch takes, these are the sums over the states of earlier
  // launches, and with those of this one, (batch, step, channel). They are NULL in the first launch
  // and in the last.
  const float* sums_before;
  float* sums_after;

  FK_HOST_DEVICE int64_t sum_at(int64_t b, int64_t step, int64_t channel) const {
    return (b * length + step) * channels + channel;
  }
};

// Sets what forward and backward are given alike.
template <class Op, class Args>
void set_inputs(const Op& op, const scan::Problem& p, Args* a) {
  a->u = step_view(op.u);
  a->delta = step_view(op.delta);
  a->z = step_view(op.z);
  a->B = scan::group_view_of(op.B);
  a->C = scan::group_view_of(op.C);
  a->A = op.A.template ptr<const float>();
  a->A_channel = op.A.stride(0);
  a->A_state = op.A.stride(1);
  a->D = channel_view(op.D);
  a->bias = channel_view(op.delta_bias);
  a->initial_state = state_view(op.initial_state);
  a->channels = p.channels;
  a->states = static_cast<int>(p.states);
  a->groups = static_cast<int>(p.groups);
  a->softplus = op.delta_softplus;
}

enum class ScanPass { kOutputs, kStates };

// How threads share channels and states. kMany: up to 16 states, as many channels as there are.
// kFew: two states a thread, for the least time a step where a GPU is not full. kSmall: the same in
// half the shared memory. kShort: few channels over a tile or less, time cut among threads.
// kChunks: few channels of 2-byte elements on sm_90, time cut among threads and blocks. kWide: 64
// states at a time.
enum class ScanShape { kMany, kFew, kSmall, kShort, kChunks, kWide };

// A block of the forward takes so much at most, and so does one of its warps. States can be kept
// after every `between` steps.
struct ForwardBlock {
  int channels, warp_channels, states, between;
  int shared_bytes;
};

ForwardBlock block_of(ScanShape shape);

// Launches one kernel. a.first_state and what a block takes say which states it scans.
template <class T>
Status launch_scan(ScanPass pass, ScanShape shape, const ScanArgs& a, void* stream);

// Launches blelloch, hillis_steele or cumsum, for whole sequences and all states.
Status launch_named(int64_t algorithm, const ScanArgs& a, void* stream);

}  // namespace fk::cuda
