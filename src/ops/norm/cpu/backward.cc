// CPU kernels of rms_norm and layer_norm, backward.
//
// Floor: memory traffic, one read of dy and x (and dsum) and one write of dx. A row is passed over
// twice (its two sums, then dx), the second time from cache.
//
// Threads take chunks of rows. Each of a fixed number of chunks adds its share of dweight and dbias
// up in a float buffer of its own in the workspace, and the buffers are then added in order, so
// that the result does not depend on the number of threads. Two rows at a time share one load and
// one store of those buffers.

#include "ops/norm/norm.h"

#ifndef FK_OPS_NORM_CPU_BACKWARD_ONCE_
#define FK_OPS_NORM_CPU_BACKWARD_ONCE_

#include "cpu/axis_plan.h"
#include "ops/norm/cpu/rows.h"

namespace fk::cpu {
namespace {

// So many rows of the backward share a load and store of the partial sums. Four are no faster:
// their pointers no longer fit the registers.
constexpr int kGroup = 2;

struct BackwardJob {
  Matrix dy, dsum, x, mean, rstd, dx;
  Parameter weight;
  int64_t columns;
  float weight_offset;
  float* dweight = nullptr;  // partial sums [chunks, padded_columns]; NULL: not wanted
  float* dbias = nullptr;
  int64_t chunks = 1, padded_columns = 0, block = 1;
  bool unit = false;    // all columns have stride 1
  bool stream = false;  // dx goes past the caches
};

struct ReduceJob {
  const float* partial;  // [chunks, padded_columns]
  int64_t chunks, padded_columns;
  void* out;
  int64_t stride;
};

}  // namespace
}  // namespace fk::cpu

#endif  // FK_OPS_NORM_CPU_BACKWARD_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/norm/cpu/backward.cc"
#include "cpu/foreach_target.h"
#include "cpu/simd.h"
#include "ops/norm/cpu/rows_simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

// Returns what the deviations of a row are multiplied by. A single column deviates by nothing, and
// g - mean(g) is 0. It would not be quite 0 where the product in g is fused with the difference, so
// it is made 0 here.
float scale_of_layer(float rstd, int64_t columns) { return columns == 1 ? 0.0f * rstd : rstd; }

// Says how a group of rows is worked on: how many there are, whether all strides along a row are 1,
// and whether outputs go past the caches.
struct CachedGroup {
  static constexpr int kRows = kGroup;
  static constexpr bool kUnit = true, kStream = false;
};
struct StreamedGroup : CachedGroup {
  static constexpr bool kStream = true;
};
struct SingleRow {
  static constexpr int kRows = 1;
  static constexpr bool kUnit = false, kStream = false;
};

