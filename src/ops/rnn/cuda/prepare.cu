// Copies, and products over all steps.
//
// Floor: every matrix read once and written once. These kernels are a small part of a call; one
// instance of each serves all dtypes.
#include <algorithm>

#include "cuda/dependent_launch.cuh"
#include "cuda/gemm/portable_call.cuh"
#include "cuda/gemm/sm90_call.h"
#include "cuda/parameter.cuh"
#include "ops/rnn/cuda/cells.cuh"
#include "ops/rnn/cuda/exchange.cuh"
#include "ops/rnn/cuda/prepare.h"

namespace fk::cuda::rnn {

namespace {

using fk::rnn::Problem;

constexpr int kSquare = 32, kSquareHeight = 8;
constexpr int kThreads = 128;

struct Place {
  void* data = nullptr;  // null: not there
  DType dtype = DType::kFloat32;
  int64_t row = 0, column = 0;
};
Place place_of(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.dtype, t.ndim >= 2 ? t.stride(-2) : 0, t.stride(-1)};
}
__device__ __forceinline__ float get(const Place& p, int64_t row, int64_t column) {
  return p.data == nullptr ? 0.f : load_as(p.dtype, p.data, row * p.row + column * p.column);
}
__device__ __forceinline__ void put(const Place& p, int64_t row, int64_t column, float x) {
  if (p.data != nullptr) store_as(p.dtype, p.data, row * p.row + column * p.column, x);
}

// Copies squares of a matrix through shared memory, so that neighbouring threads read and write
// neighbours whichever way it lies.
__global__ void __launch_bounds__(kSquare* kSquareHeight)
    rnn_copy_weight(Place from, Place to, int64_t rows, int64_t columns, bool transposed) {
  wait_for_earlier_kernels();
  __shared__ float square[kSquare][kSquare + 1];
  const int64_t row = blockIdx.y * int64_t{kSquare}, column = blockIdx.x * int64_t{kSquare};
  for (int i = threadIdx.y; i < kSquare; i += kSquareHeight) {
    if (row + i < rows && column + threadIdx.x < columns) {
      square[i][threadIdx.x] = get(from, row + i, column + threadIdx.x);
    }
  }
  __syncthreads();
  for (int i = threadIdx.y; i < kSquare; i += kSquareHeight) {
    const int r = transposed ? threadIdx.x : i, c = transposed ? i : threadIdx.x;
    if (row + r >= rows || column + c >= columns) continue;
    if (transposed) {
      put(to, column + c, row + r, square[r][c]);
    } else {
      put(to, row + r, column + c, square[r][c]);
    }
  }
}

struct PackArguments {
  Place w_hh;
  DType dtype;
  int64_t hidden, gates;
  Direction direction;
  KeptPlan plan;
  uint4* packed;
  int64_t pack_blocks;
  void* published;
  int64_t unpublished, known_rows;
  Place known;

