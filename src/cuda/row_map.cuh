// Computes every element of a [..., N] output from the same element of up to two inputs and from
// what its row has in common. An op says how:
//
//   struct Op {
//     using Element = T;
//     static constexpr int kInputs = 1;        // 0 to 2
//     RowView<const T> in[1];
//     RowView<T> out;                          // may be an input's memory, with the same strides
//     struct Row { ... };                       // what the elements of a row share
//     __device__ Row row(int64_t row) const;    // reads or computes it
//     // Maps the elements column to column + kCount - 1; the result replaces x.
//     template <int kCount>
//     __device__ void apply(const Row& row, int64_t column, float (&x)[kCount],
//                           const float (&second)[kCount]) const;
//   };
//
// Floor: one read of the inputs and one write. Four 16-byte loads per thread are in flight before
// the first is used.
#pragma once

#include "cuda/row_reduce.cuh"

namespace fk::cuda {

// Maps this thread's share of part `split` of `splits` parts of row `row`; `shared` is what
// op.row(row) returned. The part is shared by `group` threads, of which this is number `lane`. With
// kBackwards it begins at the end.
template <class Op, bool kBackwards = false>
__device__ __forceinline__ void map_part(const Op& op, const typename Op::Row& shared, int64_t row,
                                         int64_t n, int split, int splits, int lane, int group) {
  using T = typename Op::Element;
  constexpr int kInputs = Op::kInputs, kWidth = kVecWidth<T>, kLoads = kBatch<Op>;
  constexpr int kArrays = kInputs > 0 ? kInputs : 1;
  // Where as much is read as is written, cache hints do not pay. Writes alone are a third faster
  // with them, and with kBackwards the rows that were just read should stay in L2 longer than the
  // output.
  constexpr bool kHints = kInputs == 0 || kBackwards;
  const T* in[kArrays];
#pragma unroll
  for (int k = 0; k < kInputs; ++k) in[k] = op.in[k].row(row);
  T* out = op.out.row(row);
  const RowPart<T> part(out, n, split, splits);

#pragma unroll 1
  for (int i = lane; i < part.ragged; i += group) {
    const int64_t at = part.ragged_at(i);
    float x[kArrays][1] = {};
#pragma unroll
    for (int k = 0; k < kInputs; ++k) x[k][0] = to_float(in[k][at]);
    op.apply(shared, at, x[0], x[kArrays - 1]);
    out[at] = from_float<T>(x[0][0]);
  }

  const int round = kLoads * group;
  const int last = (part.vectors - 1) / round * round;
#pragma unroll 1
  for (int begin = 0; begin < part.vectors; begin += round) {
    const int i = (kBackwards ? last - begin : begin) + lane;
    const int64_t column = part.begin + static_cast<int64_t>(i) * kWidth;
    Vec<T, kWidth> v[kArrays][kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        if (i + j * group < part.vectors) {
          v[k][j] = load_overwritable_in_place<kWidth, kHints>(in[k] + column + j * group * kWidth);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if (i + j * group < part.vectors) {
        float x[kArrays][kWidth] = {};
#pragma unroll
        for (int k = 0; k < kInputs; ++k) unpack(v[k][j], x[k]);
        op.apply(shared, column + j * group * kWidth, x[0], x[kArrays - 1]);
        T* to = out + column + j * group * kWidth;
        if constexpr (kHints) {
          store_streaming(to, pack<T, kWidth>(x[0]));
        } else {
          store(to, pack<T, kWidth>(x[0]));
        }
      }
    }
  }
}

// Rows are cut into parts of at most this many vectors, 16 KB, so that blocks finish evenly.
constexpr int64_t kMapPart = 1024;
// How many vectors a thread maps: four rounds of loads. For short rows it is one round, because
// there the start of the threads is what takes the time.
constexpr int kMapItems = 16;
constexpr int kMapThreads = 256;  // the most threads that share a part of a row

// The kernel for the layout by rows: `group` threads share each of the `splits` parts of a row;
// `group` is a power of two up to 32, or the block.
template <class Op>
__global__ void __launch_bounds__(kMapThreads, 4)
    map_rows(const __grid_constant__ Op op, int64_t rows, int64_t n, int splits, int group) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const GroupIndex index(group);
  if (index.part >= rows * splits) return;
  const int64_t row = splits == 1 ? index.part : index.part / splits;
  const int split = static_cast<int>(index.part - row * splits);
  map_part(op, op.row(row), row, n, split, splits, index.lane, group);
}

// The kernel for the layout by columns: a thread maps kWidth neighbouring rows. With kWidth = 1,
// for which the op's element is Any, rows and their elements may lie anywhere.
template <class Op, int kWidth>
__global__ void __launch_bounds__(kColumnBlock, 2)
    map_columns(const __grid_constant__ Op op, int64_t rows, int64_t n, int64_t inner, int splits,
                int lanes) {
  using T = typename Op::Element;
  constexpr int kInputs = Op::kInputs, kLoads = kBatch<Op>;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  constexpr int kArrays = kInputs > 0 ? kInputs : 1;
  const ColumnIndex<kWidth> at(rows, n, inner, splits, lanes);
  // What a row's elements share is computed by one thread for all of the block's lines, of which
  // there are at least kWidth.
  __shared__ typename Op::Row found[kColumnLanes * kWidth];
  const int first = at.lane * kWidth;
  if (at.active && at.line < kWidth) found[first + at.line] = op.row(at.row + at.line);
  __syncthreads();
  if (!at.active) return;
  typename RowView<const T>::Data in[kArrays];
#pragma unroll
  for (int k = 0; k < kInputs; ++k) {
    in[k] = op.in[k].row(at.row) + (at.begin + at.line) * op.in[k].step;
  }
  auto out = op.out.row(at.row) + (at.begin + at.line) * op.out.step;
  typename Op::Row shared[kWidth];
#pragma unroll
  for (int e = 0; e < kWidth; ++e) shared[e] = found[first + e];

#pragma unroll 1
  for (int64_t i = at.begin + at.line; i < at.end; i += kLoads * at.lines) {
    Vec<T, kWidth> v[kArrays][kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        if (i + j * at.lines < at.end) v[k][j] = load_overwritable_in_place<kWidth>(in[k]);
        in[k] += at.lines * op.in[k].step;
      }
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if (i + j * at.lines < at.end) {
        float x[kArrays][kWidth] = {};
#pragma unroll
        for (int k = 0; k < kInputs; ++k) unpack(v[k][j], x[k]);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          float single[1] = {x[0][e]};
          const float second[1] = {x[kArrays - 1][e]};
          op.apply(shared[e], i + j * at.lines, single, second);
          x[0][e] = single[0];
        }
        store_streaming(out, pack<T, kWidth>(x[0]));
      }
      out += at.lines * op.out.step;
    }
  }
}

