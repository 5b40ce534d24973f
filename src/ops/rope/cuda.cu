// This file computes rope, the rotary position embedding, on CUDA; the backward is the same
// rotation the other way round.
//
// Floor: one read and one write of x; the tables' rows are read once per token and stay in L1.
//
// Fast path (heads of unit stride, 16-byte borders): a thread takes one 16-byte vector of pairs,
// loads its cosines and sines once, and applies them to kHeads heads, whose loads are all in flight
// before the first is used. Anything else goes one pair per thread. In place is safe: both members
// of a pair are read and written by one thread.
#include "cuda/any_element.cuh"
#include "cuda/row_partition.cuh"
#include "ops/rope/rope.h"

namespace fk::cuda {
namespace {

constexpr int kHeads = 4;
constexpr int kRotateThreads = 256;

struct RopeArgs {
  void *x, *y, *cos, *sin;
  DType dtype, cos_dtype, sin_dtype;
  const void* positions;  // NULL: a token's index
  bool wide_positions;    // int64, not int32
  bool interleaved;
  float direction;
  int64_t batch, tokens, heads;
  int64_t pairs;  // R
  int64_t rest;   // entries per head that pass through; 0 in place, where they are there already
  int64_t table_rows;
  int64_t x_strides[4], y_strides[4], cos_strides[2], sin_strides[2], position_strides[2];

  // Returns the table row of a token, or -1 if there is none.
  __device__ __forceinline__ int64_t position(int64_t b, int64_t l) const {
    if (positions == nullptr) return l;
    const int64_t at = b * position_strides[0] + l * position_strides[1];
    const int64_t p = wide_positions ? static_cast<const int64_t*>(positions)[at]
                                     : static_cast<const int32_t*>(positions)[at];
    return p >= 0 && p < table_rows ? p : -1;
  }
};

// Loads kCount neighbouring entries of a table.
template <int kCount, class P>
__device__ __forceinline__ void load_table(const P* p, float (&out)[kCount]) {
  constexpr int kStep = kCount < kVecWidth<P> ? kCount : kVecWidth<P>;
  p = after_wait(p);
#pragma unroll
  for (int i = 0; i < kCount; i += kStep) {
    float values[kStep];
    unpack(load_read_only<kStep>(p + i), values);
#pragma unroll
    for (int e = 0; e < kStep; ++e) out[i + e] = values[e];
  }
}

template <class T, class P, bool kInterleaved>
__global__ void __launch_bounds__(kRotateThreads, 2)
    rotate_vectors(const __grid_constant__ RopeArgs a, int head_steps, int per_head) {
  constexpr int kWidth = kVecWidth<T>;
  constexpr int kPairs = kInterleaved ? kWidth / 2 : kWidth;  // in a vector, or in two
  constexpr int kVectors = kInterleaved ? 1 : 2;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int per_token = head_steps * per_head;
  const int tokens_per_block = max(1, kRotateThreads / per_token);
  const int slot = tokens_per_block == 1 ? 0 : threadIdx.x / per_token;
  const int64_t token = block_index() * tokens_per_block + slot;
  if (slot >= tokens_per_block || token >= a.batch * a.tokens) return;
  const int64_t b = token / a.tokens;
  const int64_t l = token - b * a.tokens;
  const T* x = static_cast<const T*>(a.x) + b * a.x_strides[0] + l * a.x_strides[1];
  T* y = static_cast<T*>(a.y) + b * a.y_strides[0] + l * a.y_strides[1];
  const int rotated = static_cast<int>(a.pairs) / kPairs;

  for (int item = threadIdx.x - slot * per_token; item < per_token; item += kRotateThreads) {
    const int step = item / per_head;
    const int k = item - step * per_head;
    const bool rotates = k < rotated;
    // This is the offset of the thread's vector in a head; its second vector lies one half further
    // on.
    const int64_t at = rotates ? int64_t{k} * kWidth : 2 * a.pairs + int64_t{k - rotated} * kWidth;
    Vec<T, kWidth> v[kHeads][kVectors];
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      const int64_t head = step + int64_t{j} * head_steps;
      if (head < a.heads) {
        v[j][0] = load_overwritable_in_place<kWidth, false>(x + head * a.x_strides[2] + at);
        if (kVectors == 2 && rotates) {
          v[j][kVectors - 1] =
              load_overwritable_in_place<kWidth, false>(x + head * a.x_strides[2] + at + a.pairs);
        }
      }
    }
    if (!rotates) {
#pragma unroll
      for (int j = 0; j < kHeads; ++j) {
        const int64_t head = step + int64_t{j} * head_steps;
        if (head < a.heads) store(y + head * a.y_strides[2] + at, v[j][0]);
      }
      continue;
    }
    float c[kPairs], s[kPairs];
    const int64_t position = a.position(b, l);
    if (position >= 0) {
      load_table(static_cast<const P*>(a.cos) + position * a.cos_strides[0] + k * kPairs, c);
      load_table(static_cast<const P*>(a.sin) + position * a.sin_strides[0] + k * kPairs, s);
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      c[i] = position >= 0 ? c[i] : NAN;
      s[i] = position >= 0 ? a.direction * s[i] : NAN;
    }
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      const int64_t head = step + int64_t{j} * head_steps;
      if (head < a.heads) {
        float in[kVectors][kWidth], out[kVectors][kWidth];
#pragma unroll
        for (int i = 0; i < kVectors; ++i) unpack(v[j][i], in[i]);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const float x0 = kInterleaved ? in[0][2 * i] : in[0][i];
          const float x1 = kInterleaved ? in[0][2 * i + 1] : in[kVectors - 1][i];
          (kInterleaved ? out[0][2 * i] : out[0][i]) = x0 * c[i] - x1 * s[i];
          (kInterleaved ? out[0][2 * i + 1] : out[kVectors - 1][i]) = x1 * c[i] + x0 * s[i];
        }
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          store(y + head * a.y_strides[2] + at + i * a.pairs, pack<T, kWidth>(out[i]));
        }
      }
    }
  }
}