  // Entry k of a row that a block multiplies, or 0 where there is none.
  __device__ __forceinline__ float at(int rank, int row, int k) const {
    const bool forward = direction == Direction::kForward;
    const int unit = forward ? row / static_cast<int>(gates) : row;
    const int entry = forward ? k : k % plan.gate_stride;
    const int gate = forward ? row % static_cast<int>(gates) : k / plan.gate_stride;
    const int64_t own = int64_t{rank} * plan.units + unit;
    if (unit >= plan.units || own >= hidden || gate >= gates || entry >= hidden) return 0.f;
    return forward ? get(w_hh, gate * hidden + own, k) : get(w_hh, gate * hidden + entry, own);
  }
  __device__ __forceinline__ uint32_t pair_at(int rank, int row, int k) const {
    const float low = at(rank, row, k), high = at(rank, row, k + 1);
    return dtype == DType::kFloat16 ? pack_pair<__half>(low, high)
                                    : pack_pair<__nv_bfloat16>(low, high);
  }
};

// The rows that blocks publish in. Each block takes every `blocks`-th.
__device__ __forceinline__ void fill_published(const PackArguments& a, int64_t block,
                                               int64_t blocks) {
  const int size = a.dtype == DType::kFloat32 ? 4 : 2;
  const int width = 16 / size, depth = a.plan.depth();
  for (int64_t row = block; row < a.unpublished + a.known_rows; row += blocks) {
    const bool is_known = row >= a.unpublished;
    for (int k = static_cast<int>(threadIdx.x) * width; k < depth; k += kThreads * width) {
      const int64_t at = row * depth + k;
      if (!is_known && k + width <= a.plan.entries) {
        static_cast<uint4*>(a.published)[at / width] =
            make_uint4(kNothing, kNothing, kNothing, kNothing);
        continue;
      }
      for (int i = 0; i < width; ++i) {
        const bool is_entry = k + i < a.plan.entries;
        const float x = is_known && is_entry ? get(a.known, row - a.unpublished, k + i) : 0.f;
        uint32_t bits = is_entry ? kNothing : 0;
        if (a.dtype == DType::kFloat32) {
          if (is_known) bits = published_bits<float>(x);
          static_cast<uint32_t*>(a.published)[at + i] = bits;
        } else {
          if (is_known) {
            bits = a.dtype == DType::kFloat16 ? published_bits<__half>(x)
                                              : published_bits<__nv_bfloat16>(x);
          }
          static_cast<uint16_t*>(a.published)[at + i] = static_cast<uint16_t>(bits);
        }
      }
    }
  }
}

// A thread of the first blocks packs one vector of a lane's registers: kept.cuh says what is in it.
__global__ void __launch_bounds__(kThreads)
    rnn_pack_weights(const __grid_constant__ PackArguments a) {
  wait_for_earlier_kernels();
  if (blockIdx.x >= a.pack_blocks) {
    fill_published(a, blockIdx.x - a.pack_blocks, gridDim.x - a.pack_blocks);
    return;
  }
  const KeptPlan& plan = a.plan;
  // The registers of a GPU hold less than 2^31 vectors.
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= plan.packed()) return;
  const int lane = static_cast<int>(index % 32);
  const int i = static_cast<int>(index / 32 % static_cast<uint32_t>(plan.vectors));
  const int warp = static_cast<int>(index / 32 / static_cast<uint32_t>(plan.vectors) % kKeptWarps);
  const int rank = static_cast<int>(index / 32 / static_cast<uint32_t>(plan.vectors) / kKeptWarps);
  const int first_k = warp % plan.slices * plan.slab;
  uint4 v;
  if (a.dtype == DType::kFloat32) {
    const int row = float_row(plan, warp, lane) + i % kFloatRows;
    const int k = first_k + float_depth(plan, lane, i);
    v = make_uint4(__float_as_uint(a.at(rank, row, k)), __float_as_uint(a.at(rank, row, k + 1)),
                   __float_as_uint(a.at(rank, row, k + 2)),
                   __float_as_uint(a.at(rank, row, k + 3)));
  } else {
    const int tiles = tensor_tiles(a.direction);
    const int tile = i / 2 % tiles, block = i / 2 / tiles;
    const int row = (warp / plan.slices * tiles + tile) * 16 + lane / 4;
    const int k = first_k + block * kTensorBlock + lane % 4 * 8 + i % 2 * 4;
    v = make_uint4(a.pair_at(rank, row, k), a.pair_at(rank, row + 8, k),
                   a.pair_at(rank, row, k + 2), a.pair_at(rank, row + 8, k + 2));
  }
  a.packed[index] = v;
}

struct StatesArguments {
  Problem p;
  Place h0, c0, last_h, last_c, h, state;
  bool has_cell;
};

__global__ void __launch_bounds__(kThreads)
    rnn_begin_states(const __grid_constant__ StatesArguments a) {
  wait_for_earlier_kernels();
  const int64_t s = blockIdx.x, u = blockIdx.y * int64_t{kThreads} + threadIdx.x;
  const SequenceSteps steps = a.p.sequences[s];
  const bool ends = steps.begin == steps.end;
  if (u < a.p.outputs) {
    const float h = get(a.h0, s, u);
    put(a.h, s, u, h);
    if (!a.has_cell) put(a.state, s, u, h);
    if (ends) put(a.last_h, s, u, h);
  }
  if (a.has_cell && u < a.p.hidden) {
    const float c = get(a.c0, s, u);
    put(a.state, s, u, c);
    if (ends) put(a.last_c, s, u, c);
  }
}

