// Scores: what is done to q.k before the softmax, one element at a time; and results, as kernels
// write them.
#pragma once

#include "ops/attention/cuda_products.cuh"

namespace fk::cuda::attention {

__device__ __forceinline__ float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// A parameter (slopes, sinks, bias) is float32 or of the activations' dtype.
__device__ __forceinline__ float load_parameter(const void* data, int64_t at, DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return to_float(static_cast<const __half*>(data)[at]);
    case DType::kBFloat16:
      return to_float(static_cast<const __nv_bfloat16*>(data)[at]);
    default:
      return static_cast<const float*>(data)[at];
  }
}

// What is done to q.k besides the scale.
struct ScoreChange {
  View bias, slopes;
  DType bias_dtype = DType::kFloat32, slopes_dtype = DType::kFloat32;
  float scale = 1, softcap = 0;
};

// The same for one head.
struct HeadScore {
  const void* bias;  // NULL: none
  DType bias_dtype;
  int64_t bias_at, bias_row, bias_column;
  float slope, scale, softcap;
  int offset;

  __device__ __forceinline__ HeadScore(const ScoreChange& c, const Place& place,
                                       float operand_scale, int offset_) {
    bias = c.bias.data;
    bias_dtype = c.bias_dtype;
    bias_at = place.b * c.bias.batch + place.head * c.bias.head;
    bias_row = c.bias.row;
    bias_column = c.bias.column;
    slope =
        c.slopes.data == nullptr
            ? 0.f
            : load_parameter(c.slopes.data, place.b * c.slopes.batch + place.head * c.slopes.head,
                             c.slopes_dtype);
    scale = c.scale * operand_scale;
    softcap = c.softcap;
    offset = offset_;
  }

  // The score of query i and key j, natural; `squeezed` is tanh(x / cap), 0 without a cap.
  __device__ __forceinline__ float operator()(float dot, int i, int j, float* squeezed) const {
    float x = dot * scale;
    *squeezed = 0.f;
    if (softcap != 0.f) {
      *squeezed = tanhf(x / softcap);
      x = *squeezed * softcap;
    }
    if (bias != nullptr) {
      x += load_parameter(bias, bias_at + i * bias_row + j * bias_column, bias_dtype);
    }
    if (slope != 0.f) x -= slope * fabsf(static_cast<float>(i + offset - j));
    return x;
  }
};

// out or a gradient.
struct Result {
  void* data = nullptr;
  int64_t batch = 0, row = 0, head = 0, column = 0;
  DType dtype = DType::kFloat32;
  int columns = 0;
  bool pairs = false;    // two neighbours in one access
  bool vectors = false;  // 16 bytes in one access

  __device__ __forceinline__ int64_t at(int64_t b, int64_t r, int64_t h) const {
    return b * batch + r * row + h * head;
  }
  template <class T>
  __device__ __forceinline__ void store_as(int64_t at, int c, float x, float y) const {
    T* to = static_cast<T*>(data) + at;
    if (pairs) {
      if (c < columns) {
        const float pair[2] = {x, y};
        store(to + c, pack<T>(pair));
      }
      return;
    }
    if (c < columns) to[c * column] = from_float<T>(x);
    if (c + 1 < columns) to[(c + 1) * column] = from_float<T>(y);
  }
  __device__ __forceinline__ void store_one(int64_t at, float x) const {
    if (dtype == DType::kFloat32) {
      static_cast<float*>(data)[at] = x;
    } else if (dtype == DType::kFloat16) {
      static_cast<__half*>(data)[at] = from_float<__half>(x);
    } else {
      static_cast<__nv_bfloat16*>(data)[at] = from_float<__nv_bfloat16>(x);
    }
  }
  __device__ __forceinline__ void store_pair(int64_t at, int c, float x, float y) const {
    if (dtype == DType::kFloat32) {
      store_as<float>(at, c, x, y);
    } else if (dtype == DType::kFloat16) {
      store_as<__half>(at, c, x, y);
    } else {
      store_as<__nv_bfloat16>(at, c, x, y);
    }
  }
};

inline Result result_of(const Tensor& t) {
  if (!t) return {};
  const View view = fk::attention::view(t);
  const auto even = [](int64_t stride, int64_t size) { return size == 1 || stride % 2 == 0; };
  Result r;
  r.data = t.data;
  r.batch = view.batch;
  r.row = view.row;
  r.head = view.head;
  r.column = view.column;
  r.dtype = t.dtype;
  r.columns = static_cast<int>(t.size(-1));
  r.pairs = t.size(-1) % 2 == 0 && view.column == 1 &&
            reinterpret_cast<uintptr_t>(t.data) % (2 * size_of(t.dtype)) == 0;
  const int64_t width = 16 / size_of(t.dtype);
  r.vectors =
      t.size(-1) % width == 0 && view.column == 1 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  for (int i = 0; i + 1 < t.ndim; ++i) {
    r.pairs = r.pairs && even(t.strides[i], t.shape[i]);
    r.vectors = r.vectors && (t.shape[i] == 1 || t.strides[i] % width == 0);
  }
  return r;
}

}  // namespace fk::cuda::attention
