// Backward: with xhat = (x - mean) * rstd and g = dy * weight,
//   dx = (g - mean(g) - xhat * mean(g * xhat)) * rstd + dsum     (rms_norm: no mean, no mean(g))
//   dweight = sum over rows of dy * xhat,   dbias = sum over rows of dy
//
// Floor: dy, x and dsum read once, dx written once. A fixed number of blocks walks the rows, and
// each thread keeps the sums of its own columns; a block leaves one row of partial sums, and a
// second kernel adds those in a fixed order, so the gradients repeat bit for bit.
#pragma once

#include "cuda/norm/loaders.cuh"

namespace fk::cuda::norm {

struct Backward {
  UntypedRows inputs[3];  // dy, x, dsum
  UntypedRows dx;
  UntypedRows mean, rstd;  // mean: layer_norm's
  Parameter weight;
  float* dweight = nullptr;  // partial sums, [blocks, columns]; NULL: not wanted
  float* dbias = nullptr;
  int64_t rows = 0, columns = 0;
  int stages = 0;  // of the bulk loader
};

// How the kernel is cut for rows of at most kTeamThreads * kVecs vectors. A row of the table
// (norm.cu) adds how, as ForwardRow says; kBlocks are the blocks that share a multiprocessor.
struct BackwardRow {
  static constexpr bool kBulk = false;     // whether rows come by bulk copies, where there are any
  static constexpr bool kSpecial = false;  // whether the tile needs kHasSpecial
};
template <class Row>
struct BackwardTile : Row {
  using Team = norm::Team<Row::kTeamThreads, Row::kThreads>;
};

// Adds the teams' sums of their columns and leaves them in `partial`, this block's row. Several
// teams meet in shared memory, of partial_bytes().
template <class Team, int kVecs, int kWidth>
__device__ __forceinline__ void store_partial(const float (&sums)[kVecs][kWidth], int vectors,
                                              float* partial) {
  constexpr int kQuads = kWidth / 4;
  extern __shared__ uint4 shared_rows[];
  const int quads = vectors * kQuads;
  float4* row = reinterpret_cast<float4*>(partial);
  float4* teams = reinterpret_cast<float4*>(shared_rows);
  if constexpr (Team::kCount > 1) __syncthreads();  // the last use of the shared memory
  float4* own = Team::kCount > 1 ? teams + Team::index() * quads : row;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int v = Team::rank() + i * Team::kSize;
    if (v >= vectors) continue;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const float* s = &sums[i][4 * q];
      own[v * kQuads + q] = make_float4(s[0], s[1], s[2], s[3]);
    }
  }
  if constexpr (Team::kCount > 1) {
    __syncthreads();
    for (int q = threadIdx.x; q < quads; q += Team::kThreads) {
      float4 sum = teams[q];
#pragma unroll
      for (int t = 1; t < Team::kCount; ++t) {
        const float4 other = teams[t * quads + q];
        sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
      }
      row[q] = sum;
    }
  }
}

// Returns the shared memory that store_partial needs.
template <class Team>
int partial_bytes(int64_t columns) {
  return Team::kCount > 1 ? static_cast<int>(Team::kCount * columns * sizeof(float)) : 0;
}

