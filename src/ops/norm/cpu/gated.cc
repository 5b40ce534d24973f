// rms_norm with a gate or with groups of columns, on the CPU, forward and backward.
//
// Floor: memory, as without a gate: x, gate and y once each, and dy, dx and dgate. A worker takes
// blocks of rows; a row's columns are floats in its scratch memory, where they are passed over once
// for each sum. The backward computes the statistics again: the row is at hand.

#include "ops/norm/norm.h"

#ifndef FK_OPS_NORM_CPU_GATED_ONCE_
#define FK_OPS_NORM_CPU_GATED_ONCE_

#include <algorithm>
#include <cmath>

#include "core/integers.h"
#include "core/rows.h"
#include "core/workspace.h"
#include "cpu/gemm/view.h"
#include "cpu/workers.h"

namespace fk::cpu {
namespace {

// This is a tensor of rows; without data, it is not given.
struct GatedRows {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t column = 1;
  Rows rows;

  GatedRows() = default;
  explicit GatedRows(const Tensor& t, int inner_dims = 1) {
    if (!t) return;
    data = t.data;
    dtype = t.dtype;
    rows = rows_of(t, inner_dims);
    if (inner_dims == 1) column = t.stride(-1);
  }
  MatrixView row(int64_t r) const {
    return {static_cast<char*>(data) + rows.offset(r) * size_of(dtype), dtype, 0, column};
  }
};

struct GatedJob {
  GatedRows x, residual, gate, y, sum, rstd;  // forward
  GatedRows dy, dsum, dx, dgate;              // backward
  MatrixView weight;
  float* dweight = nullptr;  // sums of each block of rows; NULL: not wanted
  int64_t columns, width, group;
  float eps, weight_offset;
  bool norm_before_gate;
};

constexpr int kGatedBuffers = 6;

// Returns the columns in a worker's buffers: vectors at a group's end may reach beyond the row.
int64_t gated_width(int64_t columns) { return padded_columns(columns) + 16; }

// Returns how many rows a block has, from the shape alone: sums over rows must not depend on
// threads.
int64_t gated_block(int64_t rows, int64_t columns) {
  constexpr int64_t kElements = 32768, kMostRows = 64;
  const int64_t by_work = std::max<int64_t>(1, kElements / std::max<int64_t>(1, columns));
  return std::min({by_work, kMostRows, std::max<int64_t>(1, rows)});
}

}  // namespace
}  // namespace fk::cpu

#endif  // FK_OPS_NORM_CPU_GATED_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/norm/cpu/gated.cc"
#include "cpu/foreach_target.h"
#include "cpu/gemm/elements.h"
#include "cpu/gemm/pack.h"
#include "cpu/simd_activations.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using GatedVec = hn::Vec<F32>;

// Calls body(i, lanes) for the vectors of columns [begin, end).
template <class Body>
HWY_INLINE void for_gated(int64_t begin, int64_t end, const Body& body) {
  const int64_t lanes = hn::Lanes(F32());
  for (int64_t i = begin; i < end; i += lanes) body(i, std::min(lanes, end - i));
}

// Sums body(i), a vector, over columns [begin, end): a few vectors in float, those sums in double.
template <class Body>
HWY_INLINE double sum_gated(int64_t begin, int64_t end, const Body& body) {
  const F32 d;
  constexpr int64_t kTogether = 1024;
  double total = 0;
  for (int64_t first = begin; first < end; first += kTogether) {
    GatedVec sum = hn::Zero(d);
    for_gated(first, std::min(end, first + kTogether), [&](int64_t i, int64_t n) HWY_ATTR {
      const auto mask = hn::FirstN(d, static_cast<size_t>(n));
      sum = hn::Add(sum, hn::IfThenElseZero(mask, body(i)));
    });
    total += ReduceSum(d, sum);
  }
  return total;
}

HWY_INLINE void load_gated(const GatedJob& job, const GatedRows& from, int64_t r, float* out) {
  pack_rows(from.row(r), 1, job.columns, out, padded_columns(job.columns));
}
HWY_INLINE void store_gated(const GatedJob& job, const float* in, const GatedRows& to, int64_t r) {
  unpack_rows(in, padded_columns(job.columns), 1, job.columns, nullptr, to.row(r));
}

