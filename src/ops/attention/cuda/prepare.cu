// This is the pass ahead of the attention kernels (cuda/rotate.h). Its floor is one read and one
// write of each element, and another where scaled forms do not take the usual scale.
#include "cuda/dependent_launch.cuh"
#include "cuda/float8.cuh"
#include "cuda/reduce.cuh"
#include "ops/attention/cuda/rotate.cuh"

namespace fk::cuda::attention {
namespace {

struct Prepare {
  Rows rows;
  View x;
  uint16_t* to;
  int64_t low;
  uint32_t *maxima, *found = nullptr;
  bool vectors;
  View scales;
  RowStatistics statistics;
  uint32_t* delta_found = nullptr;
  int slices, again_slices;  // of a batch entry's key head, for prepare_rows and prepare_again

  // Returns the scale of a row of 8-bit elements.
  __device__ __forceinline__ float scale(int64_t b, int64_t row, int head) const {
    if (scales.data == nullptr) return 1.f;
    const bool search = rows.problem.packed && scales.batch != 0;
    return fk::attention::Scales::at(scales, search ? rows.sequence(row) : b, head);
  }
};

struct Preparations {
  Prepare tensors[kMostPreparations];  // blockIdx.z says which
  float4* sums;                        // to be zeroed
  int64_t sum_count;

  __device__ __forceinline__ void zero_sums() const {
    const int64_t blocks = static_cast<int64_t>(gridDim.x) * gridDim.y * gridDim.z;
    int64_t i =
        (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
#pragma unroll 1
    for (i = i * kPassThreads + threadIdx.x; i < sum_count; i += blocks * kPassThreads) {
      sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
};

// Loads eight columns, rotated.
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
    rows.rotate_columns(
        first, row, 1.f, [&](int c) { return to_float(x[c * p.x.column]); }, values);
  }
  if constexpr (sizeof(T) == 1) {
    const float scale = p.scale(b, row, head);
#pragma unroll
    for (int e = 0; e < 8; ++e) values[e] *= scale;
  }
}

// Holds eight columns on their way, and the sum of their products with those of out.
struct Piece {
  float values[8];
  float product = 0.f;
};

__device__ __forceinline__ float times_out(const RowStatistics& s, int64_t b, int64_t row, int head,
                                           int first, const float (&values)[8]) {
  const float* out = static_cast<const float*>(s.out.data) + b * s.out.batch + row * s.out.row +
                     head * s.out.head + first;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    float four[4];
    unpack(load<4>(out + i), four);
#pragma unroll
    for (int e = 0; e < 4; ++e) sum = fmaf(values[i + e], four[e], sum);
  }
  return sum;
}

// Stores piece `index` of the result.
template <Form kForm>
__device__ __forceinline__ void store_piece(const Prepare& p, int64_t index,
                                            const float (&values)[8], int exponent) {
  uint4 high, low;
  split_eight(values, power_of_two(254 - exponent), &high, &low);
  // The compiler does not take these stores apart.
  uint16_t* to = p.to + index * 8;
  __stcg(reinterpret_cast<uint4*>(to), high);
  if constexpr (kForm == Form::kTwoTerms) {
    __stcg(reinterpret_cast<uint4*>(to + p.low), low);
  }
}

// A block has a slice of the rows of a batch entry, of all heads.
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