__global__ void __launch_bounds__(kRotateThreads) rotate_any(const __grid_constant__ RopeArgs a) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t per_head = a.pairs + a.rest;
  const int64_t index = block_index() * kRotateThreads + threadIdx.x;
  if (index >= a.batch * a.tokens * a.heads * per_head) return;
  const int64_t k = index % per_head;
  const int64_t head = index / per_head % a.heads;
  const int64_t token = index / per_head / a.heads;
  const int64_t b = token / a.tokens;
  const int64_t l = token - b * a.tokens;
  const AnyPointer x = Pointer<Any>::to(a.x, a.dtype) + b * a.x_strides[0] + l * a.x_strides[1] +
                       head * a.x_strides[2];
  const AnyPointer y = Pointer<Any>::to(a.y, a.dtype) + b * a.y_strides[0] + l * a.y_strides[1] +
                       head * a.y_strides[2];
  if (k >= a.pairs) {
    const int64_t i = a.pairs + k;
    y[i * a.y_strides[3]] = x[i * a.x_strides[3]];
    return;
  }
  const int64_t first = a.interleaved ? 2 * k : k;
  const int64_t second = a.interleaved ? 2 * k + 1 : k + a.pairs;
  const int64_t position = a.position(b, l);
  float c = NAN, s = NAN;
  if (position >= 0) {
    const AnyPointer cos = Pointer<Any>::to(a.cos, a.cos_dtype) + position * a.cos_strides[0];
    const AnyPointer sin = Pointer<Any>::to(a.sin, a.sin_dtype) + position * a.sin_strides[0];
    c = cos[k * a.cos_strides[1]];
    s = a.direction * sin[k * a.sin_strides[1]];
  }
  const float x0 = x[first * a.x_strides[3]];
  const float x1 = x[second * a.x_strides[3]];
  y[first * a.y_strides[3]] = Any(x0 * c - x1 * s);
  y[second * a.y_strides[3]] = Any(x1 * c + x0 * s);
}

// Returns whether the last dim has unit stride and every vector of `bytes` bytes along it is
// aligned.
bool vector_aligned(const Tensor& t, int64_t bytes) {
  const int64_t width = bytes / size_of(t.dtype);
  bool aligned = reinterpret_cast<uintptr_t>(t.data) % bytes == 0 && t.stride(-1) == 1;
  for (int i = 0; i + 1 < t.ndim; ++i) {
    aligned = aligned && (t.shape[i] == 1 || t.strides[i] % width == 0);
  }
  return aligned;
}