// Loads the weight plus its offset, or 1 where it is not given.
HWY_INLINE void load_gated_weight(const GatedJob& job, float* out) {
  const F32 d;
  if (job.weight.data == nullptr) {
    std::fill_n(out, job.width, 1.0f);
    return;
  }
  pack_rows(job.weight, 1, job.columns, out, padded_columns(job.columns));
  for_gated(0, job.columns, [&](int64_t i, int64_t) HWY_ATTR {
    hn::StoreU(hn::Add(hn::LoadU(d, out + i), hn::Set(d, job.weight_offset)), d, out + i);
  });
}

HWY_INLINE float rstd_of(const GatedJob& job, const float* v, int64_t begin) {
  const F32 d;
  const double square = sum_gated(begin, begin + job.group, [&](int64_t i) HWY_ATTR {
    const GatedVec x = hn::LoadU(d, v + i);
    return hn::Mul(x, x);
  });
  return static_cast<float>(1 / std::sqrt(square / static_cast<double>(job.group) + job.eps));
}

// Computes rows [begin, end). `memory` has kGatedBuffers of job.width floats.
void gated_forward(const GatedJob& job, float* memory, int64_t begin, int64_t end) {
  const F32 d;
  float *weight = memory, *v = memory + job.width, *gate = v + job.width, *y = gate + job.width;
  load_gated_weight(job, weight);
  for (int64_t r = begin; r < end; ++r) {
    load_gated(job, job.x, r, v);
    if (job.residual.data != nullptr) {
      load_gated(job, job.residual, r, y);
      by_type(job.x.dtype, [&](auto type) HWY_ATTR {
        for_gated(0, job.columns, [&](int64_t i, int64_t) HWY_ATTR {
          const GatedVec s = hn::Add(hn::LoadU(d, v + i), hn::LoadU(d, y + i));
          hn::StoreU(RoundF32<decltype(type)>(d, s), d, v + i);
        });
      });
      if (job.sum.data != nullptr) store_gated(job, v, job.sum, r);
    }
    const bool gated = job.gate.data != nullptr;
    if (gated) {
      load_gated(job, job.gate, r, gate);
      for_gated(0, job.columns, [&](int64_t i, int64_t) HWY_ATTR {
        const GatedVec g = Silu(d, hn::LoadU(d, gate + i));
        hn::StoreU(g, d, gate + i);
        if (!job.norm_before_gate) hn::StoreU(hn::Mul(hn::LoadU(d, v + i), g), d, v + i);
      });
    }
    for (int64_t first = 0; first < job.columns; first += job.group) {
      const float rstd = rstd_of(job, v, first);
      if (first == 0 && job.rstd.data != nullptr) {
        *static_cast<float*>(job.rstd.row(r).data) = rstd;
      }
      // A group's last vector reaches into the next group's y, which is written after it.
      for_gated(first, first + job.group, [&](int64_t i, int64_t) HWY_ATTR {
        GatedVec out =
            hn::Mul(hn::Mul(hn::LoadU(d, v + i), hn::Set(d, rstd)), hn::LoadU(d, weight + i));
        if (gated && job.norm_before_gate) out = hn::Mul(out, hn::LoadU(d, gate + i));
        hn::StoreU(out, d, y + i);
      });
    }
    if (job.y.data != nullptr) store_gated(job, y, job.y, r);
  }
}

