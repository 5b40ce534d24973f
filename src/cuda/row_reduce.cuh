// Reduces every row of a [..., N] tensor (or of two of one shape) to a small state, in float, in a
// fixed order. An op says how:
//
//   struct Op {
//     using Element = T;
//     static constexpr int kInputs = 1;        // or 2
//     RowView<const T> in[kInputs];
//     struct State { ... };                    // a multiple of 4 bytes
//     __device__ State start(int64_t row) const;             // the state before any element
//     __device__ float fill(const State& state) const;       // an element that changes nothing
//     // Adds vectors of the row, and of the second input if there is one, to the state. The
// vectors
//     // from x[valid] on are made of fill().
//     template <int kVectors, int kWidth>
//     __device__ void add(State& state, const float (&x)[kVectors][kWidth],
//                         const float (&second)[kVectors][kWidth], int valid) const;
//     __device__ static State merge(const State& a, const State& b);
//     __device__ void finish(int64_t row, const State& state) const;   // stores the row's result
//   };
//
// Floor: one read of the inputs. Four 16-byte loads per thread are in flight before the first is
// used. Few long rows are split over blocks, whose states meet in the workspace and are merged by a
// second kernel: no atomics, so results repeat bit for bit.
#pragma once

#include "cuda/any_element.cuh"
#include "cuda/row_partition.cuh"

namespace fk::cuda {

// Merges the states of the `group` threads that share a row: a power of two up to 32, or the block.
// The result is valid in the group's first thread. `empty` is a state that changes nothing;
// `scratch` is shared memory for 32 states.
template <class Op>
__device__ __forceinline__ typename Op::State group_merge(typename Op::State state, int group,
                                                          const typename Op::State& empty,
                                                          typename Op::State* scratch) {
#pragma unroll 1
  for (int mask = min(group, kWarpSize) / 2; mask > 0; mask /= 2) {
    state = Op::merge(state, shuffle_xor(state, mask));
  }
  if (group > kWarpSize) {
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    if (lane == 0) scratch[warp] = state;
    __syncthreads();
    if (warp == 0) {
      state = lane < group / kWarpSize ? scratch[lane] : empty;
#pragma unroll 1
      for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
        state = Op::merge(state, shuffle_xor(state, mask));
      }
    }
  }
  return state;
}

// Adds this thread's share of part `split` of `splits` parts of `row` to `state`. The part is
// shared by `group` threads, of which this is number `lane`.
template <class Op>
__device__ __forceinline__ void add_part(const Op& op, int64_t row, int64_t n, int split,
                                         int splits, int lane, int group,
                                         typename Op::State& state) {
  using T = typename Op::Element;
  constexpr int kInputs = Op::kInputs, kWidth = kVecWidth<T>, kLoads = kBatch<Op>;
  const T* in[kInputs];
#pragma unroll
  for (int k = 0; k < kInputs; ++k) in[k] = op.in[k].row(row);
  const RowPart<T> part(in[0], n, split, splits);

  // This thread's first ragged element (one outside of whole vectors) is loaded while vectors are
  // added.
  const T* ragged[kInputs];
  T first[kInputs];
#pragma unroll
  for (int k = 0; k < kInputs; ++k) {
    ragged[k] = in[k];
    if (lane < part.ragged)
      first[k] = load_overwritable_in_place<1>(in[k] + part.ragged_at(lane)).data[0];
  }

#pragma unroll
  for (int k = 0; k < kInputs; ++k) in[k] += part.begin + lane * kWidth;
#pragma unroll 1
  for (int i = lane; i < part.vectors; i += kLoads * group) {
    Vec<T, kWidth> v[kInputs][kLoads];
    int valid = kLoads;
    if (i + (kLoads - 1) * group < part.vectors) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
#pragma unroll
        for (int k = 0; k < kInputs; ++k)
          v[k][j] = load_overwritable_in_place<kWidth>(in[k] + j * group * kWidth);
      }
    } else {
      const T fill = from_float<T>(op.fill(state));
      valid = 0;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const bool inside = i + j * group < part.vectors;
        valid += inside ? 1 : 0;
#pragma unroll
        for (int k = 0; k < kInputs; ++k) {
#pragma unroll
          for (int e = 0; e < kWidth; ++e) v[k][j].data[e] = fill;
          if (inside) v[k][j] = load_overwritable_in_place<kWidth>(in[k] + j * group * kWidth);
        }
      }
    }
    float x[kInputs][kLoads][kWidth];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) unpack(v[k][j], x[k][j]);
      in[k] += kLoads * group * kWidth;
    }
    op.add(state, x[0], x[kInputs - 1], valid);
  }

#pragma unroll 1
  for (int i = lane; i < part.ragged; i += group) {
    float x[kInputs][1][1];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      x[k][0][0] = to_float(i == lane ? first[k] : ragged[k][part.ragged_at(i)]);
    }
    op.add(state, x[0], x[kInputs - 1], 1);
  }
}

