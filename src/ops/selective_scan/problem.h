// One selective scan with every optional thing resolved: what all backends read instead of the
// arguments. Sequences of a batch and packed ones differ only in where a sequence begins.
#pragma once

#include <cstdint>

#include "core/sequences.h"
#include "core/tensor.h"
#include "ops/selective_scan/selective_scan.h"

namespace fk::scan {

// B or C as (batch, step, group, state).
struct GroupView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t batch = 0, step = 0, group = 0, state = 0;
};

inline GroupView group_view_of(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.dtype, t.stride(0), t.stride(1), t.ndim == 4 ? t.stride(2) : 0, t.stride(-1)};
}

struct Problem {
  int64_t batch, length, channels, groups, states;
  Sequences sequences;
  int64_t spacing;  // of the checkpoints; 0: there are none

  int64_t channels_per_group() const { return channels / groups; }
};

template <class Args>
Problem problem_of(const Args& a) {
  Problem p;
  p.batch = a.u.size(0);
  p.length = a.u.size(1);
  p.channels = a.u.size(2);
  p.groups = a.B.ndim == 4 ? a.B.size(2) : 1;
  p.states = a.A.size(1);
  p.sequences = sequences_of(a.u, a.cu_seqlens);
  p.spacing = block_length(p.length, a.checkpoint);
  return p;
}

}  // namespace fk::scan
