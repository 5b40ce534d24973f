// The passes of cuda_rotate.h. Floor: one read and one write of each element; once more where
// scaled forms do not take the usual scale.
#include <cuda_fp8.h>

#include "cuda/dependent_launch.cuh"
#include "cuda/launch.h"
#include "cuda/reduce.cuh"
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
  bool pieces;  // what is rotated, and tables, can be read 8 columns or pairs at a time

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
  // The same for 8 columns from `first` on of a row at x, where `pieces`.
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

struct Prepare {
  Rows rows;
  View x;
  uint16_t* to;
  int64_t low;
  uint32_t *maxima, *found = nullptr;
  bool vectors;
  View scales;
  int slices, again_slices;  // of a batch entry's key head, for prepare_rows and prepare_again

  // Of a row of 8-bit elements.
  __device__ __forceinline__ float scale(int64_t b, int64_t row, int head) const {
    if (scales.data == nullptr) return 1.f;
    const bool search = rows.problem.packed && scales.batch != 0;
    return fk::attention::Scales::at(scales, search ? rows.sequence(row) : b, head);
  }
};

struct Preparations {
  Prepare tensors[kMostPreparations];  // blockIdx.z says which
};

// Eight columns, rotated.
template <class T, bool kVectors>
__device__ __forceinline__ void load_piece(const Prepare& p, int64_t b, int64_t row, int head,
                                           int first, float (&values)[8]) {
  const Rows& rows = p.rows;
  const T* x = static_cast<const T*>(p.x.data) + b * p.x.batch + row * p.x.row + head * p.x.head;
  if constexpr (kVectors) {
    constexpr int kWidth = kVecWidth<T> < 8 ? kVecWidth<T> : 8;
#pragma unroll
    for (int i = 0; i < 8; i += kWidth) {
      float part[kWidth];
      unpack(load<kWidth>(x + first + i), part);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) values[i + e] = part[e];
    }
  } else if (sizeof(T) == 2 && rows.pieces) {
    if constexpr (sizeof(T) == 2) rows.rotate_piece(x, first, row, 1.f, values);
  } else {
    const int64_t position = rows.rotation.pairs > 0 ? rows.position(row) : 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      values[e] = first + e < rows.columns
                      ? rows.rotated(first + e, position, 1.f,
                                     [&](int c) { return to_float(x[c * p.x.column]); })
                      : 0.f;
    }
  }
  if constexpr (sizeof(T) == 1) {
    const float scale = p.scale(b, row, head);
#pragma unroll
    for (int e = 0; e < 8; ++e) values[e] *= scale;
  }
}

// Piece `index` of the result.
template <Form kForm>
__device__ __forceinline__ void store_piece(const Prepare& p, int64_t index,
                                            const float (&values)[8], int exponent) {
  uint4 high, low;
  split_eight(values, power_of_two(254 - exponent), &high, &low);
  // Stores that the compiler does not take apart.
  uint16_t* to = p.to + index * 8;
  __stcg(reinterpret_cast<uint4*>(to), high);
  if constexpr (kForm == Form::kTwoTerms) {
    __stcg(reinterpret_cast<uint4*>(to + p.low), low);
  }
}

// What a block has: a slice of the rows of a batch entry, of all heads.
struct Slice {
  int64_t b, begin, end;
  int slice;

  __device__ __forceinline__ Slice(const Rows& rows, int slices) {
    int64_t rest;
    b = divide(static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x, slices, &rest);
    slice = static_cast<int>(rest);
    begin = rows.rows * slice / slices;
    end = rows.rows * (slice + 1) / slices;
  }