  // Calls load(piece, row, head, first column), then store(piece, row, head, index in the result)
  // for each 8 columns. One thread has kAtOnce of them under way.
  template <int kAtOnce, class Load, class Store>
  __device__ __forceinline__ void for_pieces(const Rows& rows, const Load& load,
                                             const Store& store) const {
    const int head_pieces = (rows.columns + 7) / 8, pieces = rows.heads * head_pieces;  // of a row
    if (pieces == 0) return;
    int64_t row = begin + threadIdx.x / static_cast<unsigned>(pieces);
    int rest = static_cast<int>(threadIdx.x % static_cast<unsigned>(pieces));
#pragma unroll 1
    while (row < end) {
      Piece values[kAtOnce];
      int heads[kAtOnce];
      int64_t indices[kAtOnce], rows_at[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        heads[i] = -1;
        if (row >= end) continue;
        const int head = rest / head_pieces;
        heads[i] = head;
        rows_at[i] = row;
        indices[i] = (b * rows.rows + row) * pieces + rest;
        load(values[i], row, head, (rest - head * head_pieces) * 8);
        row += kPassThreads / pieces;
        rest += kPassThreads % pieces;
        if (rest >= pieces) {
          rest -= pieces;
          ++row;
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (heads[i] >= 0) store(values[i], rows_at[i], heads[i], indices[i]);
      }
    }
  }
};

// Scaled forms are written with the usual scale, and the largest finite magnitudes of slices are
// found on the way. They are those of rotated values, since tables may do more than turn (YaRN's
// also stretch).
template <class T, Form kForm, bool kVectors>
__global__ void __launch_bounds__(kPassThreads, kVectors ? 4 : 2)
    prepare_rows(const __grid_constant__ Preparations all) {
  extern __shared__ uint32_t maxima[];  // of key heads, and of delta
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if constexpr (kForm != Form::kSame) all.zero_sums();
  const Prepare& p = all.tensors[blockIdx.z];
  const Rows& rows = p.rows;
  const Slice slice(rows, p.slices);
  if (slice.b >= rows.batch) return;
  const bool statistics = kForm == Form::kTwoTerms && kVectors && p.statistics.exponents != nullptr;
  const auto load = [&](Piece& x, int64_t row, int head, int first) {
    load_piece<T, kVectors>(p, slice.b, row, head, first, x.values);
    if (statistics) x.product = times_out(p.statistics, slice.b, row, head, first, x.values);
  };
  if constexpr (kForm == Form::kSame) {
    slice.for_pieces<1>(rows, load, [&](const Piece& x, int64_t, int, int64_t index) {
      constexpr int kWidth = kVecWidth<T> < 8 ? kVecWidth<T> : 8;
#pragma unroll
      for (int i = 0; i < 8; i += kWidth) {
        float part[kWidth];
#pragma unroll
        for (int e = 0; e < kWidth; ++e) part[e] = x.values[i + e];
        store(reinterpret_cast<T*>(p.to) + index * 8 + i, pack<T>(part));
      }
    });
  } else {
    const int kv_heads = static_cast<int>(rows.problem.kv_heads), group = rows.heads / kv_heads;
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * kv_heads; i += kPassThreads) maxima[i] = 0;
    __syncthreads();
    float largest = 0.f;
    int largest_head = 0;
    // The bits of magnitudes are in the same order as their values. Others may raise the maximum at
    // the same time: the look ahead of the atomic, which mostly saves it, is volatile for that.
    const auto add_to = [&](int at, float magnitude) {
      const uint32_t bits = __float_as_uint(magnitude);
      const volatile uint32_t& maximum = maxima[at];
      if (bits > maximum) atomicMax(&maxima[at], bits);
    };
    const auto add = [&] { add_to(largest_head, largest); };
    constexpr int kAtOnce = kVectors ? 2 : 1;
    slice.for_pieces<kAtOnce>(
        rows, load, [&](const Piece& x, int64_t row, int head, int64_t index) {
          store_piece<kForm>(p, index, x.values, kUsualExponent);
          const int kv_head = group == 1 ? head : head / group;
          if (statistics) {
            // The pieces of a row and head lie in neighbouring lanes (takes_statistics).
            const unsigned pieces = static_cast<unsigned>(rows.columns) / 8,
                           lane = threadIdx.x % 32;
            const unsigned mask = (0xffffffffu >> (32 - pieces)) << (lane & ~(pieces - 1));
            float sum = x.product;
            for (unsigned step = pieces / 2; step > 0; step /= 2) {
              sum += __shfl_xor_sync(mask, sum, step);
            }
            if ((lane & (pieces - 1)) == 0) {
              const float delta = p.statistics.store(rows.problem, slice.b, row, head, sum);
              if (isfinite(delta)) add_to(kv_heads + kv_head, fabsf(delta));
            }
          }
          if (kv_head != largest_head) {
            add();
            largest_head = kv_head;
            largest = 0.f;
          }
          largest = larger_finite(largest, x.values);
        });
    add();
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < kv_heads; i += kPassThreads) {
      const int64_t at = (slice.b * kv_heads + i) * p.slices + slice.slice;
      p.found[at] = maxima[i];
      if (statistics) p.delta_found[at] = maxima[kv_heads + i];
    }
  }
}