// kPlain says that all inputs and dx are given, the weight in T, and that no rows are split over
// dims. It needs kHasSpecial.
template <class T, bool kLayer, bool kPlain, class Tile>
__global__ void __launch_bounds__(Tile::Team::kThreads,
                                  min_blocks(Tile::Team::kThreads, Tile::kBlocks))
    backward_tiled(const __grid_constant__ Backward p) {
  if ((kPlain || Tile::kSpecial) && !kHasSpecial) return;
  using Team = typename Tile::Team;
  constexpr int kVecs = Tile::kVecs;
#if __CUDA_ARCH__ >= 900
  using Loader = std::conditional_t<Tile::kBulk, BulkLoader<T, 3, Team, kVecs, kPlain>,
                                    DirectLoader<T, 3, Team, kVecs, kPlain>>;
#else
  using Loader = DirectLoader<T, 3, Team, kVecs, kPlain>;
#endif
  constexpr int kWidth = kVecWidth<T>;
  using Scratch = std::conditional_t<kLayer, Pair, float>;
  // Two are taken in turn, so that one barrier a row is enough.
  __shared__ Scratch scratch[2][Team::kCount][Team::kWarps];
  let_next_kernel_start();
  const uint32_t rows = static_cast<uint32_t>(p.rows);
  const int vectors = static_cast<int>(p.columns) / kWidth;
  const float scale = 1.f / static_cast<float>(p.columns);
  // A block's teams take every gridDim.x-th row in turn, so that blocks differ by one row at most.
  const uint32_t first = blockIdx.x + Team::index() * gridDim.x;
  const uint32_t step = gridDim.x * Team::kCount;
  float dweight[kVecs][kWidth] = {};
  float dbias[kLayer ? kVecs : 1][kWidth] = {};

  wait_for_earlier_kernels();
  Loader loader(p.inputs, first, step, vectors, rows, p.stages);
  // If these were read for each row from L1, the weights would be what a row waits for.
  const HeldParameter<T, Team, kVecs, kPlain> weight(p.weight, vectors);
  // The statistics are fetched a row ahead: a row must not begin with a wait for them.
  float next_mean = 0, next_rstd = 0;
  const auto fetch_statistics = [&](uint32_t row) {
    if (row >= rows) return;
    next_rstd = __ldg(after_wait(p.rstd.row<float, kPlain>(row)));
    if (kLayer) next_mean = __ldg(after_wait(p.mean.row<float, kPlain>(row)));
  };
  fetch_statistics(first);
  int turn = 0;
  for (uint32_t row = first; row < rows; row += step, turn ^= 1) {
    const float mean = next_mean, rstd = next_rstd;
    RowVectors<T, kVecs> parts[3];
    loader.take(row, parts);
    fetch_statistics(row + step);
    Pair sums = {0, 0};  // of g, of g * (x - mean)
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int v = Team::rank() + i * Team::kSize;
      if (v >= vectors) continue;
      float dy[kWidth], x[kWidth], g[kWidth];
      weight.template get<!kLayer>(i, g);
      unpack(parts[0][i], dy);
      unpack(parts[1][i], x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float product = dy[j] * (kLayer ? x[j] - mean : x[j]);
        dweight[i][j] += product * rstd;
        if constexpr (kLayer) {
          dbias[i][j] += dy[j];
          sums.first += g[j] * dy[j];
        }
        sums.second += g[j] * product;
      }
    }
    if constexpr (kLayer) {
      sums = Team::reduce(sums, SumPair(), scratch[turn][Team::index()]);
    } else {
      sums.second = Team::reduce(sums.second, Sum(), scratch[turn][Team::index()]);
    }
    loader.refill(row);
    if (!kPlain && !p.dx) continue;
    const float mean_g = sums.first * scale;
    const float slope = sums.second * scale * rstd * rstd;  // mean(g * xhat) * rstd
    T* dx = p.dx.row<T, kPlain>(row);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int v = Team::rank() + i * Team::kSize;
      if (v >= vectors) continue;
      // g is computed again, rather than kept in registers since the sums.
      float dy[kWidth], x[kWidth], g[kWidth], out[kWidth];
      weight.template get<!kLayer>(i, g);
      unpack(parts[0][i], dy);
      unpack(parts[1][i], x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float along = kLayer ? (x[j] - mean) * slope + mean_g : x[j] * slope;
        out[j] = (g[j] * dy[j] - along) * rstd;
      }
      if (kPlain || p.inputs[2]) {
        float dsum[kWidth];
        unpack(parts[2][i], dsum);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) out[j] += dsum[j];
      }
      store_streaming(dx + v * kWidth, pack<T>(out));
    }
  }
  const int64_t partial = blockIdx.x * p.columns;
  if (p.dweight) store_partial<Team>(dweight, vectors, p.dweight + partial);
  if constexpr (kLayer) {
    if (p.dbias) store_partial<Team>(dbias, vectors, p.dbias + partial);
  }
}

