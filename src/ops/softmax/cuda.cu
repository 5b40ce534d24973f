// softmax, log_softmax and logsumexp on CUDA.
//
// Floors (bytes of T per element): softmax and log_softmax 1 read + 1 write, their backwards 2
// reads + 1 write, logsumexp 1 read, its backward 1 read + 1 write.
//
// Rows of up to kMaxTileVectors 16-byte vectors stay in registers between the statistics and the
// output, four vectors per thread: a group of lanes, a warp or a block per row, so that about 64 KB
// of loads per multiprocessor are in flight. Longer rows, and rows across the fastest dimension,
// are reduced to their statistics in the workspace and read a second time.
#include "cuda/math.cuh"
#include "cuda/row_map.cuh"
#include "cuda/row_reduce.cuh"
#include "ops/softmax/softmax.h"

namespace fk::cuda {
namespace {

constexpr int kTileVectors = 4;  // per thread
constexpr int kMaxTileThreads = 512;
constexpr int64_t kMaxTileVectors = kTileVectors * kMaxTileThreads;

template <class T>
struct TileArgs {
  RowView<const T> in[2];
  RowView<T> out;
  int64_t rows;
  int n;
  int group;     // threads per row: a power of two up to 32, or the block
  bool vectors;  // false: single elements, any distance apart
};

// One thread's part of a row: vectors lane, lane + group, ... of the row cut at 16-byte borders.
// With kRagged the first and the last vector may stick out of the row, or there may be no vectors
// at all.
template <class T, bool kRagged>
struct Tile {
  static constexpr int kWidth = kVecWidth<T>;
  using Vector = Vec<T, kWidth>;
  int n, group;
  int first;  // index in the row of this thread's first element; may be negative
  bool vectors;

  __device__ __forceinline__ Tile(const TileArgs<T>& a, const T* row, int lane)
      : n(a.n), group(a.group), first(lane * kWidth), vectors(!kRagged || a.vectors) {
    if (kRagged && vectors) {
      first -= static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T)) & (kWidth - 1);
    }
  }

  __device__ __forceinline__ int begin(int j) const { return first + j * group * kWidth; }
  __device__ __forceinline__ bool whole(int j) const {
    if constexpr (kRagged) return vectors && begin(j) >= 0 && begin(j) + kWidth <= n;
    return begin(j) < n;
  }

  // Elements outside of the row become `fill`.
  __device__ __forceinline__ void load(const T* row, int64_t step, T fill,
                                       Vector (&v)[kTileVectors]) const {
#pragma unroll
    for (int j = 0; j < kTileVectors; ++j) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) v[j].data[e] = fill;
      if (whole(j)) v[j] = load_once<kWidth>(row + begin(j));
    }
    if constexpr (kRagged) {
#pragma unroll
      for (int j = 0; j < kTileVectors; ++j) {
        if (whole(j)) continue;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const int i = begin(j) + e;
          if (i >= 0 && i < n) v[j].data[e] = row[i * step];
        }
      }
    }
  }

  __device__ __forceinline__ void store(T* row, int64_t step, int j,
                                        const float (&x)[kWidth]) const {
    const Vector packed = pack<T, kWidth>(x);
    if (whole(j)) {
      store_streaming(row + begin(j), packed);
    } else if constexpr (kRagged) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const int i = begin(j) + e;
        if (i >= 0 && i < n) row[i * step] = packed.data[e];
      }
    }
  }
};

// Over `lanes` neighbouring lanes, a power of two; every lane gets the result.
template <class Merge>
__device__ __forceinline__ float lanes_reduce(float value, int lanes, Merge merge) {
#pragma unroll 1
  for (int mask = lanes / 2; mask > 0; mask /= 2) value = merge(value, shuffle_xor(value, mask));
  return value;
}