struct BeforeArguments {
  Problem p;
  Place y, h0, to;
  int64_t y_batch;
};

// Copies h_{t-1} of every position, from y or, at a sequence's first step, h0. Blocks along x take
// a sequence each, those along z every gridDim.z-th step of it.
__global__ void __launch_bounds__(kThreads)
    rnn_outputs_before(const __grid_constant__ BeforeArguments a) {
  wait_for_earlier_kernels();
  const int64_t s = blockIdx.x, u = blockIdx.y * int64_t{kThreads} + threadIdx.x;
  if (u >= a.p.outputs) return;
  const SequenceSteps steps = a.p.sequences[s];
  for (int64_t t = blockIdx.z; t < steps.end - steps.begin; t += gridDim.z) {
    const int64_t position = a.p.position(steps, t);
    float h;
    if (t == 0) {
      h = get(a.h0, s, u);
    } else {
      h = load_as(a.y.dtype, a.y.data,
                  steps.batch * a.y_batch + a.p.position(steps, t - 1) * a.y.row + u * a.y.column);
    }
    put(a.to, steps.batch * a.p.length + position, u, h);
  }
}

// Adds up the columns of a matrix. A block takes 32 columns; each of its rows of threads every
// 32nd row of the matrix.
__global__ void __launch_bounds__(kSquare* kSquare)
    rnn_column_sums(Place from, int64_t rows, int64_t columns, Place to) {
  wait_for_earlier_kernels();
  __shared__ float sums[kSquare][kSquare + 1];
  const int64_t column = blockIdx.x * int64_t{kSquare} + threadIdx.x;
  float sum = 0;
  if (column < columns) {
    for (int64_t r = threadIdx.y; r < rows; r += kSquare) sum += get(from, r, column);
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= columns) return;
  float total = 0;
  for (int i = 0; i < kSquare; ++i) total += sums[i][threadIdx.x];
  put(to, 0, column, total);
}

// Adds up what teams of blocks have of the biases' gradients (cells.cuh says what that is).
__global__ void __launch_bounds__(kThreads)
    rnn_bias_gradients(const float* sums, int teams, int64_t hidden, int64_t gates, Place of_x,
                       Place of_h) {
  wait_for_earlier_kernels();
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t unit = i / kBiasSums, which = i % kBiasSums;
  if (unit >= hidden) return;
  float sum = 0;
  for (int team = 0; team < teams; ++team) sum += sums[team * hidden * kBiasSums + i];
  const bool is_other = which >= gates;  // of the product with h only
  const int64_t row = (is_other ? gates - 1 : which) * hidden + unit;
  if (!is_other) put(of_x, 0, row, sum);
  if (is_other || gates == kBiasSums || which + 1 < gates) put(of_h, 0, row, sum);
}

unsigned blocks_for(int64_t count, int64_t each) {
  return static_cast<unsigned>(ceil_div(count, each));
}

Tensor columns_of(Tensor t, int64_t first, int64_t count) {
  t.data = static_cast<char*>(t.data) + first * t.stride(-1) * size_of(t.dtype);
  t.shape[t.ndim - 1] = count;
  return t;
}
Tensor rows_of_matrix(Tensor t, int64_t first, int64_t count) {
  t.data = static_cast<char*>(t.data) + first * t.stride(0) * size_of(t.dtype);
  t.shape[0] = count;
  return t;
}

Status sum_columns(const Tensor& from, const Tensor& to, cudaStream_t stream) {
  if (!to || to.numel() == 0) return {};
  return launch_early(rnn_column_sums, "rnn_column_sums",
                      {{blocks_for(from.size(1), kSquare)}, {kSquare, kSquare}}, stream,
                      place_of(from), from.size(0), from.size(1), place_of(to));
}

