// What all kernels of the room read and write of a call's tensors, as views that kernels take by
// value, and how they are made of a call's arguments.
#pragma once

#include <cstring>

#include "core/workspace.h"
#include "cuda/convert.cuh"
#include "cuda/launch.h"
#include "cuda/parameter.cuh"
#include "ops/rnn/problem.h"

namespace fk::cuda::rnn {

using fk::rnn::Problem;

// An element as it lies in memory, of float or of T. To turn it into a number is to wait for it,
// which a thread does where it needs the number.
template <class T>
__device__ __forceinline__ uint32_t load_bits(const void* data, bool is_float, int64_t at) {
  if (sizeof(T) == 4 || is_float) return static_cast<const uint32_t*>(data)[at];
  return static_cast<const uint16_t*>(data)[at];
}
template <class T>
__device__ __forceinline__ float number_of(uint32_t bits, bool is_float) {
  if (sizeof(T) == 4 || is_float) return __uint_as_float(bits);
  const auto half = static_cast<uint16_t>(bits);
  T value;
  memcpy(&value, &half, sizeof(half));
  return to_float(value);
}

// A matrix or vector of float or of the activations' dtype, reached element by element.
struct View {
  void* data = nullptr;  // null: not there
  bool is_float = false;
  int64_t row = 0, column = 0;  // strides

  template <class T>
  __device__ __forceinline__ uint32_t bits(int64_t r, int64_t c) const {
    return data == nullptr ? 0 : load_bits<T>(data, is_float, r * row + c * column);
  }
  template <class T>
  __device__ __forceinline__ float load(int64_t r, int64_t c) const {
    return data == nullptr ? 0.f : load_either<T>(data, is_float, r * row + c * column);
  }
  template <class T>
  __device__ __forceinline__ void store(int64_t r, int64_t c, float x) const {
    if (data != nullptr) store_either<T>(data, is_float, r * row + c * column, x);
  }
};

inline View view_of(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.dtype == DType::kFloat32, t.ndim == 2 ? t.stride(0) : 0, t.stride(-1)};
}

// A tensor (B, L, D) of float or of the activations' dtype.
struct StepsView {
  void* data = nullptr;  // null: not there
  bool is_float = false;
  int64_t batch = 0, step = 0, channel = 0;

  __device__ __forceinline__ int64_t at(int64_t b, int64_t position, int64_t c) const {
    return b * batch + position * step + c * channel;
  }
  template <class T>
  __device__ __forceinline__ uint32_t bits(int64_t b, int64_t position, int64_t c) const {
    return data == nullptr ? 0 : load_bits<T>(data, is_float, at(b, position, c));
  }
  template <class T>
  __device__ __forceinline__ float load(int64_t b, int64_t position, int64_t c) const {
    return data == nullptr ? 0.f : load_either<T>(data, is_float, at(b, position, c));
  }
  template <class T>
  __device__ __forceinline__ void store(int64_t b, int64_t position, int64_t c, float x) const {
    if (data != nullptr) store_either<T>(data, is_float, at(b, position, c), x);
  }
};

inline StepsView steps_view(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.dtype == DType::kFloat32, t.stride(0), t.stride(1), t.stride(2)};
}

struct ForwardViews {
  Problem p;
  const float* from_x;  // the product with x and b_ih: gates * H floats for each position
  View b_hh, h0, c0, h, c;
  StepsView y, gates, cells;
};

inline ForwardViews forward_views(const LstmFwd& a, const float* from_x) {
  return {fk::rnn::problem_of(a), from_x,          view_of(a.b_hh),
          view_of(a.h0),          view_of(a.c0),   view_of(a.h),
          view_of(a.c),           steps_view(a.y), steps_view(a.gates),
          steps_view(a.cells)};
}
inline ForwardViews forward_views(const GruFwd& a, const float* from_x) {
  return {fk::rnn::problem_of(a), from_x, view_of(a.b_hh), view_of(a.h0),       {},
          view_of(a.h),           {},     steps_view(a.y), steps_view(a.gates), {}};
}

// Gradients of the products with x and with h are matrices of the activations' dtype with gates * H
// columns and a row for each position, `pitch` elements behind the one before; of an LSTM both are
// the same matrix.
struct BackwardViews {
  Problem p;
  void *of_x, *of_h;
  int64_t pitch;
  View h0, c0, dh, dc, dh0, dc0;
  StepsView dy, y, gates, cells;
};

inline BackwardViews backward_views(const LstmBwd& a, void* of_x, void* of_h, int64_t pitch) {
  return {fk::rnn::problem_of(a),
          of_x,
          of_h,
          pitch,
          view_of(a.h0),
          view_of(a.c0),
          view_of(a.dh),
          view_of(a.dc),
          view_of(a.dh0),
          view_of(a.dc0),
          steps_view(a.dy),
          steps_view(a.y),
          steps_view(a.gates),
          steps_view(a.cells)};
}
inline BackwardViews backward_views(const GruBwd& a, void* of_x, void* of_h, int64_t pitch) {
  return {fk::rnn::problem_of(a), of_x, of_h,           pitch, view_of(a.h0),    {},
          view_of(a.dh),          {},   view_of(a.dh0), {},    steps_view(a.dy), steps_view(a.y),
          steps_view(a.gates),    {}};
}

// Calls body(T()) with the type of the activations.
template <class Body>
Status with_type(DType dtype, const Body& body) {
  if (dtype == DType::kFloat32) return body(float());
  if (dtype == DType::kFloat16) return body(__half());
  return body(__nv_bfloat16());
}

// A matrix in the workspace as a tensor like another; `pitch` elements from row to row, or as many
// as there are columns.
inline Tensor matrix_like(const Tensor& like, DType dtype, void* data, int64_t rows,
                          int64_t columns, int64_t pitch = 0) {
  Tensor t = like;
  t.defined = true;
  t.data = data;
  t.dtype = dtype;
  t.ndim = 2;
  t.shape[0] = rows;
  t.shape[1] = columns;
  t.strides[0] = pitch > 0 ? pitch : columns;
  t.strides[1] = 1;
  return t;
}

}  // namespace fk::cuda::rnn