template <class T, bool kLog, bool kRagged>
__global__ void __launch_bounds__(kMaxTileThreads, kRagged ? 1 : 2)
    softmax_tile(const __grid_constant__ TileArgs<T> a) {
  constexpr int kWidth = kVecWidth<T>;
  __shared__ float maxima[kWarpSize], sums[kWarpSize];
  const GroupIndex index(a.group);
  const int lanes = min(a.group, kWarpSize);
  // Threads without a row stay for the shuffles, and take row 0 without storing it.
  const bool active = index.part < a.rows;
  const int64_t r = active ? index.part : 0;
  const T* row = a.in[0].row(r);
  const Tile<T, kRagged> tile(a, row, index.lane);
  float x[kTileVectors][kWidth];
  float max = -FLT_MAX;
  {
    Vec<T, kWidth> v[kTileVectors];
    tile.load(row, a.in[0].step, from_float<T>(-INFINITY), v);
#pragma unroll
    for (int j = 0; j < kTileVectors; ++j) {
      unpack(v[j], x[j]);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) max = fmaxf(max, x[j][e]);
    }
  }
  // As in LogSumExp: finite, so that no difference below is inf - inf.
  max = fminf(lanes_reduce(max, lanes, Max()), FLT_MAX);
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kTileVectors; ++j) {
    float vector_sum = 0;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float p = exp_for<T>(x[j][e] - max);
      vector_sum += p;
      if (!kLog) x[j][e] = p;
    }
    sum += vector_sum;
  }
  sum = lanes_reduce(sum, lanes, Sum());

  // The warps' statistics meet in shared memory, behind the only barrier of a row.
  float row_max = max;
  if (a.group > kWarpSize) {
    const int warp_lane = threadIdx.x % kWarpSize;
    if (warp_lane == 0) {
      maxima[threadIdx.x / kWarpSize] = max;
      sums[threadIdx.x / kWarpSize] = sum;
    }
    __syncthreads();
    const bool holds = warp_lane < a.group / kWarpSize;
    const float other = holds ? maxima[warp_lane] : -FLT_MAX;
    row_max = lanes_reduce(other, kWarpSize, Max());
    sum = holds ? sums[warp_lane] * exp_for<T>(other - row_max) : 0.f;
    sum = lanes_reduce(sum, kWarpSize, Sum());
  }
  if (!active) return;
  // A row with +inf has no softmax; one of only -inf gives 0 / 0.
  if (sum == INFINITY) sum = NAN;
  const float log_sum = kLog ? logf(sum) : 0.f;
  const float factor = kLog ? 0.f : exp_for<T>(max - row_max) / sum;
  T* out = a.out.row(r);
#pragma unroll
  for (int j = 0; j < kTileVectors; ++j) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      x[j][e] = kLog ? (x[j][e] - row_max) - log_sum : x[j][e] * factor;
    }
    tile.store(out, a.out.step, j, x[j]);
  }
}

// Makes the compiler forget what it knows about a vector's elements.
template <class T, int N>
__device__ __forceinline__ void hide(Vec<T, N>& v) {
  uint4 w;
  static_assert(sizeof(v) == sizeof(w));
  memcpy(&w, v.data, sizeof(w));
  asm volatile("" : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w));
  memcpy(v.data, &w, sizeof(w));
}

// in: dy, y.
template <class T, bool kLog, bool kRagged>
__global__ void __launch_bounds__(kMaxTileThreads, 1)
    softmax_bwd_tile(const __grid_constant__ TileArgs<T> a) {
  constexpr int kWidth = kVecWidth<T>;
  __shared__ float sums[kWarpSize];
  const GroupIndex index(a.group);
  const bool active = index.part < a.rows;
  const int64_t r = active ? index.part : 0;
  const T* dy_row = a.in[0].row(r);
  const Tile<T, kRagged> tile(a, dy_row, index.lane);
  Vec<T, kWidth> dy[kTileVectors], y[kTileVectors];
  tile.load(dy_row, a.in[0].step, from_float<T>(0.f), dy);
  tile.load(a.in[1].row(r), a.in[1].step, from_float<T>(0.f), y);
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kTileVectors; ++j) {
    float g[kWidth], p[kWidth], vector_sum = 0;
    unpack(dy[j], g);
    unpack(y[j], p);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) vector_sum += kLog ? g[e] : g[e] * p[e];
    sum += vector_sum;
  }
  sum = lanes_reduce(sum, min(a.group, kWarpSize), Sum());
  if (a.group > kWarpSize) {
    const int warp_lane = threadIdx.x % kWarpSize;
    if (warp_lane == 0) sums[threadIdx.x / kWarpSize] = sum;
    __syncthreads();
    sum = lanes_reduce(warp_lane < a.group / kWarpSize ? sums[warp_lane] : 0.f, kWarpSize, Sum());
  }
  if (!active) return;
  T* out = a.out.row(r);
