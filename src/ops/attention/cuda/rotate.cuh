// This file holds what the passes before and after the attention kernels share: the rows of a
// tensor, and how their columns are rotated.
#pragma once

#include "cuda/launch.h"
#include "ops/attention/cuda/rotate.h"
#include "ops/attention/cuda/scores.cuh"

namespace fk::cuda::attention {

constexpr int kPassThreads = 256;

struct Rows {
  Problem problem;
  bool queries;
  Rotation rotation;
  int64_t batch, rows;  // of the tensor: 1 and all where sequences are packed
  int heads, columns;
  bool pieces;  // what is rotated, and tables, can be read 8 columns or pairs at a time

  // Returns the last packed sequence that began(b) holds for.
  template <class Began>
  __device__ __forceinline__ int64_t last_sequence(const Began& began) const {
    int64_t low = 0, high = problem.batch;
    while (low + 1 < high) {
      const int64_t middle = (low + high) / 2;
      if (began(middle)) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
  __device__ __forceinline__ int64_t sequence(int64_t row) const {
    const int32_t* starts = queries ? problem.cu_q : problem.cu_k;
    const int64_t stride = queries ? problem.cu_q_stride : problem.cu_k_stride;
    return last_sequence([&](int64_t b) { return starts[b * stride] <= row; });
  }
  __device__ __forceinline__ int64_t position(int64_t row) const {
    int64_t at = row;
    if (problem.packed) {
      const Sequence s = problem.sequence(sequence(row));
      at = queries ? row - s.q_begin + s.k_len - s.q_len : row - s.k_begin;
    } else if (queries) {
      at += problem.k_len - problem.q_len;
    }
    return at < 0 ? 0 : at >= rotation.positions ? rotation.positions - 1 : at;
  }
  // Returns column c of the rotated row, given its columns by value(c). With direction -1 it is
  // rotated back.
  template <class Value>
  __device__ __forceinline__ float rotated(int c, int64_t position, float direction,
                                           const Value& value) const {
    if (c >= 2 * rotation.pairs) return value(c);
    const bool second = rotation.interleaved ? c % 2 : c >= rotation.pairs;
    const int pair = rotation.interleaved ? c / 2 : second ? c - rotation.pairs : c;
    const int other = rotation.interleaved ? c ^ 1 : second ? pair : pair + rotation.pairs;
    const float cosine =
        load_as(rotation.cos_dtype, rotation.cos,
                position * rotation.cos_strides[0] + pair * rotation.cos_strides[1]);
    const float sine = load_as(rotation.sin_dtype, rotation.sin,
                               position * rotation.sin_strides[0] + pair * rotation.sin_strides[1]);
    return value(c) * cosine + (second ? direction : -direction) * value(other) * sine;
  }
  // Does so for 8 columns from `first` on, with 0 where there are none.
  template <class Value>
  __device__ __forceinline__ void rotate_columns(int first, int64_t row, float direction,
                                                 const Value& value, float (&values)[8]) const {
    if (rotation.pairs == 0) {
#pragma unroll
      for (int e = 0; e < 8; ++e) values[e] = first + e < columns ? value(first + e) : 0.f;
      return;
    }
    const int64_t at = position(row);
#pragma unroll 1  // much code
    for (int e = 0; e < 8; ++e) {
      const float x = first + e < columns ? rotated(first + e, at, direction, value) : 0.f;
      // The values stay in registers, since no index depends on e.
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = i == e ? x : values[i];
    }
  }
  // Does so for a row at x whose pieces of 16 bytes can be read (`pieces`).
  template <class T>
  __device__ __forceinline__ void rotate_piece(const T* x, int first, int64_t row, float direction,
                                               float (&values)[8]) const {
    unpack(load<8>(x + first), values);
    if (first >= 2 * rotation.pairs) return;
    const int64_t at = position(row);
    const bool second = first >= rotation.pairs;
    const int pair = rotation.interleaved ? first / 2 : second ? first - rotation.pairs : first;
    const int64_t cos_at = at * rotation.cos_strides[0] + pair;
    const int64_t sin_at = at * rotation.sin_strides[0] + pair;
    if (rotation.interleaved) {
      float cosine[4], sine[4];
      load_parameters(rotation.cos, cos_at, rotation.cos_dtype, cosine);
      load_parameters(rotation.sin, sin_at, rotation.sin_dtype, sine);
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        const float x0 = values[e], x1 = values[e + 1], turned = direction * sine[e / 2];
        values[e] = x0 * cosine[e / 2] - x1 * turned;
        values[e + 1] = x1 * cosine[e / 2] + x0 * turned;
      }
    } else {
      float cosine[8], sine[8], other[8];
      load_parameters(rotation.cos, cos_at, rotation.cos_dtype, cosine);
      load_parameters(rotation.sin, sin_at, rotation.sin_dtype, sine);
      unpack(load<8>(x + (second ? pair : pair + rotation.pairs)), other);
      if (!second) direction = -direction;
#pragma unroll
      for (int e = 0; e < 8; ++e)
        values[e] = values[e] * cosine[e] + direction * other[e] * sine[e];
    }
  }

 private:
  template <int kCount>
  static __device__ __forceinline__ void load_parameters(const void* data, int64_t at, DType dtype,
                                                         float (&x)[kCount]) {
    switch (dtype) {
      case DType::kFloat16:
        return unpack(load<kCount>(static_cast<const __half*>(data) + at), x);
      case DType::kBFloat16:
        return unpack(load<kCount>(static_cast<const __nv_bfloat16*>(data) + at), x);
      default:
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
          float four[4];
          unpack(load<4>(static_cast<const float*>(data) + at + i), four);
#pragma unroll
          for (int e = 0; e < 4; ++e) x[i + e] = four[e];
        }
    }
  }
};

// Returns whether rows of x can be read 16 bytes at a time.
inline bool vectors_fit(const Tensor& x) {
  bool fit =
      x.stride(-1) == 1 && x.size(-1) % 8 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  for (int i = 0; i + 1 < x.ndim; ++i) {
    fit = fit && (x.shape[i] == 1 || x.strides[i] * size_of(x.dtype) % 16 == 0);
  }
  return fit;
}

inline Rows rows_of_tensor(const Problem& problem, const Tensor& x, bool queries,
                           const Rotation& rotation) {
  Rows rows;
  rows.problem = problem;
  rows.queries = queries;
  rows.rotation = rotation;
  rows.batch = problem.packed ? 1 : problem.batch;
  rows.rows = x.size(-3);
  rows.heads = static_cast<int>(x.size(-2));
  rows.columns = static_cast<int>(x.size(-1));
  const auto aligned = [](const void* data, int64_t stride, DType dtype) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * size_of(dtype) % 16 == 0;
  };
  rows.pieces = rotation.pairs % (rotation.interleaved ? 4 : 8) == 0 && vectors_fit(x) &&
                rotation.cos_strides[1] == 1 && rotation.sin_strides[1] == 1 &&
                aligned(rotation.cos, rotation.cos_strides[0], rotation.cos_dtype) &&
                aligned(rotation.sin, rotation.sin_strides[0], rotation.sin_dtype);
  return rows;
}

}  // namespace fk::cuda::attention
