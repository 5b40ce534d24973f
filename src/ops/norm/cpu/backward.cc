// rms_norm and layer_norm on the CPU, backward.
//
// Floor: memory traffic, one read of dy and x (and dsum) and one write of dx.
//
// Threads take chunks of rows, on which cpu/norm/backward.cc works. Each of a fixed number of
// chunks adds its share of dweight and dbias up in a float buffer of its own in the workspace, and
// the buffers are then added in order, so that the result does not depend on the number of threads.

#include "ops/norm/norm.h"

#ifndef FK_OPS_NORM_CPU_BACKWARD_ONCE_
#define FK_OPS_NORM_CPU_BACKWARD_ONCE_

#include "cpu/axis_plan.h"
#include "cpu/norm/backward.h"

namespace fk::cpu {
namespace {

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

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

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
    const auto sum = hn::Combine(d, hn::DemoteTo(dh, high), hn::DemoteTo(dh, low));
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

using ReduceKernel = void (*)(const ReduceJob&, int64_t, int64_t);

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

size_t partial_bytes(const Tensor& x, int buffers) {
  const int64_t columns = x.size(-1);
  const int64_t rows = rows_of(x).count;
  return static_cast<size_t>(buffers * chunk_count(rows, columns) * norm_sums_width(columns)) *
         sizeof(float);
}

// Adds up what the chunks have left in `partial`.
void add_up(const float* partial, int64_t chunks, const Tensor& out, const Exec& exec) {
  const int64_t columns = out.size(0), width = norm_sums_width(columns);
  const ReduceJob reduce{partial, chunks, width, out.data, columns > 1 ? out.stride(0) : 1};
  const auto kernel = FK_CPU_DISPATCH(reduce_kernel)(out.dtype);
  // Whole blocks of 64 columns: the kernel reads full vectors.
  const int64_t blocks = width / 64;
  exec.parallel_for(blocks, grain_of(blocks, 64 * chunks), [&](int64_t begin, int64_t end) {
    kernel(reduce, 64 * begin, std::min(64 * end, columns));
  });
}

void backward(NormBackward& job, DType dtype, bool layer, const Tensor& dweight,
              const Tensor& dbias, const Exec& exec) {
  const int64_t rows = job.x.rows.count, width = norm_sums_width(job.columns);
  const int64_t chunks = chunk_count(rows, job.columns);
  float* const weight_sums = dweight ? exec.workspace<float>() : nullptr;
  float* const bias_sums =
      dbias ? exec.workspace<float>() + (dweight ? chunks * width : 0) : nullptr;

  job.unit = all_unit(job.dy, job.dsum, job.x, job.dx, job.weight);
  job.block = block_of(job.columns, job.unit);
  const int64_t tensors = 3 + (job.dsum.data != nullptr);
  job.stream = job.unit && job.dx.streams(size_of(dtype)) &&
               pays_to_stream(tensors * rows * job.columns * size_of(dtype));
  const auto kernel = norm_backward(dtype, layer);
  const int64_t grain = grain_of(chunks, rows * job.columns / chunks);
  exec.parallel_for(chunks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const auto sums_of = [&](float* sums) { return sums == nullptr ? sums : sums + c * width; };
      kernel(job, rows * c / chunks, rows * (c + 1) / chunks,
             {sums_of(weight_sums), sums_of(bias_sums), true});
    }
  });
  const int64_t written = rows == 0 ? 0 : chunks;
  if (dweight) add_up(weight_sums, written, dweight, exec);
  if (dbias) add_up(bias_sums, written, dbias, exec);
}

}  // namespace

size_t workspace(const RmsNormBwd& a) { return partial_bytes(a.x, a.dweight ? 1 : 0); }

Status run(const RmsNormBwd& a, const Exec& exec) {
  NormBackward job{Matrix(a.dy),        Matrix(a.dsum),    Matrix(a.x),
                   Matrix(Tensor()),    Matrix(a.rstd, 0), Matrix(a.dx),
                   Parameter(a.weight), a.x.size(-1),      static_cast<float>(a.weight_offset)};
  backward(job, a.x.dtype, false, a.dweight, Tensor(), exec);
  return {};
}

size_t workspace(const LayerNormBwd& a) {
  return partial_bytes(a.x, (a.dweight ? 1 : 0) + (a.dbias ? 1 : 0));
}

Status run(const LayerNormBwd& a, const Exec& exec) {
  NormBackward job{Matrix(a.dy),        Matrix(a.dsum),    Matrix(a.x),
                   Matrix(a.mean, 0),   Matrix(a.rstd, 0), Matrix(a.dx),
                   Parameter(a.weight), a.x.size(-1),      0.0f};
  backward(job, a.x.dtype, true, a.dweight, a.dbias, exec);
  return {};
}

}  // namespace fk::cpu
#endif
