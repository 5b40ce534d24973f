// This file computes merge_attention_states on CUDA.
//
// Floor: memory traffic. The forward reads the parts' outputs once and writes one; the backward
// reads them and dout once and writes as many gradients.
//
// Tiling: a group of lanes takes one place (a head of a query), 16 bytes a lane at a time where the
// rows allow it, else single elements, of kParts parts at once. Every lane computes the weights by
// itself, from a few values that the group reads together; in the forward beside the sum, which is
// rescaled as larger ones come. The backward keeps each part's dout . out_s in dlses until their
// weighted sum is known.
#include <cfloat>
#include <cmath>

#include "cuda/any_element.cuh"
#include "cuda/row_partition.cuh"
#include "ops/merge_attention_states/merge_attention_states.h"
#include "ops/merge_attention_states/places.h"

namespace fk::cuda {
namespace {

using merge_attention_states::lse_strides;
using merge_attention_states::Place;
using merge_attention_states::Places;
using merge_attention_states::row_strides;
using merge_attention_states::Strides;

constexpr int kThreads = 256;
constexpr int kParts = 4;  // whose loads are in flight together

struct MergeArgs {
  Places places;
  DType dtype;
  int lanes = 1;  // of a group: a power of two, at most 32
  // In the forward `rows` is out. In the backward `rows` is dout, and `lse` is dlse.
  void* rows = nullptr;
  float* lse = nullptr;
  void* outs = nullptr;
  const float* lses = nullptr;
  void* douts = nullptr;
  float* dlses = nullptr;
  Strides rows_at, lse_at, outs_at, lses_at, douts_at, dlses_at;

  explicit MergeArgs(const Tensor& all_outs) : places(all_outs), dtype(all_outs.dtype) {}

  template <class T>
  __device__ __forceinline__ typename Pointer<T>::type pointer(void* data) const {
    return Pointer<T>::to(data, dtype);
  }
};

// Loads kWidth neighbouring columns, or a single one of Any, at any stride.
template <int kWidth, class T>
__device__ __forceinline__ Vec<T, kWidth> load_columns(const T* row, int64_t, int64_t column) {
  return load<kWidth>(row + column);
}
template <int kWidth>
__device__ __forceinline__ Vec<Any, kWidth> load_columns(const AnyPointer& row, int64_t stride,
                                                         int64_t column) {
  return load_overwritable_in_place<kWidth>(row + column * stride);
}

template <int kWidth, class T>
__device__ __forceinline__ void store_columns(T* row, int64_t, int64_t column,
                                              const float (&in)[kWidth]) {
  store(row + column, pack<T, kWidth>(in));
}
__device__ __forceinline__ void store_columns(const AnyPointer& row, int64_t stride, int64_t column,
                                              const float (&in)[1]) {
  row[column * stride] = Any(in[0]);
}

// Holds sum(exp(lse)) over the parts seen so far, as sum * exp(shift). The shift stays finite, so
// that no difference is inf - inf.
struct Total {
  float shift = -FLT_MAX;
  float sum = 0;