// Computes the gradients of rows [begin, end), whose sums of dweight go to `dweight`.
void gated_backward(const GatedJob& job, float* memory, float* dweight, int64_t begin,
                    int64_t end) {
  const F32 d;
  const auto one = hn::Set(d, 1.0f);
  float *const weight = memory, *const x = weight + job.width, *const z = x + job.width;
  float *const dy = z + job.width, *const dx = dy + job.width, *const dgate = dx + job.width;
  load_gated_weight(job, weight);
  if (dweight != nullptr) std::fill_n(dweight, job.width, 0.0f);
  const bool gates_y = job.gate.data != nullptr && job.norm_before_gate;
  const bool gates_x = job.gate.data != nullptr && !job.norm_before_gate;
  for (int64_t r = begin; r < end; ++r) {
    load_gated(job, job.x, r, x);
    load_gated(job, job.dy, r, dy);
    if (gates_x || gates_y) {
      load_gated(job, job.gate, r, z);
      for_gated(0, job.columns, [&](int64_t i, int64_t) HWY_ATTR {
        const GatedVec raw = hn::LoadU(d, z + i), s = Sigmoid(d, raw);
        // The gate stands in z from here on, its slope in dgate.
        hn::StoreU(hn::Mul(raw, s), d, z + i);
        hn::StoreU(hn::Mul(s, hn::MulAdd(raw, hn::Sub(one, s), one)), d, dgate + i);
      });
    }
    const auto normed = [&](int64_t i) HWY_ATTR {
      const GatedVec v = hn::LoadU(d, x + i);
      return gates_x ? hn::Mul(v, hn::LoadU(d, z + i)) : v;
    };
    const auto dnorm = [&](int64_t i) HWY_ATTR {
      const GatedVec v = hn::LoadU(d, dy + i);
      return gates_y ? hn::Mul(v, hn::LoadU(d, z + i)) : v;
    };
    for (int64_t first = 0; first < job.columns; first += job.group) {
      const int64_t last = first + job.group;
      const double squares = sum_gated(first, last, [&](int64_t i) HWY_ATTR {
        const GatedVec v = normed(i);
        return hn::Mul(v, v);
      });
      const double size = static_cast<double>(job.group);
      const float rstd = static_cast<float>(1 / std::sqrt(squares / size + job.eps));
      const double along = sum_gated(first, last, [&](int64_t i) HWY_ATTR {
        return hn::Mul(hn::Mul(dnorm(i), hn::LoadU(d, weight + i)), normed(i));
      });
      const GatedVec scale = hn::Set(d, rstd);
      const GatedVec slope = hn::Set(d, static_cast<float>(along * rstd * rstd / size));
      for_gated(first, last, [&](int64_t i, int64_t n) HWY_ATTR {
        const auto mask = hn::FirstN(d, static_cast<size_t>(n));
        const GatedVec v = normed(i), w = hn::LoadU(d, weight + i), dn = dnorm(i);
        const GatedVec xhat = hn::Mul(v, scale);
        const GatedVec dv = hn::Mul(hn::NegMulAdd(v, slope, hn::Mul(dn, w)), scale);
        if (dweight != nullptr) {
          const GatedVec more = hn::IfThenElseZero(mask, hn::Mul(dn, xhat));
          hn::StoreU(hn::Add(hn::LoadU(d, dweight + i), more), d, dweight + i);
        }
        GatedVec out = dv;
        if (gates_x || gates_y) {
          const GatedVec outer = gates_x ? hn::Mul(dv, hn::LoadU(d, x + i))
                                         : hn::Mul(hn::Mul(hn::LoadU(d, dy + i), xhat), w);
          const GatedVec before = hn::LoadU(d, dgate + i);
          hn::StoreU(hn::IfThenElse(mask, hn::Mul(outer, before), before), d, dgate + i);
          if (gates_x) out = hn::Mul(dv, hn::LoadU(d, z + i));
        }
        hn::StoreU(out, d, dx + i);
      });
    }
    if (job.dgate.data != nullptr) store_gated(job, dgate, job.dgate, r);
    if (job.dx.data == nullptr) continue;
    if (job.dsum.data != nullptr) {
      load_gated(job, job.dsum, r, x);
      for_gated(0, job.columns, [&](int64_t i, int64_t) HWY_ATTR {
        hn::StoreU(hn::Add(hn::LoadU(d, dx + i), hn::LoadU(d, x + i)), d, dx + i);
      });
    }
    store_gated(job, dx, job.dx, r);
  }
}