  // load(values, row, head, first column), then store(values, head, index in the result) of each 8
  // columns, by one thread, which has kAtOnce of them under way.
  template <int kAtOnce, class Load, class Store>
  __device__ __forceinline__ void for_pieces(const Rows& rows, const Load& load,
                                             const Store& store) const {
    const int head_pieces = (rows.columns + 7) / 8, pieces = rows.heads * head_pieces;  // of a row
    if (pieces == 0) return;
    int64_t row = begin + threadIdx.x / static_cast<unsigned>(pieces);
    int rest = static_cast<int>(threadIdx.x % static_cast<unsigned>(pieces));
#pragma unroll 1
    while (row < end) {
      float values[kAtOnce][8];
      int heads[kAtOnce];
      int64_t indices[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        heads[i] = -1;
        if (row >= end) continue;
        const int head = rest / head_pieces;
        heads[i] = head;
        indices[i] = (b * rows.rows + row) * pieces + rest;
        load(values[i], row, head, (rest - head * head_pieces) * 8);
        row += kThreads / pieces;
        rest += kThreads % pieces;
        if (rest >= pieces) {
          rest -= pieces;
          ++row;
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (heads[i] >= 0) store(values[i], heads[i], indices[i]);
      }
    }
  }
};

// Scaled forms: with the usual scale, and the largest finite magnitudes of slices are found on the
// way, of rotated values: tables may do more than turn (YaRN's also stretch).
template <class T, Form kForm, bool kVectors>
__global__ void __launch_bounds__(kThreads, kVectors ? 4 : 2)
    prepare_rows(const __grid_constant__ Preparations all) {
  extern __shared__ uint32_t maxima[];  // of key heads
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const Prepare& p = all.tensors[blockIdx.z];
  const Rows& rows = p.rows;
  const Slice slice(rows, p.slices);
  if (slice.b >= rows.batch) return;
  const auto load = [&](float(&values)[8], int64_t row, int head, int first) {
    load_piece<T, kVectors>(p, slice.b, row, head, first, values);
  };
  if constexpr (kForm == Form::kSame) {
    slice.for_pieces<1>(rows, load, [&](const float(&values)[8], int, int64_t index) {
      store(reinterpret_cast<T*>(p.to) + index * 8, pack<T>(values));
    });
  } else {
    const int kv_heads = static_cast<int>(rows.problem.kv_heads), group = rows.heads / kv_heads;
    for (int i = threadIdx.x; i < kv_heads; i += kThreads) maxima[i] = 0;
    __syncthreads();
    float largest = 0.f;
    int largest_head = 0;
    // Of magnitudes, bits are in the same order as values.
    const auto add = [&] {
      const uint32_t bits = __float_as_uint(largest);
      if (bits > maxima[largest_head]) atomicMax(&maxima[largest_head], bits);
    };
    constexpr int kAtOnce = kVectors ? 2 : 1;
    slice.for_pieces<kAtOnce>(rows, load, [&](const float(&values)[8], int head, int64_t index) {
      store_piece<kForm>(p, index, values, kUsualExponent);
      const int kv_head = group == 1 ? head : head / group;
      if (kv_head != largest_head) {
        add();
        largest_head = kv_head;
        largest = 0.f;
      }
      largest = larger_finite(largest, values);
    });
    add();
    __syncthreads();
    for (int i = threadIdx.x; i < kv_heads; i += kThreads) {
      p.found[(slice.b * kv_heads + i) * p.slices + slice.slice] = maxima[i];
    }
  }
}

// Again, those heads that do not take the usual scale.
template <class T, Form kForm>
__global__ void __launch_bounds__(kThreads)
    prepare_again(const __grid_constant__ Preparations all) {
  extern __shared__ uint32_t maxima[];  // of key heads
  wait_for_earlier_kernels();
  const Prepare& p = all.tensors[blockIdx.z];
  const Rows& rows = p.rows;
  const Slice slice(rows, p.again_slices);
  if (slice.b >= rows.batch) return;
  const int kv_heads = static_cast<int>(rows.problem.kv_heads), group = rows.heads / kv_heads;
  bool any = false;
  for (int i = threadIdx.x / kWarpSize; i < kv_heads; i += kThreads / kWarpSize) {
    const int64_t entry = slice.b * kv_heads + i;
    uint32_t largest = 0;
    for (int j = threadIdx.x % kWarpSize; j < p.slices; j += kWarpSize) {
      largest = max(largest, p.found[entry * p.slices + j]);
    }
    largest = warp_reduce(largest, [](uint32_t x, uint32_t y) { return x > y ? x : y; });
    maxima[i] = largest;
    if (slice.slice == 0) p.maxima[entry] = largest;
    any = any || operand_exponent(largest) != kUsualExponent;
  }
  if (!__syncthreads_or(any)) return;
  slice.for_pieces<1>(
      rows,
      [&](float(&values)[8], int64_t row, int head, int first) {
        if (operand_exponent(maxima[head / group]) == kUsualExponent) return;
        if (p.vectors) {
          load_piece<T, true>(p, slice.b, row, head, first, values);
        } else {
          load_piece<T, false>(p, slice.b, row, head, first, values);
        }
      },
      [&](const float(&values)[8], int head, int64_t index) {
        const int exponent = operand_exponent(maxima[head / group]);
        if (exponent != kUsualExponent) store_piece<kForm>(p, index, values, exponent);
      });
}

struct Finish {
  Rows rows;
  const void* sums;
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

template <class T>
__global__ void __launch_bounds__(kThreads) finish_rows(const __grid_constant__ Finish p) {
  const Rows& rows = p.rows;
  int64_t piece, head, row;
  const int64_t place =
      divide((static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * kThreads + threadIdx.x,
             (rows.columns + 7) / 8, &piece);
  const int64_t b = divide(divide(place, rows.heads, &head), rows.rows, &row);
  if (b >= rows.batch) return;
  const int first = static_cast<int>(piece) * 8;
  const T* sums = static_cast<const T*>(p.sums) + place * p.columns;
  if constexpr (sizeof(T) == 2) {
    if (rows.pieces) {
      float values[8];
      rows.rotate_piece(sums, first, row, -1.f, values);
      p.gradient.store_eight(p.gradient.at(b, row, head), first, values);
      return;
    }
  }
  finish_piece(p, b, row, static_cast<int>(head), first, [&](int c) { return to_float(sums[c]); });
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
  const float* sums =
      static_cast<const float*>(p.sums) + strip * p.columns * 16 + in_patch * 4 * kPatchLane;
  if (rows.rotation.pairs == 0) {
    float values[2][8];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      float four[4];
      const float* from = sums + piece * 128 + pair * kPatchLane;
      if constexpr (kPatchElement == 1) {
        unpack(load<4>(from), four);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) four[e] = from[e * kPatchElement];
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e / 2][pair * 2 + e % 2] = four[e];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + in_patch + r * 8 < end) {
        p.gradient.store_eight(p.gradient.at(b, row + in_patch + r * 8, head),
                               static_cast<int>(piece) * 8, values[r]);
      }
    }
    return;
  }
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

// Whether 16 bytes at a time can be read of its rows.
bool vectors_fit(const Tensor& x) {
  bool fit =
      x.stride(-1) == 1 && x.size(-1) % 8 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  for (int i = 0; i + 1 < x.ndim; ++i) {
    fit = fit && (x.shape[i] == 1 || x.strides[i] * size_of(x.dtype) % 16 == 0);
  }
  return fit;
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
  const auto aligned = [](const void* data, int64_t stride, DType dtype) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * size_of(dtype) % 16 == 0;
  };
  rows.pieces = rotation.pairs % (rotation.interleaved ? 4 : 8) == 0 && vectors_fit(x) &&
                rotation.cos_strides[1] == 1 && rotation.sin_strides[1] == 1 &&
                aligned(rotation.cos, rotation.cos_strides[0], rotation.cos_dtype) &&
                aligned(rotation.sin, rotation.sin_strides[0], rotation.sin_dtype);
  return rows;
}

