// One selective scan with every optional thing resolved: what all backends read instead of the
// arguments. Sequences of a batch and packed ones differ only in where a sequence begins.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/tensor.h"
#include "ops/selective_scan/selective_scan.h"

namespace fk::scan {

// Where the packed sequences begin along L; in device memory on a GPU. On a GPU the offsets may be
// anything: whatever they say, steps stay inside the tensors.
struct Sequence {
  int64_t batch;       // row of u, delta, ...
  int64_t begin, end;  // steps
};

struct Sequences {
  bool packed = false;               // otherwise every batch row is a sequence
  const int32_t* offsets = nullptr;  // NULL as well in a query without data
  int64_t offsets_stride = 0;
  int64_t count = 0;
  int64_t length = 0;  // L

  FK_HOST_DEVICE Sequence operator[](int64_t s) const {
    if (!packed) return {s, 0, length};
    const int64_t begin = clamp(offsets[s * offsets_stride]);
    const int64_t end = clamp(offsets[(s + 1) * offsets_stride]);
    return {0, begin, end > begin ? end : begin};
  }

 private:
  FK_HOST_DEVICE int64_t clamp(int64_t x) const { return x < 0 ? 0 : x > length ? length : x; }
};

inline Sequences sequences_of(const Tensor& x, const Tensor& cu_seqlens) {
  Sequences s;
  s.length = x.size(1);
  s.count = x.size(0);
  if (cu_seqlens) {
    s.packed = true;
    s.offsets = cu_seqlens.ptr<const int32_t>();
    s.offsets_stride = cu_seqlens.stride(0);
    s.count = cu_seqlens.size(0) - 1;
  }
  return s;
}

// A tensor (B, L, D) as (batch, step, channel), strides in elements.
struct StepView {
  void* data = nullptr;  // NULL: not there
  DType dtype = DType::kFloat32;
  int64_t batch = 0, step = 0, channel = 0;
};

// B or C as (batch, step, group, state).
struct GroupView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t batch = 0, step = 0, group = 0, state = 0;
};

inline StepView view_of(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.dtype, t.stride(0), t.stride(1), t.stride(2)};
}

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