// dx = rstd (g - mean(g) - xhat mean(g xhat)) + dsum, with g = dy w and xhat = (x - mean) rstd; the
// root-mean-square norm has neither mean. `first`: nothing is in the partial sums yet.
template <class T, bool kLayer, class Group>
HWY_NOINLINE void backward_group(const BackwardJob& job, int64_t r, float* dweight, float* dbias,
                                 bool first) {
  constexpr int kRows = Group::kRows;
  constexpr bool kUnit = Group::kUnit;
  const F32 d;
  const int64_t columns = job.columns, block = job.block, summed_block = summed_block_of(block);
  const float per_column = 1.0f / static_cast<float>(columns);
  ParameterInput<T, kUnit> weight(job.weight);
  const auto weight_offset = hn::Set(d, job.weight_offset);

  Input<T, kUnit> dy[kRows], x[kRows], dsum[kRows];
  Output<T, kUnit> dx[kRows];
  const T *gs[kRows], *xs[kRows], *dsums[kRows];
  float rstd[kRows];
  // dx = (g - shift - xhat slope) scale: what cancels is taken off before it is scaled.
  V center[kRows], scale[kRows], shift[kRows], slope[kRows];
  unrolled<kRows>([&](auto k) FK_BODY {
    dy[k].bind(job.dy.row<const T>(r + k), job.dy.column_stride);
    x[k].bind(job.x.row<const T>(r + k), job.x.column_stride);
    dsum[k].bind(job.dsum.row<const T>(r + k), job.dsum.column_stride);
    dx[k].bind(job.dx.row<T>(r + k), job.dx.column_stride);
    rstd[k] = *job.rstd.row<const float>(r + k);
    scale[k] = hn::Set(d, kLayer ? scale_of_layer(rstd[k], columns) : rstd[k]);
    center[k] = kLayer ? hn::Set(d, *job.mean.row<const float>(r + k)) : hn::Zero(d);
  });

  if (job.dx.data != nullptr) {
    const Means none(columns, summed_block);
    Means means[] = {none, none};
    static_assert(kRows <= 2);
    for (int64_t j = 0; j < columns; j += summed_block) {
      const int64_t n = std::min(summed_block, columns - j);
      unrolled<kRows>([&](auto k) FK_BODY {
        gs[k] = dy[k].block(j, n);
        xs[k] = x[k].block(j, n);
      });
      const auto weights = weight.block(j, n);
      const auto add = [&](int64_t i, auto lanes, auto k, V w, Sums& acc) FK_BODY {
        const V g = hn::Mul(load(gs[k] + i, lanes), w);
        V centered = load(xs[k] + i, lanes);
        if constexpr (kLayer) {
          centered = hn::Sub(centered, center[k]);
          acc.b = hn::Add(acc.b, g);
        }
        acc.a = hn::MulAdd(g, centered, acc.a);
      };
      const auto weight_at = [&](int64_t i, auto lanes) FK_BODY {
        if (!weights) return hn::Set(d, 1.0f);
        const V w = weights.load(i, lanes);
        return kLayer ? w : hn::Add(w, weight_offset);
      };
      if constexpr (kRows == 1) {
        const std::integral_constant<int, 0> k;
        means[0].add(accumulate(n, [&](int64_t i, auto lanes, Sums& acc)
                                       FK_BODY { add(i, lanes, k, weight_at(i, lanes), acc); }));
      } else {  // the rows' sums are independent of each other
        Sums sums[kRows];
        for_columns(n, [&](int64_t i, auto lanes) FK_BODY {
          const V w = weight_at(i, lanes);
          unrolled<kRows>([&](auto k) FK_BODY { add(i, lanes, k, w, sums[k]); });
        });
        unrolled<kRows>([&](auto k) FK_BODY { means[k].add(sums[k]); });
      }
    }
    unrolled<kRows>([&](auto k) FK_BODY {
      slope[k] = hn::Set(d, means[k].a(per_column) * rstd[k]);
      shift[k] = hn::Set(d, means[k].b(per_column));
    });
  }

  for (int64_t j = 0; j < columns; j += block) {
    const int64_t n = std::min(block, columns - j);
    T* out[kRows];
    unrolled<kRows>([&](auto k) FK_BODY {
      gs[k] = dy[k].block(j, n);
      xs[k] = x[k].block(j, n);
      dsums[k] = dsum[k].block(j, n);
      out[k] = dx[k].block(j);
    });
    const auto weights = weight.block(j, n);
    for_columns(n, [&](int64_t i, auto lanes) FK_BODY {
      V dw = hn::Zero(d), db = hn::Zero(d);
      V w = hn::Set(d, 1.0f);
      if (weights) {
        w = weights.load(i, lanes);
        if constexpr (!kLayer) w = hn::Add(w, weight_offset);
      }
      unrolled<kRows>([&](auto k) FK_BODY {
        const V g = load(gs[k] + i, lanes);
        V xhat = load(xs[k] + i, lanes);
        if constexpr (kLayer) xhat = hn::Sub(xhat, center[k]);
        xhat = hn::Mul(xhat, scale[k]);
        dw = hn::MulAdd(g, xhat, dw);
        if constexpr (kLayer) db = hn::Add(db, g);
        if (out[0] == nullptr) return;
        V v = hn::Mul(g, w);
        if constexpr (kLayer) v = hn::Sub(v, shift[k]);
        v = hn::Mul(hn::NegMulAdd(xhat, slope[k], v), scale[k]);
        if (dsums[0] != nullptr) v = hn::Add(v, load(dsums[k] + i, lanes));
        if constexpr (Group::kStream) {
          // These rows are near by now: meanwhile memory can bring the next ones.
          __builtin_prefetch(gs[k] + i + kRows * job.dy.row_stride, 0, 2);
          __builtin_prefetch(xs[k] + i + kRows * job.x.row_stride, 0, 2);
          if (dsums[0] != nullptr) {
            __builtin_prefetch(dsums[k] + i + kRows * job.dsum.row_stride, 0, 2);
          }
          stream(v, out[k] + i, lanes);
        } else {
          store(v, out[k] + i, lanes);
        }
      });
      if (dweight != nullptr) {
        float* p = dweight + j + i;  // padded: a whole vector fits
        StoreF32(d, first ? dw : hn::Add(dw, LoadF32(d, p)), p);
      }
      if (kLayer && dbias != nullptr) {
        float* p = dbias + j + i;
        StoreF32(d, first ? db : hn::Add(db, LoadF32(d, p)), p);
      }
    });
    for (int k = 0; k < kRows; ++k) dx[k].finish(j, n);
  }
}