dim3 tensor_grid(int64_t blocks, int count) {
  dim3 grid = grid_of(blocks);
  grid.z = static_cast<unsigned>(count);
  return grid;
}

// Shared memory for a word a key head.
int head_bytes(const Preparations& all) {
  return static_cast<int>(all.tensors[0].rows.problem.kv_heads * sizeof(uint32_t));
}

// Those of the tensors that are read in this way.
template <class T, Form kForm, bool kVectors>
Status launch_rows(const Preparations& all, int count, cudaStream_t stream) {
  Preparations these;
  int used = 0, slices = 0;
  for (int i = 0; i < count; ++i) {
    const Prepare& p = all.tensors[i];
    if (p.vectors != kVectors) continue;
    slices = std::max(slices, p.slices);
    these.tensors[used++] = p;
  }
  if (used == 0) return {};
  const dim3 grid = tensor_grid(these.tensors[0].rows.batch * slices, used);
  return launch_early(prepare_rows<T, kForm, kVectors>, "attention prepare_rows",
                      {grid, kThreads, head_bytes(these)}, stream, these);
}

template <class T, Form kForm>
Status launch_prepare(const Preparations& all, int count, cudaStream_t stream) {
  FK_RETURN_IF_ERROR((launch_rows<T, kForm, false>(all, count, stream)));
  if constexpr (kForm == Form::kSame) {
    return {};  // rotated, and so column by column
  } else {
    FK_RETURN_IF_ERROR((launch_rows<T, kForm, true>(all, count, stream)));
    int slices = 0;
    for (int i = 0; i < count; ++i) slices = std::max(slices, all.tensors[i].again_slices);
    const dim3 grid = tensor_grid(all.tensors[0].rows.batch * slices, count);
    return launch_early(prepare_again<T, kForm>, "attention prepare_again",
                        {grid, kThreads, head_bytes(all)}, stream, all);
  }
}