template <class T, class P>
Status launch_vectors(const RopeArgs& a, cudaStream_t stream) {
  constexpr int kWidth = kVecWidth<T>;
  const int head_steps = static_cast<int>(ceil_div(a.heads, kHeads));
  const int per_head =
      static_cast<int>(a.pairs / (a.interleaved ? kWidth / 2 : kWidth) + a.rest / kWidth);
  const int tokens_per_block = std::max(1, kRotateThreads / (head_steps * per_head));
  const dim3 grid = grid_of(ceil_div(a.batch * a.tokens, tokens_per_block));
  const auto kernel = a.interleaved ? rotate_vectors<T, P, true> : rotate_vectors<T, P, false>;
  return launch_early(kernel, "rotate_vectors", {grid, kRotateThreads}, stream, a, head_steps,
                      per_head);
}

Status rotate(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions,
              bool interleaved, float direction, const Tensor& y, const Exec& exec) {
  if (!y || y.numel() == 0) return {};
  RopeArgs a{};
  a.x = x.data;
  a.y = y.data;
  a.cos = cos.data;
  a.sin = sin.data;
  a.dtype = x.dtype;
  a.cos_dtype = cos.dtype;
  a.sin_dtype = sin.dtype;
  a.interleaved = interleaved;
  a.direction = direction;
  a.batch = x.size(0);
  a.tokens = x.size(1);
  a.heads = x.size(2);
  a.table_rows = cos.size(0);
  a.pairs = cos.size(1);
  bool in_place = x.data == y.data;
  for (int i = 0; i < 4; ++i) {
    a.x_strides[i] = x.stride(i);
    a.y_strides[i] = y.stride(i);
    in_place = in_place && (x.size(i) == 1 || x.stride(i) == y.stride(i));
  }
  a.rest = in_place ? 0 : x.size(3) - 2 * a.pairs;
  if (a.pairs + a.rest == 0) return {};
  for (int i = 0; i < 2; ++i) {
    a.cos_strides[i] = cos.stride(i);
    a.sin_strides[i] = sin.stride(i);
  }
  if (positions) {
    a.positions = positions.data;
    a.wide_positions = positions.dtype == DType::kInt64;
    a.position_strides[0] = positions.ndim == 2 ? positions.stride(0) : 0;
    a.position_strides[1] = positions.stride(-1);
  }
  // Cosines come kWidth at a time for halves, half as many for neighbours, and never more than 16
  // bytes in one access.
  const int64_t width = 16 / size_of(x.dtype);
  const int64_t vector_pairs = interleaved ? width / 2 : width;
  const int64_t table_bytes = std::min<int64_t>(16, vector_pairs * size_of(cos.dtype));
  const bool vectors = a.pairs % vector_pairs == 0 && (x.size(3) - 2 * a.pairs) % width == 0 &&
                       vector_aligned(x, 16) && vector_aligned(y, 16) &&
                       vector_aligned(cos, table_bytes) && vector_aligned(sin, table_bytes) &&
                       cos.dtype == sin.dtype && a.heads < (1 << 20) && x.size(3) < (1 << 10);
  if (!vectors) {
    const int64_t threads = a.batch * a.tokens * a.heads * (a.pairs + a.rest);
    return launch_early(rotate_any, "rotate_any",
                        {grid_of(ceil_div(threads, kRotateThreads)), kRotateThreads},
                        stream_of(exec), a);
  }
  return for_dtype(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (cos.dtype == DType::kFloat32) return launch_vectors<T, float>(a, stream_of(exec));
    return launch_vectors<T, T>(a, stream_of(exec));
  });
}

}  // namespace

Status run(const RopeFwd& a, const Exec& exec) {
  return rotate(a.x, a.cos, a.sin, a.positions, a.interleaved, 1.f, a.y, exec);
}

Status run(const RopeBwd& a, const Exec& exec) {
  return rotate(a.dy, a.cos, a.sin, a.positions, a.interleaved, -1.f, a.dx, exec);
}

}  // namespace fk::cuda