// Chooses how many threads share a row, and launches map_rows.
template <class Op>
Status launch_map_rows(const Op& op, const RowLayout& layout, cudaStream_t stream) {
  const int64_t all = ceil_div(layout.n, kVecWidth<typename Op::Element>);
  const int splits = static_cast<int>(ceil_div(all, kMapPart));
  const int64_t items = ceil_div(all, splits);
  const int per_thread = items <= 512 ? kMapItems / 4 : kMapItems;
  const int group =
      std::min(kMapThreads, threads_per_row(items, layout.rows * splits, per_thread, kMapThreads));
  const int threads = group > kWarpSize ? group : kWarpRowsBlock;
  const int64_t blocks = ceil_div(layout.rows * splits, group > kWarpSize ? 1 : threads / group);
  return launch_early(map_rows<Op>, "map_rows", {grid_of(blocks), dim3(threads)}, stream, op,
                      layout.rows, layout.n, splits, group);
}

// Chooses how rows are split, and launches map_columns.
template <int kWidth, class Op>
Status launch_map_columns(const Op& op, const RowLayout& layout, cudaStream_t stream) {
  const int64_t inner = layout.columns() ? layout.inner : layout.rows;
  const int lanes = kWidth > 1 ? column_lanes(inner, kWidth) : strided_lanes(layout);
  // With two rounds of loads per thread, the cost of computing each row's `Row` is small.
  const int splits = static_cast<int>(ceil_div(layout.n, 2 * kBatch<Op> * (kColumnBlock / lanes)));
  const int64_t blocks = layout.rows / inner * splits * ceil_div(inner, lanes * kWidth);
  return launch_early(map_columns<Op, kWidth>, "map_columns", {grid_of(blocks), kColumnBlock},
                      stream, op, layout.rows, layout.n, inner, splits, lanes);
}