  // Adds kParts parts. `values` are their lse, and become their shares at the new shift. Returns
  // what sums at the old shift are to be multiplied by.
  __device__ __forceinline__ float add(float (&values)[kParts]) {
    float grown = shift;
#pragma unroll
    for (int j = 0; j < kParts; ++j) grown = fmaxf(grown, values[j]);
    grown = fminf(grown, FLT_MAX);
    const float shrink = expf(shift - grown);
    sum *= shrink;
    shift = grown;
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      values[j] = expf(values[j] - grown);
      sum += values[j];
    }
    return shrink;
  }
};

// Loads the lse of parts [first, first + kParts), with -inf for those there are not.
__device__ __forceinline__ void load_parts(const float* lses, int64_t stride, int64_t first,
                                           int64_t parts, float (&values)[kParts]) {
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    values[j] = first + j < parts ? lses[(first + j) * stride] : -INFINITY;
  }
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 2) merge(const __grid_constant__ MergeArgs a) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t index = block_index() * (kThreads / a.lanes) + threadIdx.x / a.lanes;
  const int lane = threadIdx.x & (a.lanes - 1);
  if (index >= a.places.count()) return;
  const Place place(a.places, index);
  const float* lses = a.lses + place.offset(a.lses_at);
  const auto outs = a.pointer<const T>(a.outs) + place.offset(a.outs_at);
  const auto out = a.pointer<T>(a.rows) + place.offset(a.rows_at);
  const int64_t columns = a.rows == nullptr ? 0 : a.places.columns;
  // The loop runs once at least, since lse is wanted of places without columns too.
  for (int64_t c = int64_t{lane} * kWidth; c < columns || c == lane * kWidth;
       c += a.lanes * kWidth) {
    Total total;
    float sums[kWidth] = {};
    for (int64_t first = 0; first < a.places.parts; first += kParts) {
      Vec<T, kWidth> x[kParts] = {};
      float share[kParts];
      bool alive[kParts];
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        if (first + j < a.places.parts && c < columns) {
          x[j] = load_columns<kWidth>(outs + (first + j) * a.outs_at.part, a.outs_at.column, c);
        }
      }
      load_parts(lses, a.lses_at.part, first, a.places.parts, share);
#pragma unroll
      for (int j = 0; j < kParts; ++j) alive[j] = share[j] != -INFINITY;
      const float shrink = total.add(share);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sums[i] *= shrink;
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        float values[kWidth];
        unpack(x[j], values);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sums[i] += alive[j] ? share[j] * values[i] : 0.f;
      }
    }
    if (c < columns) {
      const float inverse = total.sum == 0 ? 0.f : 1 / total.sum;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sums[i] *= inverse;
      store_columns(out, a.rows_at.column, c, sums);
    }
    if (a.lse != nullptr && c == 0) {
      a.lse[place.offset(a.lse_at)] = total.shift + logf(total.sum);
    }
  }
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 2) differentiate(const __grid_constant__ MergeArgs a) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t index = block_index() * (kThreads / a.lanes) + threadIdx.x / a.lanes;
  const int lane = threadIdx.x & (a.lanes - 1);
  // Lanes without a place follow the last one: sums over a warp need all of its lanes.
  const bool active = index < a.places.count();
  const Place place(a.places, active ? index : a.places.count() - 1);
  const int64_t parts = a.places.parts;
  const float* lses = a.lses + place.offset(a.lses_at);
  const auto dout = a.pointer<const T>(a.rows) + place.offset(a.rows_at);
  const auto outs = a.pointer<const T>(a.outs) + place.offset(a.outs_at);
  const auto douts = a.pointer<T>(a.douts) + place.offset(a.douts_at);
  float* dlses = a.dlses + place.offset(a.dlses_at);
  float delta = a.lse == nullptr ? 0.f : -a.lse[place.offset(a.lse_at)];
  Total total;
  for (int64_t first = 0; first < parts; first += kParts) {
    float share[kParts];
    load_parts(lses, a.lses_at.part, first, parts, share);
    total.add(share);
  }
  const float inverse = 1 / total.sum;

  for (int64_t first = 0; first < parts; first += kParts) {
    float weight[kParts], product[kParts] = {};
    load_parts(lses, a.lses_at.part, first, parts, weight);
    bool alive[kParts];
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      alive[j] = weight[j] != -INFINITY;
      weight[j] = expf(weight[j] - total.shift) * inverse;
    }
    for (int64_t c = int64_t{lane} * kWidth; c < a.places.columns; c += a.lanes * kWidth) {
      // All loads come before the first store, since the compiler could not move them ahead of it.
      Vec<T, kWidth> x[kParts] = {};
      float g[kWidth];
      unpack(load_columns<kWidth>(dout, a.rows_at.column, c), g);
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        if (a.dlses != nullptr && first + j < parts) {
          x[j] = load_columns<kWidth>(outs + (first + j) * a.outs_at.part, a.outs_at.column, c);
        }
      }
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        float values[kWidth];
        unpack(x[j], values);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) product[j] += g[i] * values[i];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) values[i] = alive[j] ? weight[j] * g[i] : 0.f;
        if (a.douts != nullptr && active && first + j < parts) {
          store_columns(douts + (first + j) * a.douts_at.part, a.douts_at.column, c, values);
        }
      }
    }
    if (a.dlses == nullptr) continue;
    for (int mask = a.lanes / 2; mask > 0; mask /= 2) {
#pragma unroll
      for (int j = 0; j < kParts; ++j) product[j] += shuffle_xor(product[j], mask);
    }
