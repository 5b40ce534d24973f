// This file computes sum and max on CUDA, forward and backward.
//
// Floors (bytes of T per element): forward 1 read; sum's backward 1 write; max's backward 1 read +
// 1 write. That one counts the largest entries of a row, then shares dy among them: out of
// registers where a row fits (row_in_registers.cuh), else it reads the row twice.
//
// All are the row loops of row_reduce.cuh, row_map.cuh and row_in_registers.cuh, which also say how
// they are tiled.
#include "core/workspace.h"
#include "cuda/row_in_registers.cuh"
#include "cuda/row_map.cuh"
#include "cuda/row_reduce.cuh"
#include "ops/reduce/reduce.h"

namespace fk::cuda {
namespace {

// Returns the larger number. NaN wins over any number.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a > b || a != a ? a : b;
#endif
}

template <class T>
struct SumOp {
  using Element = T;
  struct State {
    float sum;
  };
  static constexpr int kInputs = 1;
  RowView<const T> in[1];
  RowView<T> y;

  __device__ State start(int64_t) const { return {0.f}; }
  __device__ float fill(const State&) const { return 0.f; }
  template <int kVectors, int kWidth>
  __device__ void add(State& state, const float (&x)[kVectors][kWidth],
                      const float (&)[kVectors][kWidth], int) const {
    // Chains are short, so that errors do not grow with the count.
    float total = 0;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float vector_sum = 0;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) vector_sum += x[j][e];
      total += vector_sum;
    }
    state.sum += total;
  }
  __device__ static State merge(const State& a, const State& b) { return {a.sum + b.sum}; }
  __device__ void finish(int64_t row, const State& state) const {
    *y.row(row) = from_float<T>(state.sum);
  }
};

template <class T>
struct MaxOp {
  using Element = T;
  struct State {
    float max;
  };
  static constexpr int kInputs = 1;
  RowView<const T> in[1];
  RowView<T> y;

  __device__ State start(int64_t) const { return {-INFINITY}; }
  __device__ float fill(const State&) const { return -INFINITY; }
  template <int kVectors, int kWidth>
  __device__ void add(State& state, const float (&x)[kVectors][kWidth],
                      const float (&)[kVectors][kWidth], int) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) state.max = max_or_nan(state.max, x[j][e]);
    }
  }
  __device__ static State merge(const State& a, const State& b) {
    return {max_or_nan(a.max, b.max)};
  }
  __device__ void finish(int64_t row, const State& state) const {
    *y.row(row) = from_float<T>(state.max);
  }
};

// Returns whether x is the largest. If the largest is NaN, it came from the NaNs.
__device__ __forceinline__ bool is_largest(float x, float y) {
  return x == y || (x != x && y != y);
}

// Counts how many entries of a row equal its largest.
template <class T>
struct CountOp {
  using Element = T;
  struct State {
    float y;
    uint32_t count_low, count_high;  // 64 bits in words, as shuffles want them
  };
  static constexpr int kInputs = 1;
  RowView<const T> in[1];
  RowView<const T> y;
  float* counts;

  __device__ State start(int64_t row) const { return {to_float(*y.row(row)), 0u, 0u}; }
  __device__ float fill(const State& state) const { return state.y == state.y ? NAN : 0.f; }
  template <int kVectors, int kWidth>
  __device__ void add(State& state, const float (&x)[kVectors][kWidth],
                      const float (&)[kVectors][kWidth], int) const {
    uint32_t count = 0;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) count += is_largest(x[j][e], state.y) ? 1 : 0;
    }
    set(state, get(state) + count);
  }
  __device__ static State merge(const State& a, const State& b) {
    State state = a;
    set(state, get(a) + get(b));
    return state;
  }
  __device__ void finish(int64_t row, const State& state) const {
    counts[row] = static_cast<float>(get(state));
  }

  __device__ static uint64_t get(const State& s) {
    return (static_cast<uint64_t>(s.count_high) << 32) | s.count_low;
  }
  __device__ static void set(State& s, uint64_t count) {
    s.count_low = static_cast<uint32_t>(count);
    s.count_high = static_cast<uint32_t>(count >> 32);
  }
};

template <class T>
struct MaxBwdOp {
  using Element = T;
  static constexpr int kInputs = 1;
  RowView<const T> in[1];
  RowView<T> out;
  RowView<const T> y, dy;
  const float* counts;

  struct Row {
    float y, share;
  };
  __device__ Row row(int64_t r) const {
    return {to_float(*y.row(r)), to_float(*dy.row(r)) / counts[r]};
  }
  template <int kCount>
  __device__ void apply(const Row& row, int64_t, float (&x)[kCount],
                        const float (&)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = is_largest(x[i], row.y) ? row.share : 0.f;
  }
};

// Works in registers; x becomes 1 where it is the largest, else 0.
template <class T>
struct MaxBwdTileOp {
  using Element = T;
  struct State {
    float count;  // exact: the row fits registers
  };
  static constexpr int kInputs = 1;
  static constexpr float kFill = -INFINITY;
  RowView<const T> in[1];
  RowView<T> out;
  RowView<const T> y, dy;

