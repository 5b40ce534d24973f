// This file sees the tensors of selective_state_update as (batch, head, channel of the head,
// state), for both forms of the call: without heads all channels are one head's. All backends share
// it.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/tensor.h"
#include "ops/selective_state_update/selective_state_update.h"

namespace fk::state_update {

// Strides count elements. They are 0 along what a tensor does not have.
struct HeadView {
  void* data = nullptr;  // NULL: not there
  DType dtype = DType::kFloat32;
  int64_t batch = 0, head = 0, channel = 0, state = 0;

  FK_HOST_DEVICE int64_t offset(int64_t b, int64_t h, int64_t p) const {
    return b * batch + h * head + p * channel;
  }
};

struct Problem {
  int64_t batch, heads, channels, states;  // channels: of a head
  int64_t group_heads, group_channels;     // that share B and C; the channels only without heads
  HeadView state, x, dt, A, D, z, dt_bias, y, new_state;
  HeadView B, C;  // `head`: the stride from group to group

  FK_HOST_DEVICE int64_t group(int64_t h, int64_t p) const {
    return heads == 1 ? p / group_channels : h / group_heads;
  }
};

inline HeadView view_of(const Tensor& t, bool has_heads, bool has_batch, bool has_states) {
  HeadView v;
  if (!t) return v;
  v.data = t.data;
  v.dtype = t.dtype;
  int i = 0;
  if (has_batch) v.batch = t.stride(i++);
  if (has_heads) v.head = t.stride(i++);
  v.channel = t.stride(i++);
  if (has_states) v.state = t.stride(i);
  return v;
}

inline HeadView shared_view_of(const Tensor& t) {
  HeadView v;
  v.data = t.data;
  v.dtype = t.dtype;
  v.batch = t.stride(0);
  v.head = t.ndim == 3 ? t.stride(1) : 0;
  v.state = t.stride(-1);
  return v;
}

inline Problem problem_of(const SelectiveStateUpdateFwd& a) {
  const bool heads = a.state.ndim == 4;
  Problem p;
  p.batch = a.state.size(0);
  p.heads = heads ? a.state.size(1) : 1;
  p.channels = a.state.size(-2);
  p.states = a.state.size(-1);
  const int64_t groups = a.B.ndim == 3 ? a.B.size(1) : 1;
  p.group_heads = groups == 0 ? 1 : p.heads / groups;
  p.group_channels = p.channels;
  if (!heads && groups > 0) p.group_channels = p.channels / groups;
  p.state = view_of(a.state, heads, true, true);
  p.new_state = view_of(a.new_state, heads, true, true);
  p.x = view_of(a.x, heads, true, false);
  p.dt = view_of(a.dt, heads, true, false);
  p.z = view_of(a.z, heads, true, false);
  p.y = view_of(a.y, heads, true, false);
  p.A = view_of(a.A, heads, false, true);
  p.D = view_of(a.D, heads, false, false);
  p.dt_bias = view_of(a.dt_bias, heads, false, false);
  p.B = shared_view_of(a.B);
  p.C = shared_view_of(a.C);
  return p;
}

}  // namespace fk::state_update