// kFloat: as exact as sums of floats are, and K is not split. What goes into a sigmoid needs
// that: three products of parts on tensor cores miss twice torch's error there.
enum class Units { kAny, kFloat };

// The product of a and b, whose K may be split among blocks that leave sums in `partials`; `bias`
// may be undefined.
Status product(const Tensor& a, bool a_rows_are_outer, const Tensor& b, bool b_rows_are_outer,
               DType dtype, const Tensor& bias, const Tensor& out, float* partials,
               cudaStream_t stream, Units units = Units::kAny) {
  cuda_sm90::MatrixProduct hopper;
  hopper.a = a;
  hopper.b = b;
  hopper.bias = bias;
  hopper.out = out;
  hopper.a_rows_are_outer = a_rows_are_outer;
  hopper.b_rows_are_outer = b_rows_are_outer;
  hopper.partials = partials;
  if (a.dtype == dtype && cuda_sm90::takes(hopper)) return cuda_sm90::multiply(hopper, stream);
  PortableArguments f = {};
  f.a = operand(a, a_rows_are_outer, dtype);
  f.b = operand(b, b_rows_are_outer, dtype);
  f.out = result(out);
  const int64_t a_rows = rows_of(a).count, b_rows = rows_of(b).count;
  f.rows = a_rows_are_outer ? a_rows : a.size(-1);
  f.columns = b_rows_are_outer ? b_rows : b.size(-1);
  f.depth = a_rows_are_outer ? a.size(-1) : a_rows;
  if (bias) {
    f.epilogue.bias = bias.data;
    f.epilogue.float_bias = bias.dtype == DType::kFloat32;
    f.epilogue.bias_stride = bias.stride(0);
  }
  f.on_float_units = units == Units::kFloat;
  return multiply(f, dtype, a.device_id, f.on_float_units ? nullptr : partials, stream);
}

}  // namespace

Status copy_weight(const Tensor& weight, DType dtype, void* to, bool transposed,
                   cudaStream_t stream) {
  const int64_t rows = weight.size(0), columns = weight.size(1);
  if (rows == 0 || columns == 0) return {};
  const Place dense = {to, dtype, transposed ? rows : columns, 1};
  return launch_early(
      rnn_copy_weight, "rnn_copy_weight",
      {{blocks_for(columns, kSquare), blocks_for(rows, kSquare)}, {kSquare, kSquareHeight}}, stream,
      place_of(weight), dense, rows, columns, transposed);
}

Status pack_weight(const PackedWeight& w, cudaStream_t stream) {
  constexpr int64_t kMostFillers = 1024;
  const int64_t pack_blocks =
      w.packed == nullptr ? 0 : ceil_div(w.plan.packed(), int64_t{kThreads});
  const int64_t rows = w.published == nullptr ? 0 : w.unpublished + w.known_rows;
  const PackArguments a = {place_of(w.w_hh), w.dtype,       w.hidden,     w.gates,
                           w.direction,      w.plan,        w.packed,     pack_blocks,
                           w.published,      w.unpublished, w.known_rows, place_of(w.known)};
  const int64_t blocks = pack_blocks + std::min(rows, kMostFillers);
  if (blocks == 0) return {};
  return launch_early(rnn_pack_weights, "rnn_pack_weights",
                      {{static_cast<unsigned>(blocks)}, {kThreads}}, stream, a);
}

Status begin_states(const Problem& p, const FirstStates& states, cudaStream_t stream) {
  const int64_t widest = std::max(p.outputs, p.hidden), count = p.sequences.count;
  if (widest == 0 || count == 0) return {};
  StatesArguments a = {p,
                       place_of(states.h0),
                       place_of(states.c0),
                       place_of(states.last_h),
                       place_of(states.last_c),
                       {states.h, states.dtype, p.outputs, 1},
                       {states.state, DType::kFloat32, p.hidden, 1},
                       states.has_cell};
  return launch_early(rnn_begin_states, "rnn_begin_states",
                      {{static_cast<unsigned>(count), blocks_for(widest, kThreads)}, {kThreads}},
                      stream, a);
}

