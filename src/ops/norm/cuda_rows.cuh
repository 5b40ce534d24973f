// What the norm kernels share: how a kernel sees its tensors, and which threads work on a row
// together.
#pragma once

#include <algorithm>

#include "core/rows.h"
#include "cuda/convert.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/reduce.cuh"

namespace fk::cuda::norm {

// A tensor of type [..., N], or of one entry per row. Without data: not given.
struct View {
  void* data = nullptr;
  int64_t column_stride = 1;
  int64_t row_stride = 0;
  // Where rows are split over several dims, the borders between those, innermost first. A row lies
  // row_stride times its index from the first, and a `step` for each time it is past a border, each
  // `size` rows or times past the border before.
  int borders = 0;
  struct Border {
    int64_t size, step;
    uint32_t factor, shift;  // x / size = (2 x * factor >> 32) >> shift for x < 2^31
  } border[kMaxDims - 1] = {};

  View() = default;
  View(const Tensor& t, int inner_dims) : data(t.data) {
    if (inner_dims > 0) column_stride = t.stride(-1);
    const Rows rows = rows_of(t, inner_dims);
    row_stride = rows.last_stride;
    for (int i = rows.ndim - 1; i > 0; --i) {
      const int64_t size = std::max<int64_t>(1, rows.sizes[i]);  // 0: there are no rows
      uint32_t shift = 0;
      while (int64_t{1} << shift < size && shift < 31) ++shift;
      const uint64_t factor = ((uint64_t{1} << (31 + shift)) + size - 1) / size;
      border[borders++] = {size, rows.strides[i - 1] - size * rows.strides[i],
                           static_cast<uint32_t>(factor), shift};
    }
  }

  explicit __device__ operator bool() const { return data != nullptr; }

  __device__ __forceinline__ int64_t offset(int64_t row) const {
    int64_t result = row * row_stride;
#pragma unroll 1  // the divisions are much code, and rarely run
    for (int i = 0; i < borders; ++i) {
      row /= border[i].size;
      result += row * border[i].step;
    }
    return result;
  }
  // The tiled kernels take fewer than 2^31 rows. kUnsplit: they are known not to be split.
  template <class T, bool kUnsplit = false>
  __device__ __forceinline__ T* row(uint32_t row) const {
    int64_t result = row * row_stride;
#pragma unroll 1
    for (int i = 0; !kUnsplit && i < borders; ++i) {
      row = __umulhi(2 * row, border[i].factor) >> border[i].shift;
      result += row * border[i].step;
    }
    return static_cast<T*>(data) + result;
  }
};

// A tensor of type P[N].
struct Parameter {
  const void* data = nullptr;
  int64_t stride = 1;
  bool is_float = false;  // else of the activations' dtype
  float otherwise = 0;    // its value where it is not given
  float offset = 0;       // added where it is given; else 0
};

// Entries [column, column + N) of a parameter that is given, in float32. N > 1 needs stride 1 and
// 16-byte alignment.
template <int N>
__device__ __forceinline__ void load_floats(const Parameter& p, int64_t column, float (&out)[N]) {
  constexpr int kPart = N < 4 ? N : 4;
  const float* data = after_wait(static_cast<const float*>(p.data) + column * p.stride);
#pragma unroll
  for (int i = 0; i < N; i += kPart) {
    const Vec<float, kPart> v = load_read_only<kPart>(data + i);
#pragma unroll
    for (int j = 0; j < kPart; ++j) out[i + j] = v.data[j] + p.offset;
  }
}

// The same of any parameter. kGiven: it is known to be given, in T.
template <class T, bool kGiven = false, int N>
__device__ __forceinline__ void load_parameter(const Parameter& p, int64_t column,
                                               float (&out)[N]) {
  if (!kGiven && p.data == nullptr) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = p.otherwise;
  } else if (std::is_same_v<T, float> || (!kGiven && p.is_float)) {
    load_floats(p, column, out);
  } else {
    if constexpr (!std::is_same_v<T, float>) {
      unpack(load_read_only<N>(after_wait(static_cast<const T*>(p.data) + column * p.stride)), out);
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] += p.offset;
    }
  }
}

// How the looped kernels reach the elements of tensors and parameters, kWidth at a time. Vectors
// need a unit column stride and rows aligned to 16 bytes.
template <class T>
struct Vectors {
  static constexpr int kWidth = kVecWidth<T>;
  explicit __device__ Vectors(DType) {}

  __device__ __forceinline__ void load(const void* data, int64_t at, float (&out)[kWidth]) const {
    unpack(cuda::load<kWidth>(static_cast<const T*>(data) + at), out);
  }
  __device__ __forceinline__ void store(void* data, int64_t at, const float (&in)[kWidth]) const {
    cuda::store(static_cast<T*>(data) + at, pack<T>(in));
  }
  __device__ __forceinline__ void round(float (&values)[kWidth]) const {
    unpack(pack<T>(values), values);
  }
  __device__ __forceinline__ void load(const Parameter& p, int64_t column,
                                       float (&out)[kWidth]) const {
    load_parameter<T>(p, column, out);
  }
};

// Single elements lie anyhow. Their type is known when the kernel runs: one kernel for all.
struct Elements {
  static constexpr int kWidth = 1;
  DType dtype;
  explicit __device__ Elements(DType dtype) : dtype(dtype) {}

