// One ssd with every optional thing resolved: what all backends read instead of the arguments.
// Sequences of a batch and packed ones differ only in where a sequence begins.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/sequences.h"
#include "core/tensor.h"
#include "ops/ssd/ssd.h"

namespace fk::ssd {

// This is a tensor of up to four dims with its strides in elements: x, z and y as (batch, step,
// head, channel), B and C as (batch, step, group, state), dt as (batch, step, head), and states as
// (sequence, head, channel, state).
struct View {
  void* data = nullptr;  // NULL: there is no such tensor
  DType dtype = DType::kFloat32;
  int64_t strides[4] = {};

  FK_HOST_DEVICE int64_t offset(int64_t i, int64_t j, int64_t k, int64_t l = 0) const {
    return i * strides[0] + j * strides[1] + k * strides[2] + l * strides[3];
  }
};

inline View view_of(const Tensor& t) {
  View v;
  if (!t) return v;
  v.data = t.data;
  v.dtype = t.dtype;
  for (int i = 0; i < t.ndim; ++i) v.strides[i] = t.stride(i);
  return v;
}

struct Problem {
  int64_t batch, length, heads, channels, groups, states;
  Sequences sequences;
  int64_t chunk_size;  // as asked for; 0: as the kernel likes

  // Returns the group of B and C that a head reads.
  FK_HOST_DEVICE int64_t group(int64_t head) const { return head / (heads / groups); }
};

template <class Args>
Problem problem_of(const Args& a) {
  Problem p;
  p.batch = a.x.size(0);
  p.length = a.x.size(1);
  p.heads = a.x.size(2);
  p.channels = a.x.size(3);
  p.groups = a.B.size(2);
  p.states = a.B.size(3);
  p.sequences = sequences_of(a.x, a.cu_seqlens);
  p.chunk_size = a.chunk_size;
  return p;
}

}  // namespace fk::ssd
