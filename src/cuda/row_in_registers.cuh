// Maps every row of a [..., N] tensor with the help of a state of the whole row (softmax divides by
// its sum), for rows short enough to stay in registers in between: one read of the inputs and one
// write, which is the floor. An op says how:
//
//   struct Op {
//     using Element = T;
//     static constexpr int kInputs = 1;        // or 2
//     static constexpr float kFill = 0;        // stands for elements outside of the row
//     RowView<const T> in[kInputs];
//     RowView<T> out;                          // never an input's memory
//     struct Row { ... };                      // what the row's elements share, read from
// elsewhere
//     struct State { ... };
//     __device__ Row row(int64_t row) const;
//     // Adds elements of one thread to its state. With one input there is one call, with all of
// the
//     // thread's elements, of which `filled` are kFill; it may change x into what `apply` wants.
//     // With two inputs there is a call for each vector, and x stays as it is.
//     template <int kVectors, int kWidth>
//     __device__ void add(State& state, const Row& row, float (&x)[kVectors][kWidth],
//                         const float (&second)[kVectors][kWidth], int filled) const;
//     __device__ static State empty();         // the state of no elements
//     // Merges the states of `lanes` neighbouring lanes; each of them gets the result.
//     __device__ static State reduce(const State& state, int lanes);
//     // Maps elements; the result replaces x. `own` is the thread's state, `all` the row's.
//     template <int kWidth>
//     __device__ void apply(const Row& row, const State& own, const State& all,
//                           float (&x)[kWidth], const float (&second)[kWidth]) const;
//   };
//
// Threads hold two to four 16-byte vectors of each input, all in flight before the first is used.
// The waits for the loads, for the shuffles and for the one barrier are hidden by other blocks on
// the multiprocessor, so the kernels use few registers: `add` turns an element into what `apply`
// wants as soon as the thread's own state is known, and only a correction by the whole row's state
// is left to `apply`.
#pragma once

#include "cuda/row_partition.cuh"

namespace fk::cuda {

// How rows are shared by threads.
enum class TileKind {
  kLanes,  // a warp, or part of one, holds a row
  kWarps,  // several warps hold a row
  kAny,    // as either; rows, and their elements, may lie at any distance from each other
};

// How many vectors of each input a thread holds. Two inputs double the loads in flight, so half as
// many vectors suffice, except where more of them save the barrier (kLanes); and for kAny the code
// of each vector is long.
template <class Op, TileKind kKind>
constexpr int kTileVectors = kKind == TileKind::kLanes ||
                                     (kKind == TileKind::kWarps && Op::kInputs == 1)
                                 ? 4
                                 : 2;

// How many registers a thread may use. With 48, 1280 threads fit a multiprocessor; with 64, 1024,
// which is all that sm_75 takes anyway. float16's conversions, and shuffles over parts of a warp,
// need more than 48.
template <class Op, TileKind kKind>
constexpr int tile_registers() {
  constexpr int kVectors = Op::kInputs * kTileVectors<Op, kKind>;
  if (kVectors > 4) return 80;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if (kKind == TileKind::kWarps && !std::is_same_v<typename Op::Element, __half>) return 48;
#endif
  return 64;
}

constexpr int64_t kMaxTileVectors = 2048;  // 16-byte vectors in the longest row: 32 KB

struct TileShape {
  int64_t rows;
  int n;         // elements in a row
  int slots;     // how many warps hold a row, rounded up to a power of two
  bool vectors;  // 16-byte accesses; otherwise single elements, at any distance from each other
};

// One thread's part of a row: of the row cut at 16-byte borders, vectors number lane, lane + group,
// and so on. With kRagged the first and the last vector may stick out of the row, or the elements
// are accessed one by one.
template <class T, int kVectors, bool kRagged>
struct Tile {
  static constexpr int kWidth = kVecWidth<T>;
  using Vector = Vec<T, kWidth>;
  int n, group;
  int first;        // the index in the row of this thread's first element; may be negative
  int vectors_end;  // the end of the elements that may be part of a whole vector