int64_t partial_floats_of(const Problem& p, DType dtype, int device, bool backward) {
  const int64_t positions = p.positions(), gates = p.gates * p.hidden;
  const auto floats = [&](int64_t rows, int64_t columns, int64_t depth) {
    return std::max(partial_floats(rows, columns, depth, false, dtype, device),
                    cuda_sm90::matrix_partial_floats(rows, columns, depth, device));
  };
  if (!backward) return dtype == DType::kFloat32 ? 0 : floats(positions, gates, p.inputs);
  // A GRU that resets before the product has two products in place of dW_hh's one.
  return std::max({floats(positions, p.inputs, gates), floats(gates, p.inputs, positions),
                   floats(gates, p.outputs, positions), floats(2 * p.hidden, p.outputs, positions),
                   floats(p.hidden, p.outputs, positions), floats(p.outputs, p.hidden, positions)});
}

Status multiply_inputs(const Tensor& x, const Tensor& w_ih, const Tensor& b_ih, float* to,
                       float* partials, cudaStream_t stream) {
  Tensor out = x;
  out.data = to;
  out.dtype = DType::kFloat32;
  out.ndim = 2;
  out.shape[0] = x.size(0) * x.size(1);
  out.shape[1] = out.strides[0] = w_ih.size(0);
  out.strides[1] = 1;
  const Units units = x.dtype == DType::kFloat32 ? Units::kFloat : Units::kAny;
  return product(x, true, w_ih, true, x.dtype, b_ih, out, partials, stream, units);
}

Status multiply_over_steps(const Tensor& a, const Tensor& b, const Tensor& dw, float* partials,
                           cudaStream_t stream) {
  return product(a, false, b, false, a.dtype, {}, dw, partials, stream);
}

Status add_gradients(const Problem& p, const GradientSums& g, cudaStream_t stream) {
  if (g.dx) {
    FK_RETURN_IF_ERROR(
        product(g.of_x, true, g.w_ih, false, g.of_x.dtype, {}, g.dx, g.partials, stream));
  }
  if (g.dw_ih) FK_RETURN_IF_ERROR(multiply_over_steps(g.of_x, g.x, g.dw_ih, g.partials, stream));
  if (g.dw_hh) {
    Tensor before = g.of_h;
    before.data = g.h_before;
    before.shape[1] = before.strides[0] = p.outputs;
    if (before.numel() > 0) {
      constexpr int64_t kStepBlocks = 64;
      const BeforeArguments a = {p, place_of(g.y), place_of(g.h0), place_of(before), g.y.stride(0)};
      const LaunchShape shape{
          {static_cast<unsigned>(p.sequences.count), blocks_for(p.outputs, kThreads),
           static_cast<unsigned>(std::min(p.length, kStepBlocks))},
          {kThreads}};
      FK_RETURN_IF_ERROR(launch_early(rnn_outputs_before, "rnn_outputs_before", shape, stream, a));
    }
    // The rows of n meet r * h_{t-1} where the reset gate comes first.
    const int64_t with_h = g.met ? 2 * p.hidden : p.gates * p.hidden;
    FK_RETURN_IF_ERROR(multiply_over_steps(columns_of(g.of_h, 0, with_h), before,
                                           rows_of_matrix(g.dw_hh, 0, with_h), g.partials, stream));
    if (g.met) {
      FK_RETURN_IF_ERROR(multiply_over_steps(columns_of(g.of_h, with_h, p.hidden), g.met,
                                             rows_of_matrix(g.dw_hh, with_h, p.hidden), g.partials,
                                             stream));
    }
  }
  if (g.bias_sums != nullptr) {
    if (!g.db_ih && !g.db_hh) return {};
    return launch_early(rnn_bias_gradients, "rnn_bias_gradients",
                        {{blocks_for(p.hidden * kBiasSums, kThreads)}, {kThreads}}, stream,
                        g.bias_sums, g.teams, p.hidden, p.gates, place_of(g.db_ih),
                        place_of(g.db_hh));
  }
  FK_RETURN_IF_ERROR(sum_columns(g.of_x, g.db_ih, stream));
  return sum_columns(g.of_h, g.db_hh, stream);
}

}  // namespace fk::cuda::rnn
