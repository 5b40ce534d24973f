// This file describes one attention call with every optional thing resolved: all backends read it
// instead of the arguments. Sequences of a batch and packed ones differ only in where a sequence
// begins.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "core/tensor.h"
#include "ops/attention/attention.h"

namespace fk::attention {

constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLog2e = 1.4426950408889634f;

// A query sees the keys from `left` before its own place to `right` after it.
struct Mask {
  static constexpr int64_t kUnlimited = int64_t{1} << 40;
  int64_t left = kUnlimited, right = kUnlimited;

  FK_HOST_DEVICE bool unlimited() const { return left >= kUnlimited && right >= kUnlimited; }
  // Query i of lq sees the keys [first_key, end_key) of lk. There are none if end_key <= first_key.
  FK_HOST_DEVICE int64_t first_key(int64_t i, int64_t lq, int64_t lk) const {
    const int64_t first = i + lk - lq - left;
    return first < 0 ? 0 : first;
  }
  FK_HOST_DEVICE int64_t end_key(int64_t i, int64_t lq, int64_t lk) const {
    const int64_t end = i + lk - lq + right + 1;
    return end > lk ? lk : end;
  }
  // Key j of lk is seen by the queries [first_query, end_query) of lq.
  FK_HOST_DEVICE int64_t first_query(int64_t j, int64_t lq, int64_t lk) const {
    const int64_t first = j - right - (lk - lq);
    return first < 0 ? 0 : first;
  }
  FK_HOST_DEVICE int64_t end_query(int64_t j, int64_t lq, int64_t lk) const {
    const int64_t end = j + left - (lk - lq) + 1;
    return end > lq ? lq : end;
  }
};

// Describes a tensor (B, L, heads, D) or (T, heads, D) as (sequence, row, head, column); `batch` is
// 0 where sequences are packed.
struct View {
  void* data = nullptr;
  int64_t batch = 0, row = 0, head = 0, column = 0;  // strides, in elements
};

// Describes one sequence of a call.
struct Sequence {
  int64_t q_begin, q_len;  // rows of q, counted from the batch's (or the pack's) first
  int64_t k_begin, k_len;
};

struct Problem {
  DType dtype;
  int64_t batch;  // sequences
  int64_t heads, kv_heads, head_dim, value_dim;
  // These are the lengths of every sequence, or of all packed ones together (no sequence is
  // longer).
  int64_t q_len, k_len;
  bool packed = false;            // sequences stand one after another, without padding
  const int32_t* cu_q = nullptr;  // where they begin; in device memory on a GPU
  const int32_t* cu_k = nullptr;
  int64_t cu_q_stride = 0, cu_k_stride = 0;
  Mask mask;
  double scale, softcap;

  FK_HOST_DEVICE int64_t group() const { return heads / kv_heads; }

  // On a GPU the offsets may be anything: whatever they say, rows stay inside the tensors.
  FK_HOST_DEVICE Sequence sequence(int64_t b) const {
    if (!packed) return {0, q_len, 0, k_len};
    const int64_t q0 = clamp(cu_q[b * cu_q_stride], q_len);
    const int64_t q1 = clamp(cu_q[(b + 1) * cu_q_stride], q_len);
    const int64_t k0 = clamp(cu_k[b * cu_k_stride], k_len);
    const int64_t k1 = clamp(cu_k[(b + 1) * cu_k_stride], k_len);
    return {q0, q1 > q0 ? q1 - q0 : 0, k0, k1 > k0 ? k1 - k0 : 0};
  }

 private:
  static FK_HOST_DEVICE int64_t clamp(int64_t x, int64_t limit) {
    return x < 0 ? 0 : x > limit ? limit : x;
  }
};

inline View view(const Tensor& t) {
  if (!t) return {};
  if (t.ndim == 4) return {t.data, t.strides[0], t.strides[1], t.strides[2], t.strides[3]};
  return {t.data, 0, t.strides[0], t.strides[1], t.strides[2]};
}

// Returns lse or its gradient, (B, heads, L) or (heads, T), as (sequence, row, head).
inline View row_view(const Tensor& t) {
  if (!t) return {};
  if (t.ndim == 3) return {t.data, t.strides[0], t.strides[2], t.strides[1], 0};
  return {t.data, 0, t.strides[1], t.strides[0], 0};
}

// Returns a bias as (B, heads, Lq, Lk) with a stride of 0 along every dim that is repeated. Here
// `batch` is B, `head` the heads, `row` the queries and `column` the keys.
inline View bias_view(const Tensor& t) {
  if (!t) return {};
  int64_t strides[4] = {};
  for (int i = 0; i < t.ndim; ++i) {
    strides[4 - t.ndim + i] = t.shape[i] == 1 ? 0 : t.strides[i];
  }
  return {t.data, strides[0], strides[2], strides[1], strides[3]};
}

// Returns slopes or scales, (H) or (B, H).
inline View slope_view(const Tensor& t) {
  if (!t) return {};
  if (t.ndim == 1) return {t.data, 0, 0, t.strides[0], 0};
  return {t.data, t.strides[0], 0, t.strides[1], 0};
}

// Holds what 8-bit q, k and v are multiplied by.
struct Scales {
  View q, k, v;  // float32, by sequence and head; data NULL: 1

  // Returns the factor of the scores of query head h.
  FK_HOST_DEVICE float scores(int64_t b, int64_t h, int64_t group) const {
    return at(q, b, h) * at(k, b, h / group);
  }
  // Returns the factor of the values that query head h sees.
  FK_HOST_DEVICE float values(int64_t b, int64_t h, int64_t group) const {
    return at(v, b, h / group);
  }
  static FK_HOST_DEVICE float at(const View& view, int64_t b, int64_t head) {
    if (view.data == nullptr) return 1.f;
    return static_cast<const float*>(view.data)[b * view.batch + head * view.head];
  }
};

inline Scales scales_of(const AttentionFwd& a) {
  return {slope_view(a.q_scale), slope_view(a.k_scale), slope_view(a.v_scale)};
}
inline Scales scales_of(const AttentionBwd&) { return {}; }

template <class Args>
Problem problem_of(const Args& a) {
  Problem p;
  p.dtype = a.q.dtype;
  p.heads = a.q.size(-2);
  p.kv_heads = a.k.size(-2);
  p.head_dim = a.q.size(-1);
  p.value_dim = a.v.size(-1);
  p.q_len = a.q.size(-3);
  p.k_len = a.k.size(-3);
  if (a.q.ndim == 4) {
    p.batch = a.q.size(0);
  } else {
    p.packed = true;
    p.batch = a.cu_seqlens_q.size(0) - 1;
    p.cu_q = static_cast<const int32_t*>(a.cu_seqlens_q.data);
    p.cu_k = static_cast<const int32_t*>(a.cu_seqlens_k.data);
    p.cu_q_stride = a.cu_seqlens_q.stride(0);
    p.cu_k_stride = a.cu_seqlens_k.stride(0);
  }
  if (a.window_left >= 0) p.mask.left = std::min<int64_t>(a.window_left, Mask::kUnlimited);
  if (a.window_right >= 0) p.mask.right = std::min<int64_t>(a.window_right, Mask::kUnlimited);
  if (a.causal) p.mask.right = std::min<int64_t>(p.mask.right, 0);
  const double width = static_cast<double>(std::max<int64_t>(p.head_dim, 1));
  p.scale = std::isinf(a.scale) ? 1.0 / std::sqrt(width) : a.scale;
  p.softcap = a.softcap;
  return p;
}

}  // namespace fk::attention