// The kernel for the layout by rows: `group` threads share each of the `splits` parts of a row. If
// there are several, part s leaves its state in partial[s * rows + row].
template <class Op>
__global__ void __launch_bounds__(512, 2)
    reduce_rows(const __grid_constant__ Op op, int64_t rows, int64_t n, int splits, int group,
                typename Op::State* partial) {
  using State = typename Op::State;
  __shared__ State scratch[kWarpSize];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const GroupIndex index(group);
  // Threads without a part stay for the shuffles, with an empty state.
  const bool active = index.part < rows * splits;
  const int64_t part = active ? index.part : 0;
  const int64_t row = splits == 1 ? part : part / splits;
  const int split = static_cast<int>(part - row * splits);
  const State empty = op.start(row);
  State state = empty;
  if (active) add_part(op, row, n, split, splits, index.lane, group, state);
  state = group_merge<Op>(state, group, empty, scratch);
  if (active && index.lane == 0) {
    if (splits == 1) {
      op.finish(row, state);
    } else {
      partial[split * rows + row] = state;
    }
  }
}

// The kernel for the layout by columns: a thread reduces kWidth neighbouring rows, and the block's
// lines merge their states. With kWidth = 1, for which the op's element is Any, rows and their
// elements may lie anywhere.
template <class Op, int kWidth>
__global__ void __launch_bounds__(kColumnBlock, 2)
    reduce_columns(const __grid_constant__ Op op, int64_t rows, int64_t n, int64_t inner,
                   int splits, int lanes, typename Op::State* partial) {
  using T = typename Op::Element;
  using State = typename Op::State;
  constexpr int kInputs = Op::kInputs, kLoads = kBatch<Op>;
  __shared__ State scratch[kWidth * kColumnBlock];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const ColumnIndex<kWidth> at(rows, n, inner, splits, lanes);
  if (at.active) {
    State state[kWidth];
    typename RowView<const T>::Data in[kInputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      in[k] = op.in[k].row(at.row) + (at.begin + at.line) * op.in[k].step;
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e) state[e] = op.start(at.row + e);

#pragma unroll 1
    for (int64_t i = at.begin + at.line; i < at.end; i += kLoads * at.lines) {
      Vec<T, kWidth> v[kInputs][kLoads];
      int valid = 0;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const bool inside = i + j * at.lines < at.end;
        valid += inside ? 1 : 0;
#pragma unroll
        for (int k = 0; k < kInputs; ++k) {
#pragma unroll
          for (int e = 0; e < kWidth; ++e) v[k][j].data[e] = from_float<T>(op.fill(state[e]));
          if (inside) v[k][j] = load_overwritable_in_place<kWidth>(in[k]);
          in[k] += at.lines * op.in[k].step;
        }
      }
      float x[kInputs][kLoads][kWidth];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
#pragma unroll
        for (int j = 0; j < kLoads; ++j) unpack(v[k][j], x[k][j]);
      }
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        float values[kInputs][kLoads][1];
#pragma unroll
        for (int k = 0; k < kInputs; ++k) {
#pragma unroll
          for (int j = 0; j < kLoads; ++j) values[k][j][0] = x[k][j][e];
        }
        op.add(state[e], values[0], values[kInputs - 1], valid);
      }
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e) scratch[e * kColumnBlock + threadIdx.x] = state[e];
  }
  __syncthreads();
#pragma unroll 1
  for (int half = at.lines / 2; half > 0; half /= 2) {
    if (at.active && at.line < half) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        State* mine = &scratch[e * kColumnBlock + threadIdx.x];
        *mine = Op::merge(*mine, mine[half * lanes]);
      }
    }
    __syncthreads();
  }
  if (at.active && at.line == 0) {
#pragma unroll 1
    for (int e = 0; e < kWidth; ++e) {
      const State merged = scratch[e * kColumnBlock + threadIdx.x];
      if (splits == 1) {
        op.finish(at.row + e, merged);
      } else {
        partial[at.split * rows + at.row + e] = merged;
      }
    }
  }
}

constexpr int kMergeBlock = 512;  // threads in a block of merge_partials

// Merges each row's states partial[s * rows + row] over the parts s. `width` rows share a block.
template <class Op>
__global__ void __launch_bounds__(kMergeBlock)
    merge_partials(const __grid_constant__ Op op, const typename Op::State* partial, int64_t rows,
                   int splits, int width) {
  using State = typename Op::State;
  __shared__ State scratch[kMergeBlock];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int line = threadIdx.x / width;
  const int lines = kMergeBlock / width;
  const int64_t row = block_index() * width + threadIdx.x % width;
  const bool active = row < rows;
  if (active) {
    State state = op.start(row);
#pragma unroll 4
    for (int s = line; s < splits; s += lines) state = Op::merge(state, partial[s * rows + row]);
    scratch[threadIdx.x] = state;
  }
  __syncthreads();
#pragma unroll 1
  for (int half = lines / 2; half > 0; half /= 2) {
    if (active && line < half) {
      scratch[threadIdx.x] = Op::merge(scratch[threadIdx.x], scratch[threadIdx.x + half * width]);
    }
    __syncthreads();
  }
  if (active && line == 0) op.finish(row, scratch[threadIdx.x]);
}