// Maps all rows. make_op(Tag<T>()) returns the op for elements of type T; T may be Any. With
// kColumns = false no fast kernel across columns is compiled, and the general one serves that
// layout.
template <bool kColumns = true, class MakeOp>
Status map(DType dtype, const MakeOp& make_op, const RowLayout& layout, cudaStream_t stream) {
  if (layout.rows == 0 || layout.n == 0) return {};
  if (!layout.vectors || (layout.columns() && !kColumns)) {
    return launch_map_columns<1>(make_op(Tag<Any>()), layout, stream);
  }
  return for_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (kColumns) {
      if (layout.columns()) {
        return launch_map_columns<kVecWidth<T>>(make_op(tag), layout, stream);
      }
    }
    return launch_map_rows(make_op(tag), layout, stream);
  });
}

// Reduces a row and then maps it, a block per row. The second read comes while the row is still in
// L2, and begins at the row's end, because that was read last.
template <class ReduceOp, class MapOp>
__global__ void __launch_bounds__(1024, 1)
    reduce_then_map_rows(const __grid_constant__ ReduceOp reduce_op,
                         const __grid_constant__ MapOp map_op, int64_t rows, int64_t n) {
  using State = typename ReduceOp::State;
  __shared__ State scratch[kWarpSize];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t row = block_index();
  if (row >= rows) return;
  const State empty = reduce_op.start(row);
  State state = empty;
  add_part(reduce_op, row, n, 0, 1, threadIdx.x, blockDim.x, state);
  state = group_merge<ReduceOp>(state, blockDim.x, empty, scratch);
  if (threadIdx.x == 0) reduce_op.finish(row, state);
  __syncthreads();
  map_part<MapOp, true>(map_op, map_op.row(row), row, n, 0, 1, threadIdx.x, blockDim.x);
}

constexpr int64_t kFusedRows = 256;  // with fewer rows, some multiprocessors would have none

// Returns the threads for a row of `row_bytes`. All rows under way at one time should fit the L2
// cache until the second read: the longer rows are, the more threads each gets, so that fewer are
// under way.
inline int fused_threads(int64_t row_bytes) {
  if (row_bytes < 48 << 10) return 256;
  return row_bytes < 112 << 10 ? 512 : 1024;
}

// Does reduce() and then map(), in one kernel where that is faster. The map's op reads the states
// from where the reduction's op stores them. `partial` is the workspace of reduce().
template <class MakeReduceOp, class MakeMapOp>
Status reduce_then_map(DType dtype, const MakeReduceOp& make_reduce_op, const RowLayout& reduced,
                       void* partial, const MakeMapOp& make_map_op, const RowLayout& mapped,
                       cudaStream_t stream) {
  if (mapped.vectors && !mapped.columns() && mapped.rows >= kFusedRows) {
    return for_dtype(dtype, [&](auto tag) {
      const auto reduce_op = make_reduce_op(tag);
      const auto map_op = make_map_op(tag);
      const int64_t row_bytes = mapped.n * reduce_op.kInputs * size_of(dtype);
      return launch_early(reduce_then_map_rows<std::remove_const_t<decltype(reduce_op)>,
                                               std::remove_const_t<decltype(map_op)>>,
                          "reduce_then_map_rows",
                          {grid_of(mapped.rows), dim3(fused_threads(row_bytes))}, stream, reduce_op,
                          map_op, mapped.rows, mapped.n);
    });
  }
  FK_RETURN_IF_ERROR(reduce(dtype, make_reduce_op, reduced, partial, stream));
  return map(dtype, make_map_op, mapped, stream);
}

}  // namespace fk::cuda