  __device__ __forceinline__ Tile(const TileShape& shape, const T* row)
      : n(shape.n),
        group(blockDim.x),
        first(threadIdx.x * kWidth),
        vectors_end(!kRagged || shape.vectors ? shape.n : 0) {
    if (kRagged && shape.vectors) {
      first -= static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T)) & (kWidth - 1);
    }
  }

  // The index in the row of the first element of this thread's vector j.
  __device__ __forceinline__ int begin(int j) const { return first + j * group * kWidth; }
  // Whether vector j lies inside the row and is accessed as one.
  __device__ __forceinline__ bool whole(int j) const {
    if constexpr (kRagged) return begin(j) >= 0 && begin(j) + kWidth <= vectors_end;
    return begin(j) < n;
  }

  // Returns how many of this thread's elements are outside of the row.
  __device__ __forceinline__ int outside() const {
    int inside = 0;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      inside += max(0, min(begin(j) + kWidth, n) - max(begin(j), 0));
    }
    return kVectors * kWidth - inside;
  }

  // Loads this thread's vectors; elements outside of the row become `fill`.
  __device__ __forceinline__ void load(const T* row, int64_t step, T fill,
                                       Vector (&v)[kVectors]) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) v[j].data[e] = fill;
      if (whole(j)) v[j] = load_read_only_in_place<kWidth>(row + begin(j));
    }
    if constexpr (kRagged) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if (whole(j)) continue;
        const T* from = row + begin(j) * step;
#pragma unroll
        for (int e = 0; e < kWidth; ++e, from += step) {
          const int i = begin(j) + e;
          if (i >= 0 && i < n) v[j].data[e] = *from;
        }
      }
    }
  }

  // Stores vector j, except for elements outside of the row.
  __device__ __forceinline__ void store(T* row, int64_t step, int j,
                                        const float (&x)[kWidth]) const {
    const Vector packed = pack<T, kWidth>(x);
    if (whole(j)) {
      cuda::store(row + begin(j), packed);
    } else if constexpr (kRagged) {
      T* to = row + begin(j) * step;
#pragma unroll
      for (int e = 0; e < kWidth; ++e, to += step) {
        const int i = begin(j) + e;
        if (i >= 0 && i < n) *to = packed.data[e];
      }
    }
  }
};

// Merges the values of `lanes` neighbouring lanes, a power of two; each of them gets the result.
// All lanes of the warp call it.
template <class Merge>
__device__ __forceinline__ float lanes_reduce(float value, int lanes, Merge merge) {
#pragma unroll
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
    if (mask < lanes) value = merge(value, shuffle_xor(value, mask));
  }
  return value;
}

// Makes the compiler forget what it knows about a vector's elements, so that it converts them anew
// rather than keep the results.
template <class T, int N>
__device__ __forceinline__ void hide(Vec<T, N>& v) {
  uint4 w;
  static_assert(sizeof(v) == sizeof(w));
  memcpy(&w, v.data, sizeof(w));
  asm volatile("" : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w));
  memcpy(v.data, &w, sizeof(w));
}

// The kernel: a block has blockDim.x threads for each of blockDim.y rows.
template <class Op, TileKind kKind>
__global__ void __maxnreg__((tile_registers<Op, kKind>()))
    map_tile(const __grid_constant__ Op op, const TileShape shape) {
  using T = typename Op::Element;
  using State = typename Op::State;
  constexpr int kInputs = Op::kInputs, kWidth = kVecWidth<T>, kVectors = kTileVectors<Op, kKind>;
  constexpr bool kAny = kKind == TileKind::kAny;
  __shared__ State states[kWarpSize];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t index = block_index() * blockDim.y + threadIdx.y;
  // Threads without a row stay for the shuffles and the barrier, and take row 0 without storing it.
  const bool active = index < shape.rows;
  const int64_t r = active ? index : 0;
  const auto row_of = [r](const auto& view) {
    if constexpr (kAny) return view.row(r);
    return view.data + r * view.rows.last_stride;
  };
  const typename Op::Row shared = op.row(r);
  const Tile<T, kVectors, kAny> tile(shape, row_of(op.in[0]));
  Vec<T, kWidth> v[kInputs][kVectors];
#pragma unroll
  for (int k = 0; k < kInputs; ++k) {
    tile.load(row_of(op.in[k]), op.in[k].step, from_float<T>(Op::kFill), v[k]);
  }
  float x[kInputs][kVectors][kWidth];
  State own = Op::empty();
  if constexpr (kInputs == 1) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) unpack(v[0][j], x[0][j]);
    op.add(own, shared, x[0], x[0], tile.outside());
  } else {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float first[1][kWidth], second[1][kWidth];
      unpack(v[0][j], first[0]);
      unpack(v[1][j], second[0]);
      op.add(own, shared, first, second, 0);
    }
  }
  State all = Op::reduce(own, kKind == TileKind::kWarps ? kWarpSize : min(blockDim.x, kWarpSize));
  if (kKind == TileKind::kWarps || (kAny && blockDim.x > kWarpSize)) {
    const int warps = blockDim.x / kWarpSize, slot = threadIdx.x & (shape.slots - 1);
    State* row_states = &states[threadIdx.y * warps];
    if (threadIdx.x % kWarpSize == 0) row_states[threadIdx.x / kWarpSize] = all;
    __syncthreads();
    all = Op::reduce(slot < warps ? row_states[slot] : Op::empty(), shape.slots);
  }
  if (!active) return;
  T* out = row_of(op.out);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if constexpr (kInputs == 2) {
      // The elements are unpacked a second time: kept since `add`, the floats would take twice the
      // registers.
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        hide(v[k][j]);
        unpack(v[k][j], x[k][j]);
      }
    }
    op.apply(shared, own, all, x[0][j], x[kInputs - 1][j]);
    tile.store(out, op.out.step, j, x[0][j]);
  }
}