// Returns over how many blocks a row is split. The answer depends on sizes and strides alone, so
// that a workspace query and the call it is for agree.
inline int reduce_splits(const RowLayout& layout, int64_t element_bytes) {
  if (layout.rows == 0 || layout.n == 0) return 1;
  if (layout.columns()) {
    // Each part has at least 64 elements of a row, so that a state is small beside the elements it
    // stands for; there are at most about 8 blocks per multiprocessor of a large GPU.
    const int64_t width = 16 / element_bytes;
    const int64_t tile = column_lanes(layout.inner, width) * width;
    const int64_t blocks = layout.rows / layout.inner * ceil_div(layout.inner, tile);
    return static_cast<int>(std::min(ceil_div(layout.n, 64), ceil_div(1056, blocks)));
  }
  // Each part has at least 8 KB, and there are enough of them that uneven progress evens out.
  if (layout.rows >= 512) return 1;
  return static_cast<int>(
      std::min(ceil_div(layout.n * element_bytes, 8192), ceil_div(2048, layout.rows)));
}

// Returns the bytes of workspace that a reduction needs for the states of split rows; 0 if rows are
// not split.
template <class State>
size_t partial_bytes(const RowLayout& layout, int64_t element_bytes) {
  const int64_t splits = reduce_splits(layout, element_bytes);
  return splits == 1 ? 0 : static_cast<size_t>(splits * layout.rows) * sizeof(State);
}

// How many 16-byte loads a thread does, and the most threads that share a row where there are rows
// enough. A thread that does more loads pays less for its start and for the merge.
constexpr int kReduceItems = 32;
constexpr int kReduceThreads = 128;

// Chooses how many threads share a row, and launches reduce_rows.
template <class Op>
Status launch_reduce_rows(const Op& op, const RowLayout& layout, int splits, void* partial,
                          cudaStream_t stream) {
  const int64_t vectors = ceil_div(layout.n, kVecWidth<typename Op::Element>);
  const int group = threads_per_row(ceil_div(vectors, splits), layout.rows * splits, kReduceItems,
                                    kReduceThreads);
  const int threads = group > kWarpSize ? group : kWarpRowsBlock;
  const int64_t blocks = ceil_div(layout.rows * splits, group > kWarpSize ? 1 : threads / group);
  return launch_early(reduce_rows<Op>, "reduce_rows", {grid_of(blocks), dim3(threads)}, stream, op,
                      layout.rows, layout.n, splits, group,
                      static_cast<typename Op::State*>(partial));
}

// Launches reduce_columns.
template <int kWidth, class Op>
Status launch_reduce_columns(const Op& op, const RowLayout& layout, int splits, void* partial,
                             cudaStream_t stream) {
  const int64_t inner = layout.columns() ? layout.inner : layout.rows;
  const int lanes = kWidth > 1 ? column_lanes(inner, kWidth) : strided_lanes(layout);
  const int64_t blocks = layout.rows / inner * splits * ceil_div(inner, lanes * kWidth);
  return launch_early(reduce_columns<Op, kWidth>, "reduce_columns", {grid_of(blocks), kColumnBlock},
                      stream, op, layout.rows, layout.n, inner, splits, lanes,
                      static_cast<typename Op::State*>(partial));
}

// Reduces all rows. make_op(Tag<T>()) returns the op for elements of type T; T may be Any, and the
// states of all types have the same size. `partial` is workspace of
// partial_bytes<Op::State>(layout, ...) bytes and may be null if that is 0. With kColumns = false
// no fast kernel across columns is compiled, and the general one serves that layout.
template <bool kColumns = true, class MakeOp>
Status reduce(DType dtype, const MakeOp& make_op, const RowLayout& layout, void* partial,
              cudaStream_t stream) {
  if (layout.rows == 0) return {};
  const int splits = reduce_splits(layout, size_of(dtype));

  if (layout.vectors && (kColumns || !layout.columns())) {
    FK_RETURN_IF_ERROR(for_dtype(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      if constexpr (kColumns) {
        if (layout.columns()) {
          return launch_reduce_columns<kVecWidth<T>>(make_op(tag), layout, splits, partial, stream);
        }
      }
      return launch_reduce_rows(make_op(tag), layout, splits, partial, stream);
    }));
  } else {
    FK_RETURN_IF_ERROR(
        launch_reduce_columns<1>(make_op(Tag<Any>()), layout, splits, partial, stream));
  }
  if (splits == 1) return {};
  using AnyOp = decltype(make_op(Tag<Any>()));
  const int width = power_of_two_at_least(std::min<int64_t>(32, layout.rows));
  return launch_early(merge_partials<AnyOp>, "merge_partials",
                      {grid_of(ceil_div(layout.rows, width)), kMergeBlock}, stream,
                      make_op(Tag<Any>()), static_cast<const typename AnyOp::State*>(partial),
                      layout.rows, splits, width);
}

}  // namespace fk::cuda
