// The passes of cuda_rotate.h. Floor: one read and one write of each element; scaled forms are read
// once more, for their largest magnitude.
#include <cuda_fp8.h>

#include "cuda/launch.h"
#include "ops/attention/cuda_rotate.h"
#include "ops/attention/cuda_scores.cuh"

namespace fk::cuda {

// Exact, and without the conversions that only later GPUs have: e4m3 moved into the place of a
// float16's exponent and mantissa is 2^-8 times its value.
template <>
__device__ __forceinline__ float to_float<__nv_fp8_e4m3>(__nv_fp8_e4m3 x) {
  const uint32_t bits = x.__x, magnitude = bits & 0x7f;
  const float value = 256.f * __half2float(__ushort_as_half(static_cast<unsigned short>(
                                  (bits & 0x80) << 8 | magnitude << 7)));
  return magnitude == 0x7f ? __uint_as_float(0x7fffffff) : value;
}

}  // namespace fk::cuda

namespace fk::cuda::attention {
namespace {

constexpr int kThreads = 256;

struct Rows {
  Problem problem;
  bool queries;
  Rotation rotation;
  int64_t batch, rows;  // of the tensor: 1 and all where sequences are packed
  int heads, columns;

  // The last packed sequence that began(b) holds for.
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
  // Column c of the rotated row, given its columns by value(c). direction -1: rotated back.
  template <class Value>
  __device__ __forceinline__ float rotated(int c, int64_t position, float direction,
                                           const Value& value) const {
    if (c >= 2 * rotation.pairs) return value(c);
    const int pair = rotation.interleaved ? c / 2 : c % rotation.pairs;
    const bool second = rotation.interleaved ? c % 2 : c >= rotation.pairs;
    const int other = rotation.interleaved ? c ^ 1 : second ? pair : pair + rotation.pairs;
    const float cosine = load_parameter(
        rotation.cos, position * rotation.cos_strides[0] + pair * rotation.cos_strides[1],
        rotation.cos_dtype);
    const float sine = load_parameter(
        rotation.sin, position * rotation.sin_strides[0] + pair * rotation.sin_strides[1],
        rotation.sin_dtype);
    return value(c) * cosine + (second ? direction : -direction) * value(other) * sine;
  }
};

// A quotient and what is left over; 32-bit divisions are far quicker.
__device__ __forceinline__ int64_t divide(int64_t a, int64_t b, int64_t* rest) {
  const int64_t quotient =
      ((a | b) >> 32) == 0 ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
  *rest = a - quotient * b;
  return quotient;
}

// 8 columns of a row: what one thread takes of a tensor without gaps.
struct Piece {
  int64_t index, place, b, row;  // piece, and row and head, in their order
  int head, first;               // column

  __device__ __forceinline__ explicit Piece(const Rows& rows) {
    index = (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * kThreads + threadIdx.x;
    int64_t rest;
    place = divide(index, (rows.columns + 7) / 8, &rest);
    first = static_cast<int>(rest) * 8;
    const int64_t token = divide(place, rows.heads, &rest);
    head = static_cast<int>(rest);
    b = divide(token, rows.rows, &row);
  }
};

struct Prepare {
  Rows rows;
  View x;
  uint16_t* to;
  int64_t low;
  uint32_t* maxima;
  bool vectors;
  View scales;