Prepare prepare_of(const Problem& problem, const Preparation& tensor) {
  const Tensor& x = *tensor.x;
  Prepare p;
  p.rows = rows_of_tensor(problem, x, tensor.queries, tensor.rotation);
  p.x = fk::attention::view(x);
  p.to = static_cast<uint16_t*>(tensor.to);
  p.low = prepared_elements(x);
  p.maxima = tensor.maxima;
  p.scales = tensor.scales;
  p.vectors = tensor.rotation.pairs == 0 && vectors_fit(x);
  const int64_t rows = std::max<int64_t>(1, p.rows.rows);
  const int64_t pieces = rows * p.rows.heads * ceil_div(p.rows.columns, 8);
  const auto slices = [&](int64_t each, int64_t most) {
    return static_cast<int>(std::clamp<int64_t>(pieces / each, 1, std::min(most, rows)));
  };
  p.slices = slices(kThreads, most_slices(p.rows.batch));
  p.again_slices = slices(1 << 15, rows);  // a megabyte of float32
  if (p.maxima != nullptr) p.found = p.maxima + p.rows.batch * problem.kv_heads;
  return p;
}

}  // namespace

Status prepare(const Problem& problem, Form form, const Preparation* tensors, int count,
               cudaStream_t stream) {
  if (problem.batch * problem.kv_heads == 0) return {};
  Preparations all;
  // Empty ones too: their maxima are read.
  for (int i = 0; i < count; ++i) all.tensors[i] = prepare_of(problem, tensors[i]);
  switch (tensors[0].x->dtype) {
    case DType::kFloat16:
      return launch_prepare<__half, Form::kSame>(all, count, stream);
    case DType::kBFloat16:
      return form == Form::kSame ? launch_prepare<__nv_bfloat16, Form::kSame>(all, count, stream)
                                 : launch_prepare<__nv_bfloat16, Form::kScaled>(all, count, stream);
    case DType::kFloat8E4M3:
      return launch_prepare<__nv_fp8_e4m3, Form::kScaled>(all, count, stream);
    default:
      return launch_prepare<float, Form::kTwoTerms>(all, count, stream);
  }
}

namespace {

Status finish(const Problem& problem, const void* sums, int64_t columns, bool queries, bool patches,
              const Rotation& rotation, const Tensor& gradient, void (*kernel)(Finish),
              cudaStream_t stream) {
  if (gradient.numel() == 0) return {};
  Finish p;
  p.rows = rows_of_tensor(problem, gradient, queries, rotation);
  p.sums = sums;
  p.columns = columns;
  p.patch_rows = patches ? patch_rows(problem, p.rows.rows) : 0;
  p.gradient = result_of(gradient);
  const int64_t rows = p.rows.batch * p.rows.heads * (patches ? p.patch_rows / 2 : p.rows.rows);
  kernel<<<grid_of(ceil_div(rows * ceil_div(columns, 8), kThreads)), kThreads, 0, stream>>>(p);
  return check_launch("attention finish_gradient");
}

}  // namespace

Status finish_gradient(const Problem& problem, const float* sums, int64_t columns, bool queries,
                       bool patches, const Rotation& rotation, const Tensor& gradient,
                       cudaStream_t stream) {
  return finish(problem, sums, columns, queries, patches, rotation, gradient,
                patches ? finish_patches : finish_rows<float>, stream);
}

Status rotate_back(const Problem& problem, const void* x, bool queries, const Rotation& rotation,
                   const Tensor& gradient, cudaStream_t stream) {
  return finish(
      problem, x, gradient.size(-1), queries, false, rotation, gradient,
      gradient.dtype == DType::kFloat16 ? finish_rows<__half> : finish_rows<__nv_bfloat16>, stream);
}

}  // namespace fk::cuda::attention