#pragma unroll
    for (int j = 0; j < kParts; ++j) delta += alive[j] ? weight[j] * product[j] : 0.f;
    if (lane != 0 || !active) continue;
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      if (first + j >= parts) continue;
      // This is final if these are all parts.
      const float value = parts > kParts ? product[j] : weight[j] * (product[j] - delta);
      dlses[(first + j) * a.dlses_at.part] = alive[j] ? value : 0.f;
    }
  }
  if (a.dlses == nullptr || parts <= kParts) return;
  __syncwarp();  // lane 0 has written what the others now read
  for (int64_t s = lane; s < parts && active; s += a.lanes) {
    const float lse = lses[s * a.lses_at.part];
    float& value = dlses[s * a.dlses_at.part];
    value = lse == -INFINITY ? 0.f : expf(lse - total.shift) * inverse * (value - delta);
  }
}

// Returns whether rows of unit stride start at 16-byte borders and have a whole number of vectors.
bool in_vectors(const Tensor& t) {
  if (!t) return true;
  const int64_t width = 16 / size_of(t.dtype);
  bool aligned = reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.size(-1) % width == 0 &&
                 (t.stride(-1) == 1 || t.size(-1) <= 1);
  for (int i = 0; i + 1 < t.ndim; ++i) {
    aligned = aligned && (t.shape[i] == 1 || t.strides[i] % width == 0);
  }
  return aligned;
}

template <class Kernel>
Status launch(Kernel kernel, const char* name, MergeArgs& a, int width, const Exec& exec) {
  a.lanes = power_of_two_at_least(
      std::min<int64_t>(kWarpSize, std::max<int64_t>(1, ceil_div(a.places.columns, width))));
  const dim3 blocks = grid_of(ceil_div(a.places.count(), kThreads / a.lanes));
  return launch_early(kernel, name, {blocks, kThreads}, stream_of(exec), a);
}

}  // namespace

Status run(const MergeAttentionStatesFwd& a, const Exec& exec) {
  MergeArgs m(a.outs);
  if (m.places.count() == 0) return {};
  m.rows = a.out.data;
  m.lse = a.lse.ptr<float>();
  m.outs = a.outs.data;
  m.lses = a.lses.ptr<const float>();
  m.rows_at = row_strides(a.out, false);
  m.lse_at = lse_strides(a.lse, false);
  m.outs_at = row_strides(a.outs, true);
  m.lses_at = lse_strides(a.lses, true);
  const bool vectors = in_vectors(a.outs) && in_vectors(a.out);
  if (!vectors) return launch(merge<Any, 1>, "merge", m, 1, exec);
  return for_dtype(a.outs.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = kVecWidth<T>;
    return launch(merge<T, kWidth>, "merge", m, kWidth, exec);
  });
}

Status run(const MergeAttentionStatesBwd& a, const Exec& exec) {
  MergeArgs m(a.outs);
  if (m.places.count() == 0) return {};
  m.rows = a.dout.data;
  m.lse = a.dlse.ptr<float>();
  m.outs = a.outs.data;
  m.lses = a.lses.ptr<const float>();
  m.douts = a.douts.data;
  m.dlses = a.dlses.ptr<float>();
  m.rows_at = row_strides(a.dout, false);
  m.lse_at = lse_strides(a.dlse, false);
  m.outs_at = row_strides(a.outs, true);
  m.lses_at = lse_strides(a.lses, true);
  m.douts_at = row_strides(a.douts, true);
  m.dlses_at = lse_strides(a.dlses, true);
  const bool vectors = in_vectors(a.dout) && in_vectors(a.outs) && in_vectors(a.douts);
  if (!vectors) return launch(differentiate<Any, 1>, "differentiate", m, 1, exec);
  return for_dtype(a.outs.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = kVecWidth<T>;
    return launch(differentiate<T, kWidth>, "differentiate", m, kWidth, exec);
  });
}

}  // namespace fk::cuda