// kWidth 1: any strides. Wider: unit column stride and 16-byte aligned rows. The sums over rows
// live in the block's row of partial sums, where each thread comes back to its own columns.
template <class T, int kWidth, int kThreads>
__global__ void __launch_bounds__(kThreads) backward_looped(const __grid_constant__ Backward p) {
  __shared__ Pair scratch[kThreads / kWarpSize];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const float scale = 1.f / static_cast<float>(p.columns);
  float* dweight = p.dweight ? p.dweight + blockIdx.x * p.columns : nullptr;
  float* dbias = p.dbias ? p.dbias + blockIdx.x * p.columns : nullptr;
  // A single column of layer_norm deviates by nothing, and g - mean(g) is 0. It would not be quite
  // 0 where the product in g is fused with the difference, so it is made 0 here.
  const float deviates = p.mean && p.columns == 1 ? 0.f : 1.f;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const float rstd = *p.rstd.row<float>(row) * deviates;
    const float mean = p.mean ? *p.mean.row<float>(row) : 0.f;
    const T* rows[3] = {};
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      if (p.inputs[k]) rows[k] = p.inputs[k].row<T>(row);
    }
    const auto load_input = [&](int k, int64_t c, float(&out)[kWidth]) {
      unpack(load<kWidth>(rows[k] + c * p.inputs[k].column_stride), out);
    };
    const auto each = [&](auto&& body) {
      for (int64_t c = threadIdx.x * kWidth; c < p.columns; c += kThreads * kWidth) body(c);
    };
    const auto add_to = [&](float* sums, int64_t c, const float(&values)[kWidth]) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        sums[c + j] = row == blockIdx.x ? values[j] : sums[c + j] + values[j];
      }
    };

    Pair sums = {0, 0};
    each([&](int64_t c) {
      float dy[kWidth], xhat[kWidth], g[kWidth];
      load_input(0, c, dy);
      load_input(1, c, xhat);
      load_parameter<T>(p.weight, c, g);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        xhat[j] = (xhat[j] - mean) * rstd;
        g[j] *= dy[j];
        sums.first += g[j];
        sums.second += g[j] * xhat[j];
        xhat[j] *= dy[j];
      }
      if (dweight != nullptr) add_to(dweight, c, xhat);
      if (dbias != nullptr) add_to(dbias, c, dy);
    });
    sums = block_reduce<kThreads>(sums, SumPair(), scratch);
    const float mean_g = p.mean ? sums.first * scale : 0.f, mean_g_xhat = sums.second * scale;
    if (p.dx) {
      T* dx = p.dx.row<T>(row);
      each([&](int64_t c) {
        float dy[kWidth], xhat[kWidth], g[kWidth];
        load_input(0, c, dy);
        load_input(1, c, xhat);
        load_parameter<T>(p.weight, c, g);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          xhat[j] = (xhat[j] - mean) * rstd;
          g[j] = (g[j] * dy[j] - mean_g - xhat[j] * mean_g_xhat) * rstd;
        }
        if (p.inputs[2]) {
          load_input(2, c, dy);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) g[j] += dy[j];
        }
        store(dx + c * p.dx.column_stride, pack<T>(g));
      });
    }
    __syncthreads();  // before the next row writes scratch
  }
}

struct Gradient {
  const float* partials = nullptr;  // [blocks, columns]; NULL: not wanted
  void* out = nullptr;
  int64_t stride = 1;
  DType dtype = DType::kFloat32;
};
struct Gradients {
  Gradient gradients[2];  // dweight, dbias: one each per blockIdx.y
  int64_t columns = 0;
  int blocks = 0;
};

constexpr int kGradientColumns = 8;
constexpr int kGradientThreads = 256;

// A block adds the partial sums of 8 columns, a sector of memory wide: 32 threads a column, whose
// loads are under way together, then their sums.
static __global__ void __launch_bounds__(kGradientThreads)
    add_partials(const __grid_constant__ Gradients p) {
  constexpr int kLoads = 9;
  static_assert(kGradientThreads == kGradientColumns * kWarpSize);
  __shared__ float sums[kWarpSize][kGradientColumns + 1];
  const Gradient& gradient = p.gradients[blockIdx.y];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (gradient.out == nullptr) return;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kGradientColumns;
  const int column = threadIdx.x % kGradientColumns, share = threadIdx.x / kGradientColumns;
  float sum = 0;
  if (first + column < p.columns) {
    const float* partials = gradient.partials + first + column;
    for (int block = share; block < p.blocks; block += kLoads * kWarpSize) {
      float part[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const int at = block + j * kWarpSize;
        part[j] = at < p.blocks ? partials[at * p.columns] : 0.f;
      }
#pragma unroll
      for (int j = 0; j < kLoads; ++j) sum += part[j];
    }
  }
  sums[share][column] = sum;
  __syncthreads();
  // A warp adds up each column.
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  sum = warp_sum(sums[lane][warp]);
  if (lane > 0 || first + warp >= p.columns) return;
  const int64_t at = (first + warp) * gradient.stride;
  if (gradient.dtype == DType::kFloat32) {
    static_cast<float*>(gradient.out)[at] = sum;
  } else if (gradient.dtype == DType::kFloat16) {
    static_cast<__half*>(gradient.out)[at] = from_float<__half>(sum);
  } else {
    static_cast<__nv_bfloat16*>(gradient.out)[at] = from_float<__nv_bfloat16>(sum);
  }
}

}  // namespace fk::cuda::norm
