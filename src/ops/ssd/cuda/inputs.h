// This is what the CUDA kernels of ssd are given, forward and backward, and what they find out
// about it on the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/host_device.h"
#include "core/integers.h"
#include "cuda/segments.h"
#include "ops/ssd/problem.h"

namespace fk::cuda::ssd {

using fk::ssd::Problem;
using fk::ssd::View;
using fk::ssd::view_of;

// A tensor whose rows of channels or states go to shared memory. Where `vectors` is true, every row
// begins at a multiple of 16 bytes, its elements lie one after another, and whole accesses of 16
// bytes make it up.
struct Rows : View {
  bool vectors = false;
};

inline Rows step_rows(const Tensor& t) {
  Rows rows{view_of(t)};
  if (!t) return rows;
  const int64_t width = 16 / static_cast<int64_t>(size_of(t.dtype));
  rows.vectors = reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.size(3) % width == 0 &&
                 (t.size(3) <= 1 || t.stride(3) == 1);
  for (int i = 0; i < 3; ++i) {
    rows.vectors = rows.vectors && (t.size(i) <= 1 || t.stride(i) % width == 0);
  }
  return rows;
}

// These are numbers for each head, or for each head and channel: D and dt_bias, of dtype float32 or
// the activations'.
struct HeadNumbers {
  void* data = nullptr;  // NULL: every one is 0
  bool is_float = true;
  int64_t head = 0, channel = 0;  // strides
};

inline HeadNumbers head_numbers(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.dtype == DType::kFloat32, t.stride(0), t.ndim == 2 ? t.stride(1) : 0};
}

struct Inputs {
  Rows x, B, C, z;
  View dt, initial_state;
  const float* A;
  int64_t A_head;
  HeadNumbers D, dt_bias;
  bool softplus;
  float least, most;  // the limits of dt
  int heads, channels, groups, states;

  FK_HOST_DEVICE int group(int head) const { return head / (heads / groups); }
};

template <class Args>
Inputs inputs_of(const Args& a) {
  Inputs in;
  in.x = step_rows(a.x);
  in.B = step_rows(a.B);
  in.C = step_rows(a.C);
  in.z = step_rows(a.z);
  in.dt = view_of(a.dt);
  in.initial_state = view_of(a.initial_state);
  in.A = a.A.template ptr<const float>();
  in.A_head = a.A.stride(0);
  in.D = head_numbers(a.D);
  in.dt_bias = head_numbers(a.dt_bias);
  in.softplus = a.dt_softplus;
  in.least = static_cast<float>(a.dt_limit_min);
  in.most = static_cast<float>(a.dt_limit_max);
  in.heads = static_cast<int>(a.x.size(2));
  in.channels = static_cast<int>(a.x.size(3));
  in.groups = static_cast<int>(a.B.size(2));
  in.states = static_cast<int>(a.B.size(3));
  return in;
}

// Returns the steps of a chunk: as many as a tile has rows, or fewer where the caller wants so.
inline int64_t chunk_steps(const Problem& p, int64_t rows) {
  return p.chunk_size == 0 ? rows : std::min(p.chunk_size, rows);
}

// These are a group's heads cut into blocks' channels: a block has `warps` times 16 channels of a
// head.
struct Slices {
  int count, warps;

  // Returns the slices of heads of so many channels, with at most `most_warps` warps each.
  static Slices of(int64_t channels, int64_t most_warps) {
    const int64_t sixteens = ceil_div(channels, int64_t{16});
    const int64_t count = ceil_div(sixteens, most_warps);
    return {static_cast<int>(count), static_cast<int>(ceil_div(sixteens, count))};
  }
};

}  // namespace fk::cuda::ssd