#pragma unroll
  for (int j = 0; j < kTileVectors; ++j) {
    // Unpacked anew: kept from above, the floats would take twice the registers.
    hide(dy[j]);
    hide(y[j]);
    float g[kWidth], p[kWidth];
    unpack(dy[j], g);
    unpack(y[j], p);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      g[e] = kLog ? g[e] - exp_for<T>(p[e]) * sum : p[e] * (g[e] - sum);
    }
    tile.store(out, a.out.step, j, g);
  }
}

// The row's statistics, to `stats` for the second read, or its logsumexp to `lse`.
template <class T>
struct StatisticsOp {
  using Element = T;
  using State = LogSumExp<T>;
  static constexpr int kInputs = 1;
  RowView<const T> in[1];
  State* stats;
  RowView<float> lse;

  __device__ State start(int64_t) const { return State::empty(); }
  __device__ float fill(const State&) const { return -INFINITY; }
  template <int kVectors, int kWidth>
  __device__ void add(State& state, const float (&x)[kVectors][kWidth],
                      const float (&)[kVectors][kWidth], int) const {
    state.add(x);
  }
  __device__ static State merge(const State& a, const State& b) { return State::merge(a, b); }
  __device__ void finish(int64_t row, const State& state) const {
    if (stats != nullptr) {
      stats[row] = state;
    } else {
      *lse.row(row) = state.max + logf(state.sum);
    }
  }
};

template <class T>
struct NormaliseOp {
  using Element = T;
  static constexpr int kInputs = 1;
  RowView<const T> in[1];
  RowView<T> out;
  const LogSumExp<T>* stats;
  bool log;

  struct Row {
    float max;
    float norm;  // 1 / sum, or log(sum)
  };
  __device__ Row row(int64_t r) const {
    const LogSumExp<T> s = stats[r];
    const float sum = s.sum == INFINITY ? NAN : s.sum;
    return {s.max, log ? logf(sum) : 1.f / sum};
  }
  template <int kCount>
  __device__ void apply(const Row& row, int64_t, float (&x)[kCount],
                        const float (&)[kCount]) const {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      x[e] -= row.max;
      x[e] = log ? x[e] - row.norm : exp_for<T>(x[e]) * row.norm;
    }
  }
};

// sum(dy * y), or sum(dy). in: dy, y.
template <class T>
struct DotOp {
  using Element = T;
  struct State {
    float sum;
  };
  static constexpr int kInputs = 2;
  RowView<const T> in[2];
  float* sums;
  bool log;

  __device__ State start(int64_t) const { return {0.f}; }
  __device__ float fill(const State&) const { return 0.f; }
  template <int kVectors, int kWidth>
  __device__ void add(State& state, const float (&dy)[kVectors][kWidth],
                      const float (&y)[kVectors][kWidth], int) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float sum = 0;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum += log ? dy[j][e] : dy[j][e] * y[j][e];
      state.sum += sum;
    }
  }
  __device__ static State merge(const State& a, const State& b) { return {a.sum + b.sum}; }
  __device__ void finish(int64_t row, const State& state) const { sums[row] = state.sum; }
};

template <class T>
struct SoftmaxBwdOp {
  using Element = T;
  static constexpr int kInputs = 2;
  RowView<const T> in[2];
  RowView<T> out;
  const float* sums;
  bool log;

  struct Row {
    float sum;
  };
  __device__ Row row(int64_t r) const { return {sums[r]}; }
  template <int kCount>
  __device__ void apply(const Row& row, int64_t, float (&x)[kCount],
                        const float (&y)[kCount]) const {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      x[e] = log ? x[e] - exp_for<T>(y[e]) * row.sum : y[e] * (x[e] - row.sum);
    }
  }
};