  static __device__ __forceinline__ float value(const void* data, int64_t at, DType dtype) {
    if (dtype == DType::kFloat32) return static_cast<const float*>(data)[at];
    const uint16_t bits = static_cast<const uint16_t*>(data)[at];
    return dtype == DType::kFloat16 ? __half2float(__ushort_as_half(bits))
                                    : __uint_as_float(uint32_t{bits} << 16);
  }
  static __device__ __forceinline__ void put(void* data, int64_t at, DType dtype, float value) {
    if (dtype == DType::kFloat32) {
      static_cast<float*>(data)[at] = value;
    } else if (dtype == DType::kFloat16) {
      static_cast<__half*>(data)[at] = from_float<__half>(value);
    } else {
      static_cast<__nv_bfloat16*>(data)[at] = from_float<__nv_bfloat16>(value);
    }
  }

  __device__ __forceinline__ void load(const void* data, int64_t at, float (&out)[1]) const {
    out[0] = value(data, at, dtype);
  }
  __device__ __forceinline__ void store(void* data, int64_t at, const float (&in)[1]) const {
    put(data, at, dtype, in[0]);
  }
  __device__ __forceinline__ void round(float (&values)[1]) const {
    if (dtype == DType::kFloat16) values[0] = to_float(from_float<__half>(values[0]));
    if (dtype == DType::kBFloat16) values[0] = to_float(from_float<__nv_bfloat16>(values[0]));
  }
  __device__ __forceinline__ void load(const Parameter& p, int64_t column, float (&out)[1]) const {
    out[0] =
        p.data == nullptr
            ? p.otherwise
            : value(p.data, column * p.stride, p.is_float ? DType::kFloat32 : dtype) + p.offset;
  }
};

// The threads that work on one row: a warp, of which a block holds several, or a whole block.
template <int kTeam, int kBlock>
struct Team {
  static constexpr int kSize = kTeam;
  static constexpr int kThreads = kBlock;
  static constexpr int kCount = kBlock / kTeam;
  static constexpr int kWarps = kTeam / kWarpSize;
  static_assert(kTeam == kBlock || (kTeam == kWarpSize && kBlock % kTeam == 0));

  static __device__ __forceinline__ int rank() { return threadIdx.x % kTeam; }
  static __device__ __forceinline__ int index() { return threadIdx.x / kTeam; }

  // `scratch` is the team's own, of kWarps values; it may be used again after another barrier.
  template <class Value, class Merge>
  static __device__ __forceinline__ Value reduce(Value value, Merge merge, Value* scratch) {
    value = warp_reduce(value, merge);
    if constexpr (kWarps > 1) {
      const int lane = threadIdx.x % kWarpSize;
      if (lane == 0) scratch[rank() / kWarpSize] = value;
      __syncthreads();
      if constexpr (kWarps > 4) {
        value = warp_reduce<kWarps>(scratch[lane % kWarps], merge);
      } else {
        // Few enough for every thread to read them all, which is sooner done than shuffles.
        value = scratch[0];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) value = merge(value, scratch[w]);
      }
    }
    return value;
  }
};

// What __launch_bounds__ may ask for: `blocks` per multiprocessor, or as many as its threads allow.
// Turing, with 1024 threads and more instructions for bfloat16, is left twice the registers.
constexpr int min_blocks(int threads, int blocks) {
#if __CUDA_ARCH__ == 750
  constexpr int kMaxThreads = 512;
#elif __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
  constexpr int kMaxThreads = 1536;
#else
  constexpr int kMaxThreads = 2048;
#endif
  return blocks * threads <= kMaxThreads ? blocks : kMaxThreads / threads;
}

// sm_90 has kernels of their own for calls that give everything, which gain up to 3% (NOTES.md),
// and tiles cut for short rows. Elsewhere both are compiled to nothing, and the general kernels
// launched with the next wider tile: less than half the kernels to compile.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHasSpecial = false;
#else
constexpr bool kHasSpecial = true;
#endif
constexpr int kSpecialCode = 90;  // DeviceProperties::code from which on there are such kernels

// A thread's share of a row: kVecs vectors, vector i at position rank + i * team size.
template <class T, int kVecs>
using RowPart = Vec<T, kVecWidth<T>>[kVecs];

// A thread's share of a parameter, held in registers as it is stored. One in float32 beside 16-bit
// activations would take twice the room and is read again whenever it is asked for. kGiven: it is
// known to be given, in T.
template <class T, class Team, int kVecs, bool kGiven>
class HeldParameter {
 public:
  __device__ __forceinline__ HeldParameter(const Parameter& p, int vectors) : p_(p) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int v = Team::rank() + i * Team::kSize;
      if (v >= vectors) continue;
      if (!kGiven && p.data == nullptr) {
        float otherwise[kWidth];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) otherwise[j] = p.otherwise;
        held_[i] = pack<T>(otherwise);
      } else if (kGiven || std::is_same_v<T, float> || !p.is_float) {
        held_[i] = load_ordered<kWidth>(static_cast<const T*>(p.data) + v * kWidth);
      }
    }
  }
  // The thread's vector i. kOffset: whether there can be an offset.
  template <bool kOffset>
  __device__ __forceinline__ void get(int i, float (&out)[kVecWidth<T>]) const {
    if (!kGiven && !std::is_same_v<T, float> && p_.is_float) {
      load_floats(p_, (Team::rank() + i * Team::kSize) * kWidth, out);
      return;
    }
    Vec<T, kWidth> v = held_[i];
    if constexpr (!std::is_same_v<T, float>) {
      // Or a compiler converts once, ahead of the loop over the rows, and runs out of registers.
      uint4 words;
      memcpy(&words, &v, sizeof(v));
      asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
      memcpy(&v, &words, sizeof(v));
    }
    unpack(v, out);
    if constexpr (kOffset) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) out[j] += p_.offset;
    }
  }

 private:
  static constexpr int kWidth = kVecWidth<T>;
  const Parameter& p_;
  RowPart<T, kVecs> held_;
};

}  // namespace fk::cuda::norm