  // Of a row of 8-bit elements.
  __device__ __forceinline__ float scale(int64_t b, int64_t row, int head) const {
    if (scales.data == nullptr) return 1.f;
    const bool search = rows.problem.packed && scales.batch != 0;
    return fk::attention::Scales::at(scales, search ? rows.sequence(row) : b, head);
  }
};

// One thread takes 8 columns.
template <class T, Form kForm>
__global__ void __launch_bounds__(kThreads) prepare_rows(const __grid_constant__ Prepare p) {
  const Rows& rows = p.rows;
  const Piece piece(rows);
  if (piece.b >= rows.batch) return;
  const int first = piece.first;
  const T* x = static_cast<const T*>(p.x.data) + piece.b * p.x.batch + piece.row * p.x.row +
               piece.head * p.x.head;

  float values[8];
  if (p.vectors) {
    constexpr int kWidth = kVecWidth<T> < 8 ? kVecWidth<T> : 8;
#pragma unroll
    for (int i = 0; i < 8; i += kWidth) {
      float part[kWidth];
      unpack(load<kWidth>(x + first + i), part);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) values[i + e] = part[e];
    }
  } else {
    const int64_t position = rows.rotation.pairs > 0 ? rows.position(piece.row) : 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      values[e] = first + e < rows.columns
                      ? rows.rotated(first + e, position, 1.f,
                                     [&](int c) { return to_float(x[c * p.x.column]); })
                      : 0.f;
    }
  }
  if constexpr (kForm == Form::kSame) {
    store(reinterpret_cast<T*>(p.to) + piece.index * 8, pack<T>(values));
  } else {
    const int kv_heads = static_cast<int>(rows.problem.kv_heads);
    float factor =
        inverse_scale_of(p.maxima[piece.b * kv_heads + piece.head / (rows.heads / kv_heads)]);
    if constexpr (sizeof(T) == 1) factor *= p.scale(piece.b, piece.row, piece.head);
    // A rounded input's low term would be rounded again: rotate in float32, then split.
    float rest[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      values[e] *= factor;
      const float high = to_float(from_float<__half>(values[e]));
      rest[e] = isfinite(high) ? values[e] - high : 0.f;
    }
    __half* to = reinterpret_cast<__half*>(p.to) + piece.index * 8;
    store(to, pack<__half>(values));
    if constexpr (kForm == Form::kTwoTerms) store(to + p.low, pack<__half>(rest));
  }
}

// The largest finite magnitude of every batch entry and key head, rotated: tables may do more than
// turn (YaRN's also stretch).
template <class T>
__global__ void __launch_bounds__(kThreads)
    find_maxima(const __grid_constant__ Prepare p, int slices) {
  const Rows& rows = p.rows;
  const int64_t index = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  const int slice = static_cast<int>(index % slices);
  const int kv_heads = static_cast<int>(rows.problem.kv_heads);
  const int64_t entry = index / slices;
  if (entry >= rows.batch * kv_heads) return;
  const int group = rows.heads / kv_heads;
  const int64_t b = entry / kv_heads;
  const int first_head = static_cast<int>(entry - b * kv_heads) * group;
  const int width = p.vectors ? 8 : 1;
  const int pieces = group * rows.columns / width;  // of a row
  float largest = 0.f, scale = 1.f;
  const auto see = [&](float x) {
    x = fabsf(x * scale);
    if (x > largest && x <= 3.402823466e38f) largest = x;
  };
  const int64_t begin = rows.rows * slice / slices, end = rows.rows * (slice + 1) / slices;
  for (int64_t i = threadIdx.x; i < (end - begin) * pieces; i += kThreads) {
    const int64_t row = begin + i / pieces;
    const int rest = static_cast<int>(i % pieces) * width;
    const int head = first_head + rest / rows.columns, c = rest % rows.columns;
    if constexpr (sizeof(T) == 1) scale = p.scale(b, row, head);
    const T* x = static_cast<const T*>(p.x.data) + b * p.x.batch + row * p.x.row + head * p.x.head;
    if (p.vectors) {
      constexpr int kWidth = kVecWidth<T> < 8 ? kVecWidth<T> : 8;
#pragma unroll
      for (int j = 0; j < 8; j += kWidth) {
        float part[kWidth];
        unpack(load<kWidth>(x + c + j), part);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) see(part[e]);
      }
    } else {
      const int64_t position = rows.rotation.pairs > 0 ? rows.position(row) : 0;
      see(rows.rotated(c, position, 1.f, [&](int k) { return to_float(x[k * p.x.column]); }));
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  }
  // Of magnitudes, bits are in the same order as values.
  if (threadIdx.x % 32 == 0) atomicMax(&p.maxima[entry], __float_as_uint(largest));
}

struct Finish {
  Rows rows;
  const float* sums;
  int64_t columns;     // of the sums
  int64_t patch_rows;  // of a head; 0: sums lie as the gradient does
  Result gradient;
};

// Eight columns of a row, whose columns are given by value(c).
template <class Value>
__device__ __forceinline__ void finish_piece(const Finish& p, int64_t b, int64_t row, int head,
                                             int first, const Value& value) {
  const Rows& rows = p.rows;
  float values[8];
  if (rows.rotation.pairs == 0) {
#pragma unroll
    for (int e = 0; e < 8; ++e) values[e] = value(first + e);
  } else {
    const int64_t position = rows.position(row);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      values[e] = first + e < rows.columns ? rows.rotated(first + e, position, -1.f, value) : 0.f;
    }
  }
  p.gradient.store_eight(p.gradient.at(b, row, head), first, values);
}

__global__ void __launch_bounds__(kThreads) finish_rows(const __grid_constant__ Finish p) {
  const Piece piece(p.rows);
  if (piece.b >= p.rows.batch) return;
  const float* sums = p.sums + piece.place * p.columns;
  finish_piece(p, piece.b, piece.row, piece.head, piece.first, [&](int c) { return sums[c]; });
}