template <class T>
struct LogSumExpBwdOp {
  using Element = T;
  static constexpr int kInputs = 1;
  RowView<const T> in[1];
  RowView<T> out;
  RowView<const float> lse, dlse;

  struct Row {
    float lse, dlse;
  };
  __device__ Row row(int64_t r) const { return {*lse.row(r), *dlse.row(r)}; }
  template <int kCount>
  __device__ void apply(const Row& row, int64_t, float (&x)[kCount],
                        const float (&)[kCount]) const {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      x[e] = row.lse == -INFINITY ? 0.f : row.dlse * exp_for<T>(x[e] - row.lse);
    }
  }
};

bool fits_tile(const RowLayout& layout, int64_t element_bytes) {
  return !layout.columns() && ceil_div(layout.n * element_bytes, 16) <= kMaxTileVectors;
}

template <class T>
Status run_tile(void (*kernel)(TileArgs<T>), void (*ragged_kernel)(TileArgs<T>),
                const RowLayout& layout, TileArgs<T>& a, cudaStream_t stream) {
  constexpr int kWidth = kVecWidth<T>;
  if (layout.rows == 0 || layout.n == 0) return {};
  a.rows = layout.rows;
  a.n = static_cast<int>(layout.n);
  a.vectors = layout.vectors;
  int64_t items = ceil_div(layout.n, kWidth);
  if (layout.vectors && !layout.aligned) {
    // A row that begins inside a vector may end in one more, if there is a thread to take it.
    a.vectors = items < kMaxTileVectors;
    items += a.vectors ? 1 : 0;
  }
  const int64_t threads_needed = ceil_div(items, kTileVectors);
  a.group = threads_needed <= 32 ? power_of_two_at_least(threads_needed)
                                 : static_cast<int>(ceil_div(threads_needed, 32) * 32);
  const int threads = a.group > kWarpSize ? a.group : kWarpRowsBlock;
  const int64_t blocks = ceil_div(layout.rows, a.group > kWarpSize ? 1 : threads / a.group);
  const bool ragged = !layout.aligned || layout.n % kWidth != 0;
  (ragged ? ragged_kernel : kernel)<<<grid_of(blocks), threads, 0, stream>>>(a);
  return check_launch("softmax_tile");
}

size_t align(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Workspace where rows do not fit registers: a `State` per row, then the reduction's own. Outputs
// do not count here (a query may come without), so a layout by rows and one by columns are both
// provided for.
template <class State>
size_t two_pass_bytes(RowLayout layout, int64_t element_bytes) {
  if (fits_tile(layout, element_bytes)) return 0;
  size_t partial = partial_bytes<State>(layout, element_bytes);
  layout.inner = 1;
  partial = std::max(partial, partial_bytes<State>(layout, element_bytes));
  return align(layout.rows * sizeof(State)) + partial;
}

template <class Args>
Status run_forward(const Args& args, const Exec& exec, bool log) {
  Args a = args;
  if (!a.y) return {};
  sort_leading_dims({&a.x, &a.y});
  const RowLayout layout = layout_of({&a.x, &a.y});
  return for_dtype(a.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (fits_tile(layout, sizeof(T))) {
      TileArgs<T> tile{{rows_view<const T>(a.x), {}}, rows_view<T>(a.y), 0, 0, 0, false};
      return run_tile<T>(log ? softmax_tile<T, true, false> : softmax_tile<T, false, false>,
                         log ? softmax_tile<T, true, true> : softmax_tile<T, false, true>, layout,
                         tile, stream_of(exec));
    }
    auto* stats = exec.workspace<LogSumExp<T>>();
    char* partial = exec.workspace<char>() + align(layout.rows * sizeof(LogSumExp<T>));
    const StatisticsOp<T> reduction{{rows_view<const T>(a.x)}, stats, {}};
    FK_RETURN_IF_ERROR(reduce(reduction, layout, partial, stream_of(exec)));
    return map(NormaliseOp<T>{{rows_view<const T>(a.x)}, rows_view<T>(a.y), stats, log}, layout,
               stream_of(exec));
  });
}