template <class T, bool kLayer>
void backward_chunks(const BackwardJob& job, int64_t begin, int64_t end) {
  const int64_t rows = job.x.rows.count;
  for (int64_t c = begin; c < end; ++c) {
    const int64_t first = rows * c / job.chunks;
    const int64_t last = rows * (c + 1) / job.chunks;
    float* dweight = job.dweight ? job.dweight + c * job.padded_columns : nullptr;
    float* dbias = job.dbias ? job.dbias + c * job.padded_columns : nullptr;
    int64_t r = first;
    if (job.unit) {
      for (; r + kGroup <= last; r += kGroup) {
        if (job.stream) {
          backward_group<T, kLayer, StreamedGroup>(job, r, dweight, dbias, r == first);
        } else {
          backward_group<T, kLayer, CachedGroup>(job, r, dweight, dbias, r == first);
        }
      }
    }
    for (; r < last; ++r) {
      backward_group<T, kLayer, SingleRow>(job, r, dweight, dbias, r == first);
    }
  }
  if (job.stream) hwy::FlushStream();
}

template <class T>
void add_chunks(const ReduceJob& job, int64_t begin, int64_t end) {
  const F32 d;
  const hn::Half<F32> dh;
  const hn::Repartition<double, F32> dd;
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = begin; i < end; i += lanes) {  // the partial sums are padded
    auto low = hn::Zero(dd), high = hn::Zero(dd);
    for (int64_t c = 0; c < job.chunks; ++c) {
      const float* p = job.partial + c * job.padded_columns + i;
      low = hn::Add(low, hn::PromoteTo(dd, hn::LoadU(dh, p)));
      high = hn::Add(high, hn::PromoteTo(dd, hn::LoadU(dh, p + lanes / 2)));
    }
    const V sum = hn::Combine(d, hn::DemoteTo(dh, high), hn::DemoteTo(dh, low));
    T* out = static_cast<T*>(job.out) + i * job.stride;
    const size_t n = static_cast<size_t>(std::min(lanes, end - i));
    if (job.stride != 1) {
      StoreStridedF32(d, sum, out, job.stride, n);
    } else if (n == hn::Lanes(d)) {
      StoreF32(d, sum, out);
    } else {
      StoreNF32(d, sum, out, n);
    }
  }
}

using BackwardKernel = void (*)(const BackwardJob&, int64_t, int64_t);
using ReduceKernel = void (*)(const ReduceJob&, int64_t, int64_t);

template <bool kLayer>
HWY_INLINE BackwardKernel backward_for(DType t) {
  return t == DType::kFloat32   ? &backward_chunks<float, kLayer>
         : t == DType::kFloat16 ? &backward_chunks<float16_t, kLayer>
                                : &backward_chunks<bfloat16_t, kLayer>;
}

BackwardKernel backward_kernel(DType t, bool layer) {
  return layer ? backward_for<true>(t) : backward_for<false>(t);
}