// Writes those heads again that do not take the usual scale.
template <class T, Form kForm>
__global__ void __launch_bounds__(kPassThreads, 4)
    prepare_again(const __grid_constant__ Preparations all) {
  extern __shared__ uint32_t maxima[];  // of key heads
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const Prepare& p = all.tensors[blockIdx.z];
  const Rows& rows = p.rows;
  const Slice slice(rows, p.again_slices);
  if (slice.b >= rows.batch) return;
  const int kv_heads = static_cast<int>(rows.problem.kv_heads), group = rows.heads / kv_heads;
  bool any = false;
  for (int i = threadIdx.x / kWarpSize; i < kv_heads; i += kPassThreads / kWarpSize) {
    const int64_t entry = slice.b * kv_heads + i;
    const auto largest_of = [&](const uint32_t* found) {
      uint32_t x = 0;
#pragma unroll 4
      for (int j = threadIdx.x % kWarpSize; j < p.slices; j += kWarpSize) {
        x = max(x, found[entry * p.slices + j]);
      }
      return warp_reduce(x, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
    };
    const uint32_t largest = largest_of(p.found);
    maxima[i] = largest;
    if (slice.slice == 0) {
      p.maxima[entry] = largest;
      if (p.delta_found != nullptr) p.statistics.maxima[entry] = largest_of(p.delta_found);
    }
    any = any || operand_exponent(largest) != kUsualExponent;
  }
  if (!__syncthreads_or(any)) return;
  slice.for_pieces<1>(
      rows,
      [&](Piece& x, int64_t row, int head, int first) {
        if (operand_exponent(maxima[head / group]) == kUsualExponent) return;
        if (p.vectors) {
          load_piece<T, true>(p, slice.b, row, head, first, x.values);
        } else {
          load_piece<T, false>(p, slice.b, row, head, first, x.values);
        }
      },
      [&](const Piece& x, int64_t, int head, int64_t index) {
        const int exponent = operand_exponent(maxima[head / group]);
        if (exponent != kUsualExponent) store_piece<kForm>(p, index, x.values, exponent);
      });
}

dim3 tensor_grid(int64_t blocks, int count) {
  dim3 grid = grid_of(blocks);
  grid.z = static_cast<unsigned>(count);
  return grid;
}

// Returns the shared memory for two words a key head.
int head_bytes(const Preparations& all) {
  return static_cast<int>(all.tensors[0].rows.problem.kv_heads * 2 * sizeof(uint32_t));
}

// Launches the pass for those of the tensors that are read in this way.
template <class T, Form kForm, bool kVectors>
Status launch_rows(const Preparations& all, int count, cudaStream_t stream) {
  Preparations these = all;
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
                      {grid, kPassThreads, head_bytes(these)}, stream, these);
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
                        {grid, kPassThreads, head_bytes(all)}, stream, all);
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
  p.slices = slices(kPassThreads, most_slices(p.rows.batch));
  p.again_slices = slices(1 << 15, rows);  // a megabyte of float32
  const int64_t entries = p.rows.batch * problem.kv_heads;
  if (p.maxima != nullptr) p.found = p.maxima + entries;
  if (tensor.statistics != nullptr) {
    p.statistics = *tensor.statistics;
    p.delta_found = p.statistics.maxima + entries;
  }
  return p;
}

}  // namespace

bool takes_statistics(const Tensor& dout, const Tensor& out) {
  const int64_t pieces = dout.size(-1) / 8;
  return dout.dtype == DType::kFloat32 && vectors_fit(dout) && vectors_fit(out) && pieces > 0 &&
         32 % pieces == 0;
}

Status prepare(const Problem& problem, Form form, const Preparation* tensors, int count,
               cudaStream_t stream, float* sums, int64_t sum_count) {
  if (problem.batch * problem.kv_heads == 0) return {};
  Preparations all;
  all.sums = reinterpret_cast<float4*>(sums);
  all.sum_count = sum_count / 4;
  // Empty tensors are included, since their maxima are read.
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
      return form == Form::kSame ? launch_prepare<float, Form::kSame>(all, count, stream)
                                 : launch_prepare<float, Form::kTwoTerms>(all, count, stream);
  }
}

}  // namespace fk::cuda::attention