template <class Args>
Status run_backward(const Args& args, const Exec& exec, bool log) {
  Args a = args;
  if (!a.dx) return {};
  sort_leading_dims({&a.y, &a.dy, &a.dx});
  const RowLayout layout = layout_of({&a.y, &a.dy, &a.dx});
  return for_dtype(a.y.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const RowView<const T> dy = rows_view<const T>(a.dy), y = rows_view<const T>(a.y);
    if (fits_tile(layout, sizeof(T))) {
      TileArgs<T> tile{{dy, y}, rows_view<T>(a.dx), 0, 0, 0, false};
      return run_tile<T>(log ? softmax_bwd_tile<T, true, false> : softmax_bwd_tile<T, false, false>,
                         log ? softmax_bwd_tile<T, true, true> : softmax_bwd_tile<T, false, true>,
                         layout, tile, stream_of(exec));
    }
    float* sums = exec.workspace<float>();
    char* partial = exec.workspace<char>() + align(layout.rows * sizeof(float));
    FK_RETURN_IF_ERROR(reduce(DotOp<T>{{dy, y}, sums, log}, layout, partial, stream_of(exec)));
    return map(SoftmaxBwdOp<T>{{dy, y}, rows_view<T>(a.dx), sums, log}, layout, stream_of(exec));
  });
}

template <class Args>
size_t forward_workspace(Args a) {
  sort_leading_dims({&a.x});
  return two_pass_bytes<LogSumExp<float>>(layout_of({&a.x}), size_of(a.x.dtype));
}

template <class Args>
size_t backward_workspace(Args a) {
  sort_leading_dims({&a.y, &a.dy});
  return two_pass_bytes<DotOp<float>::State>(layout_of({&a.y, &a.dy}), size_of(a.y.dtype));
}

}  // namespace

size_t workspace(const SoftmaxFwd& a) { return forward_workspace(a); }
size_t workspace(const LogSoftmaxFwd& a) { return forward_workspace(a); }
size_t workspace(const SoftmaxBwd& a) { return backward_workspace(a); }
size_t workspace(const LogSoftmaxBwd& a) { return backward_workspace(a); }

size_t workspace(const LogSumExpFwd& args) {
  LogSumExpFwd a = args;
  sort_leading_dims({&a.x});
  return partial_bytes<LogSumExp<float>>(layout_of({&a.x}), size_of(a.x.dtype));
}

Status run(const SoftmaxFwd& a, const Exec& exec) { return run_forward(a, exec, false); }
Status run(const LogSoftmaxFwd& a, const Exec& exec) { return run_forward(a, exec, true); }
Status run(const SoftmaxBwd& a, const Exec& exec) { return run_backward(a, exec, false); }
Status run(const LogSoftmaxBwd& a, const Exec& exec) { return run_backward(a, exec, true); }

Status run(const LogSumExpFwd& args, const Exec& exec) {
  LogSumExpFwd a = args;
  if (!a.lse) return {};
  sort_leading_dims({&a.x}, {&a.lse});
  const RowLayout layout = layout_of({&a.x});
  return for_dtype(a.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const StatisticsOp<T> op{{rows_view<const T>(a.x)}, nullptr, scalars_view<float>(a.lse)};
    return reduce(op, layout, exec.workspace(), stream_of(exec));
  });
}

Status run(const LogSumExpBwd& args, const Exec& exec) {
  LogSumExpBwd a = args;
  if (!a.dx) return {};
  sort_leading_dims({&a.x, &a.dx}, {&a.lse, &a.dlse});
  const RowLayout layout = layout_of({&a.x, &a.dx});
  return for_dtype(a.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const LogSumExpBwdOp<T> op{{rows_view<const T>(a.x)},
                               rows_view<T>(a.dx),
                               scalars_view<const float>(a.lse),
                               scalars_view<const float>(a.dlse)};
    return map(op, layout, stream_of(exec));
  });
}

}  // namespace fk::cuda