ReduceKernel reduce_kernel(DType t) {
  return t == DType::kFloat32   ? &add_chunks<float>
         : t == DType::kFloat16 ? &add_chunks<float16_t>
                                : &add_chunks<bfloat16_t>;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {
namespace {

FK_CPU_EXPORT(backward_kernel);
FK_CPU_EXPORT(reduce_kernel);

// Returns how many chunks the rows are cut into, from the shape alone. Each costs a pass over a
// buffer as long as a row, so chunks have at least 32 rows, or 8 where that is what it takes to
// have some for all threads. The more rows, the less exact the sums: 64 are enough, while chunks
// are few.
int64_t chunk_count(int64_t rows, int64_t columns) {
  const int64_t by_rows = std::max(rows / 32, std::min<int64_t>(rows / 8, 4));
  const int64_t by_work = rows * columns / kInlineElements;
  return std::clamp<int64_t>(std::max(std::min(by_rows, by_work), rows / 64), 1, 64);
}

int64_t padded(int64_t columns) { return (columns + 63) / 64 * 64; }

size_t partial_bytes(const Tensor& x, int buffers) {
  const int64_t columns = x.size(-1);
  const int64_t rows = rows_of(x).count;
  return static_cast<size_t>(buffers * chunk_count(rows, columns) * padded(columns)) *
         sizeof(float);
}

void add_up(const float* partial, const BackwardJob& job, const Tensor& out, const Exec& exec) {
  const int64_t chunks = job.x.rows.count == 0 ? 0 : job.chunks;
  const ReduceJob reduce{partial, chunks, job.padded_columns, out.data,
                         out.size(0) > 1 ? out.stride(0) : 1};
  const auto kernel = FK_CPU_DISPATCH(reduce_kernel)(out.dtype);
  // Whole blocks of 64 columns: the kernel reads full vectors.
  const int64_t blocks = job.padded_columns / 64;
  exec.parallel_for(blocks, grain_of(blocks, 64 * chunks), [&](int64_t begin, int64_t end) {
    kernel(reduce, 64 * begin, std::min(64 * end, job.columns));
  });
}

void backward(BackwardJob& job, DType dtype, bool layer, const Tensor& dweight, const Tensor& dbias,
              const Exec& exec) {
  const int64_t rows = job.x.rows.count;
  job.chunks = chunk_count(rows, job.columns);
  job.padded_columns = padded(job.columns);
  float* partial = exec.workspace<float>();
  if (dweight) {
    job.dweight = partial;
    partial += job.chunks * job.padded_columns;
  }
  if (dbias) job.dbias = partial;

  job.unit = all_unit(job.dy, job.dsum, job.x, job.dx, job.weight);
  job.block = block_of(job.columns, job.unit);
  const int64_t tensors = 3 + (job.dsum.data != nullptr);
  job.stream = job.unit && job.dx.streams(size_of(dtype)) &&
               pays_to_stream(tensors * rows * job.columns * size_of(dtype));
  const auto kernel = FK_CPU_DISPATCH(backward_kernel)(dtype, layer);
  const int64_t grain = grain_of(job.chunks, rows * job.columns / job.chunks);
  exec.parallel_for(job.chunks, grain,
                    [&](int64_t begin, int64_t end) { kernel(job, begin, end); });
  if (dweight) add_up(job.dweight, job, dweight, exec);
  if (dbias) add_up(job.dbias, job, dbias, exec);
}

}  // namespace

size_t workspace(const RmsNormBwd& a) { return partial_bytes(a.x, a.dweight ? 1 : 0); }

Status run(const RmsNormBwd& a, const Exec& exec) {
  BackwardJob job{Matrix(a.dy),        Matrix(a.dsum),    Matrix(a.x),
                  Matrix(Tensor()),    Matrix(a.rstd, 0), Matrix(a.dx),
                  Parameter(a.weight), a.x.size(-1),      static_cast<float>(a.weight_offset)};
  backward(job, a.x.dtype, false, a.dweight, Tensor(), exec);
  return {};
}

size_t workspace(const LayerNormBwd& a) {
  return partial_bytes(a.x, (a.dweight ? 1 : 0) + (a.dbias ? 1 : 0));
}

Status run(const LayerNormBwd& a, const Exec& exec) {
  BackwardJob job{Matrix(a.dy),        Matrix(a.dsum),    Matrix(a.x),
                  Matrix(a.mean, 0),   Matrix(a.rstd, 0), Matrix(a.dx),
                  Parameter(a.weight), a.x.size(-1),      0.0f};
  backward(job, a.x.dtype, true, a.dweight, a.dbias, exec);
  return {};
}

}  // namespace fk::cpu
#endif