// Adds the blocks' sums in order, into the first.
void add_gated_blocks(const GatedJob& job, int64_t blocks, const MatrixView& out) {
  constexpr int64_t kColumns = 256;
  for (int64_t first = 0; first < job.columns; first += kColumns) {
    const int64_t n = std::min(kColumns, job.columns - first);
    double sums[kColumns] = {};
    for (int64_t k = 0; k < blocks; ++k) {
      const float* block = job.dweight + k * job.width + first;
      for (int64_t i = 0; i < n; ++i) sums[i] += block[i];
    }
    for (int64_t i = 0; i < n; ++i) job.dweight[first + i] = static_cast<float>(sums[i]);
  }
  unpack_rows(job.dweight, padded_columns(job.columns), 1, job.columns, nullptr, out);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {
namespace {

FK_CPU_EXPORT(gated_forward);
FK_CPU_EXPORT(gated_backward);
FK_CPU_EXPORT(add_gated_blocks);

template <class Args>
GatedJob gated_job(const Args& a) {
  GatedJob job;
  job.x = GatedRows(a.x);
  job.gate = GatedRows(a.gate);
  job.weight = {nullptr, DType::kFloat32, 0, 1};
  if (a.weight) job.weight = {a.weight.data, a.weight.dtype, 0, a.weight.stride(-1)};
  job.columns = a.x.size(-1);
  job.width = gated_width(job.columns);
  job.group = a.group_size > 0 ? a.group_size : job.columns;
  job.eps = static_cast<float>(a.eps);
  job.weight_offset = static_cast<float>(a.weight_offset);
  job.norm_before_gate = a.norm_before_gate;
  return job;
}

// The rows of a call are cut into these blocks, and workers take them.
struct GatedBlocks {
  int64_t rows, size, count, workers;

  explicit GatedBlocks(const Tensor& x)
      : rows(rows_of(x).count),
        size(gated_block(rows, x.size(-1))),
        count(ceil_div(rows, size)),
        workers(std::max<int64_t>(1, std::min(worker_limit(), count))) {}
};

}  // namespace
}  // namespace fk::cpu

namespace fk::cpu_gated {

using namespace cpu;  // NOLINT: the same kernels' helpers

size_t workspace(const RmsNormFwd& a) {
  return sizeof(float) * GatedBlocks(a.x).workers * kGatedBuffers * gated_width(a.x.size(-1));
}

size_t workspace(const RmsNormBwd& a) {
  const GatedBlocks blocks(a.x);
  return sizeof(float) * (blocks.workers * kGatedBuffers + std::max<int64_t>(1, blocks.count)) *
         gated_width(a.x.size(-1));
}

Status run(const RmsNormFwd& a, const Exec& exec) {
  GatedJob job = gated_job(a);
  job.residual = GatedRows(a.residual);
  job.y = GatedRows(a.y);
  job.sum = GatedRows(a.sum);
  job.rstd = GatedRows(a.rstd, 0);
  const GatedBlocks blocks(a.x);
  float* memory = exec.workspace<float>();
  const auto kernel = FK_CPU_DISPATCH(gated_forward);
  run_on_workers(exec, blocks.workers, blocks.count, [&](int64_t worker, int64_t block) {
    kernel(job, memory + worker * kGatedBuffers * job.width, block * blocks.size,
           std::min(blocks.rows, (block + 1) * blocks.size));
  });
  return {};
}

Status run(const RmsNormBwd& a, const Exec& exec) {
  GatedJob job = gated_job(a);
  job.dy = GatedRows(a.dy);
  job.dsum = GatedRows(a.dsum);
  job.dx = GatedRows(a.dx);
  job.dgate = GatedRows(a.dgate);
  const GatedBlocks blocks(a.x);
  float* memory = exec.workspace<float>();
  float* sums = memory + blocks.workers * kGatedBuffers * job.width;
  if (a.dweight) job.dweight = sums;
  const auto kernel = FK_CPU_DISPATCH(gated_backward);
  run_on_workers(exec, blocks.workers, blocks.count, [&](int64_t worker, int64_t block) {
    kernel(job, memory + worker * kGatedBuffers * job.width,
           a.dweight ? sums + block * job.width : nullptr, block * blocks.size,
           std::min(blocks.rows, (block + 1) * blocks.size));
  });
  if (a.dweight) {
    FK_CPU_DISPATCH(add_gated_blocks)
    (job, blocks.count, {a.dweight.data, a.dweight.dtype, 0, a.dweight.stride(-1)});
  }
  return {};
}

}  // namespace fk::cpu_gated
#endif  // HWY_ONCE