  struct Row {
    float y, dy;
  };
  __device__ Row row(int64_t r) const { return {to_float(*y.row(r)), to_float(*dy.row(r))}; }
  template <int kVectors, int kWidth>
  __device__ void add(State& state, const Row& row, float (&x)[kVectors][kWidth],
                      const float (&)[kVectors][kWidth], int filled) const {
    if (is_largest(kFill, row.y)) state.count -= static_cast<float>(filled);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        x[j][e] = is_largest(x[j][e], row.y) ? 1.f : 0.f;
        state.count += x[j][e];
      }
    }
  }
  __device__ static State empty() { return {0.f}; }
  __device__ static State reduce(const State& state, int lanes) {
    return {lanes_reduce(state.count, lanes, Sum())};
  }
  template <int kWidth>
  __device__ void apply(const Row& row, const State&, const State& all, float (&x)[kWidth],
                        const float (&)[kWidth]) const {
    const float share = row.dy / all.count;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) x[e] = x[e] > 0.f ? share : 0.f;
  }
};

template <class T>
struct SumBwdOp {
  using Element = T;
  static constexpr int kInputs = 0;
  RowView<const T> in[1];
  RowView<T> out;
  RowView<const T> dy;

  struct Row {
    float dy;
  };
  __device__ Row row(int64_t r) const { return {to_float(*dy.row(r))}; }
  template <int kCount>
  __device__ void apply(const Row& row, int64_t, float (&x)[kCount],
                        const float (&)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = row.dy;
  }
};

template <template <class> class Op, class Args>
Status run_forward(const Args& args, const Exec& exec) {
  Args a = args;
  if (!a.y) return {};
  sort_leading_dims({&a.x}, {&a.y});
  const RowLayout layout = layout_of({&a.x});
  const auto op = [&](auto tag) {
    using T = typename decltype(tag)::type;
    return Op<T>{{rows_view<const T>(a.x)}, scalars_view<T>(a.y)};
  };
  return reduce(a.x.dtype, op, layout, exec.workspace(), stream_of(exec));
}

template <class State, class Args>
size_t forward_workspace(Args a) {
  sort_leading_dims({&a.x});
  return partial_bytes<State>(layout_of({&a.x}), size_of(a.x.dtype));
}

size_t counts_bytes(int64_t rows) { return WorkspaceParts::rounded(rows * sizeof(float)); }

}  // namespace

size_t workspace(const SumFwd& a) { return forward_workspace<SumOp<float>::State>(a); }
size_t workspace(const MaxFwd& a) { return forward_workspace<MaxOp<float>::State>(a); }
size_t workspace(const MaxBwd& a) {
  return counts_bytes(rows_of(a.x).count) + forward_workspace<CountOp<float>::State>(a);
}

Status run(const SumFwd& a, const Exec& exec) { return run_forward<SumOp>(a, exec); }
Status run(const MaxFwd& a, const Exec& exec) { return run_forward<MaxOp>(a, exec); }

Status run(const SumBwd& args, const Exec& exec) {
  SumBwd a = args;
  if (!a.dx) return {};
  sort_leading_dims({&a.dx}, {&a.dy});
  const RowLayout layout = layout_of({&a.dx});
  const auto op = [&](auto tag) {
    using T = typename decltype(tag)::type;
    return SumBwdOp<T>{{}, rows_view<T>(a.dx), scalars_view<const T>(a.dy)};
  };
  return map(a.dx.dtype, op, layout, stream_of(exec));
}

Status run(const MaxBwd& args, const Exec& exec) {
  MaxBwd a = args;
  if (!a.dx) return {};
  sort_leading_dims({&a.x, &a.dx}, {&a.y, &a.dy});
  const RowLayout layout = layout_of({&a.x, &a.dx});
  if (fits_tile(layout, size_of(a.x.dtype))) {
    return for_dtype(a.x.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const MaxBwdTileOp<T> op{{rows_view<const T>(a.x)},
                               rows_view<T>(a.dx),
                               scalars_view<const T>(a.y),
                               scalars_view<const T>(a.dy)};
      return map_tiles(op, layout, stream_of(exec));
    });
  }
  const RowLayout read = layout_of({&a.x});
  float* counts = exec.workspace<float>();
  char* partial = exec.workspace<char>() + counts_bytes(read.rows);
  const auto count_op = [&](auto tag) {
    using T = typename decltype(tag)::type;
    return CountOp<T>{{rows_view<const T>(a.x)}, scalars_view<const T>(a.y), counts};
  };
  const auto op = [&](auto tag) {
    using T = typename decltype(tag)::type;
    return MaxBwdOp<T>{{rows_view<const T>(a.x)},
                       rows_view<T>(a.dx),
                       scalars_view<const T>(a.y),
                       scalars_view<const T>(a.dy),
                       counts};
  };
  return reduce_then_map(a.x.dtype, count_op, read, partial, op, layout, stream_of(exec));
}

}  // namespace fk::cuda