// Sums in patches (cuda_tiles.cuh): one thread takes two rows, 8 apart, of a patch.
__global__ void __launch_bounds__(kThreads) finish_patches(const __grid_constant__ Finish p) {
  const Rows& rows = p.rows;
  const int64_t index =
      (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * kThreads + threadIdx.x;
  int64_t piece, patch, head;
  const int64_t strip = divide(index / 8, p.columns / 8, &piece);
  const int64_t place = divide(strip, p.patch_rows / 16, &patch);
  const int64_t b = divide(place, rows.heads, &head);
  if (b >= rows.batch) return;
  int64_t row = patch * 16, end = rows.rows;
  if (rows.problem.packed) {
    const auto first_row = [&](int64_t s) {
      return first_patch_row(rows.problem, rows.problem.sequence(s).q_begin, s);
    };
    const int64_t s = rows.last_sequence([&](int64_t x) { return first_row(x) <= patch * 16; });
    const Sequence sequence = rows.problem.sequence(s);
    row += sequence.q_begin - first_row(s);
    end = sequence.q_begin + sequence.q_len;
  }
  const int in_patch = static_cast<int>(index % 8);
  const float* sums = p.sums + strip * p.columns * 16 + in_patch * 4 * kPatchLane;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row + in_patch + r * 8 < end) {
      finish_piece(
          p, b, row + in_patch + r * 8, static_cast<int>(head), static_cast<int>(piece) * 8,
          [&](int c) {
            return sums[c / 8 * 128 + c % 8 / 2 * kPatchLane + (r * 2 + c % 2) * kPatchElement];
          });
    }
  }
}

Rows rows_of_tensor(const Problem& problem, const Tensor& x, bool queries,
                    const Rotation& rotation) {
  Rows rows;
  rows.problem = problem;
  rows.queries = queries;
  rows.rotation = rotation;
  rows.batch = problem.packed ? 1 : problem.batch;
  rows.rows = x.size(-3);
  rows.heads = static_cast<int>(x.size(-2));
  rows.columns = static_cast<int>(x.size(-1));
  return rows;
}

template <class T, Form kForm>
Status launch_prepare(const Prepare& p, cudaStream_t stream) {
  const Rows& rows = p.rows;
  if constexpr (kForm != Form::kSame) {
    const int64_t entries = rows.batch * rows.problem.kv_heads;
    // About 64 KB of elements a block.
    const int64_t elements = rows.rows * rows.heads / rows.problem.kv_heads * rows.columns;
    const int slices = static_cast<int>(
        std::min<int64_t>(std::max<int64_t>(1, elements >> 14), std::max<int64_t>(1, rows.rows)));
    find_maxima<T><<<grid_of(entries * slices), kThreads, 0, stream>>>(p, slices);
    FK_RETURN_IF_ERROR(check_launch("attention find_maxima"));
  }
  const int64_t threads = rows.batch * rows.rows * rows.heads * ceil_div(rows.columns, 8);
  prepare_rows<T, kForm><<<grid_of(ceil_div(threads, kThreads)), kThreads, 0, stream>>>(p);
  return check_launch("attention prepare_rows");
}

}  // namespace

Status prepare(const Problem& problem, const Tensor& x, bool queries, const Rotation& rotation,
               Form form, uint32_t* maxima, void* to, cudaStream_t stream, const View& scales) {
  if (maxima != nullptr) {
    const int64_t entries = (problem.packed ? 1 : problem.batch) * problem.kv_heads;
    FK_RETURN_IF_ERROR(
        check(cudaMemsetAsync(maxima, 0, entries * sizeof(uint32_t), stream), "attention maxima"));
  }
  if (x.numel() == 0) return {};
  Prepare p;
  p.rows = rows_of_tensor(problem, x, queries, rotation);
  p.x = fk::attention::view(x);
  p.to = static_cast<uint16_t*>(to);
  p.low = prepared_elements(x);
  p.maxima = maxima;
  p.scales = scales;
  p.vectors = rotation.pairs == 0 && x.stride(-1) == 1 && x.size(-1) % 8 == 0 &&
              reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  for (int i = 0; i + 1 < x.ndim; ++i) {
    p.vectors = p.vectors && (x.shape[i] == 1 || x.strides[i] * size_of(x.dtype) % 16 == 0);
  }
  switch (x.dtype) {
    case DType::kFloat16:
      return launch_prepare<__half, Form::kSame>(p, stream);
    case DType::kBFloat16:
      return form == Form::kSame ? launch_prepare<__nv_bfloat16, Form::kSame>(p, stream)
                                 : launch_prepare<__nv_bfloat16, Form::kScaled>(p, stream);
    case DType::kFloat8E4M3:
      return launch_prepare<__nv_fp8_e4m3, Form::kScaled>(p, stream);
    default:
      return launch_prepare<float, Form::kTwoTerms>(p, stream);
  }
}

Status finish_gradient(const Problem& problem, const float* sums, int64_t columns, bool queries,
                       bool patches, const Rotation& rotation, const Tensor& gradient,
                       cudaStream_t stream) {
  if (gradient.numel() == 0) return {};
  Finish p;
  p.rows = rows_of_tensor(problem, gradient, queries, rotation);
  p.sums = sums;
  p.columns = columns;
  p.patch_rows = patches ? patch_rows(problem, p.rows.rows) : 0;
  p.gradient = result_of(gradient);
  const int64_t rows = p.rows.batch * p.rows.heads * (patches ? p.patch_rows / 2 : p.rows.rows);
  const auto kernel = patches ? finish_patches : finish_rows;
  kernel<<<grid_of(ceil_div(rows * (columns / 8), kThreads)), kThreads, 0, stream>>>(p);
  return check_launch("attention finish_gradient");
}

}  // namespace fk::cuda::attention