// Whether rows of this layout fit the registers. The answer depends on sizes and strides alone, as
// a workspace query must.
inline bool fits_tile(const RowLayout& layout, int64_t element_bytes) {
  return !layout.columns() && ceil_div(layout.n * element_bytes, 16) <= kMaxTileVectors;
}

// Returns the block for rows of `items` vectors of each of `inputs` inputs, `vectors` to a thread.
inline dim3 tile_block(int64_t items, int64_t vectors, int inputs) {
  const int64_t threads = ceil_div(items, vectors);
  if (threads <= kWarpSize) {
    // Warps share nothing, so blocks are small: they come and go evenly.
    const int group = power_of_two_at_least(threads);
    return dim3(group, kWarpRowsBlock / group);
  }
  // A row gets whole warps, as few as hold it. Short rows share a block, which leaves fewer blocks
  // to start; the barrier costs them little, since all loads started together.
  const int group = static_cast<int>(ceil_div(threads, kWarpSize) * kWarpSize);
  const int most = 256 * inputs;
  return dim3(group, std::max(1, most / group));
}

// Launches map_tile for rows of `items` vectors.
template <class Op, TileKind kKind>
Status launch_tiles(const Op& op, TileShape shape, int64_t items, cudaStream_t stream) {
  const dim3 block = tile_block(items, kTileVectors<Op, kKind>, Op::kInputs);
  shape.slots = power_of_two_at_least(ceil_div(block.x, kWarpSize));
  return launch_early(map_tile<Op, kKind>, "map_tile",
                      {grid_of(ceil_div(shape.rows, block.y)), block}, stream, op, shape);
}

// Maps all rows, for a layout that fits_tile. `any` does the same as `op` and is used for rows that
// lie anywhere; its type may differ, so that one kernel for them serves several ops.
template <class Op, class AnyOp>
Status map_tiles(const Op& op, const AnyOp& any, const RowLayout& layout, cudaStream_t stream) {
  constexpr int kWidth = kVecWidth<typename Op::Element>;
  if (layout.rows == 0 || layout.n == 0) return {};
  TileShape shape{layout.rows, static_cast<int>(layout.n), 1, layout.vectors};
  int64_t items = ceil_div(layout.n, kWidth);
  bool even = op.out.rows.ndim <= 1;  // in each tensor, rows are evenly spaced
  for (const auto& in : op.in) even = even && in.rows.ndim <= 1;
  if (even && layout.aligned && layout.n % kWidth == 0) {
    return items <= kWarpSize * kTileVectors<Op, TileKind::kLanes>
               ? launch_tiles<Op, TileKind::kLanes>(op, shape, items, stream)
               : launch_tiles<Op, TileKind::kWarps>(op, shape, items, stream);
  }
  if (layout.vectors && !layout.aligned) {
    // A row that begins inside a vector may end in one more, if there is a thread to take it.
    shape.vectors = items < kMaxTileVectors;
    items += shape.vectors ? 1 : 0;
  }
  return launch_tiles<AnyOp, TileKind::kAny>(any, shape, items, stream);
}

template <class Op>
Status map_tiles(const Op& op, const RowLayout& layout, cudaStream_t stream) {
  return map_tiles(op, op, layout, stream);
}

}  // namespace fk::cuda
