// selective_scan on the CPU, the end of its backward: the gradients that items have added up, each
// in memory of its own, put together in a fixed order.

#include "ops/selective_scan/selective_scan.h"

#ifndef FK_OPS_SELECTIVE_SCAN_CPU_BACKWARD_SUMS_ONCE_
#define FK_OPS_SELECTIVE_SCAN_CPU_BACKWARD_SUMS_ONCE_

#include "ops/selective_scan/cpu/backward_plan.h"

#endif  // FK_OPS_SELECTIVE_SCAN_CPU_BACKWARD_SUMS_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/selective_scan/cpu/backward_sums.cc"
#include "cpu/foreach_target.h"
#include "cpu/simd.h"
#include "cpu/simd_tiles.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using scan::BackwardJob;
using scan::Block;
using Vec = hn::Vec<F32>;

// Adds up the slices' sums of dA, dD and ddelta_bias of blocks [begin, end), in order.
void finish_channels(const BackwardJob& job, int64_t begin, int64_t end) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d), states = job.in.p.states;
  const int64_t blocks = job.in.p.groups * job.blocks_per_group;
  alignas(64) float total[kMaxScanStates * kMaxLanes];
  const auto add_slices = [&](const float* sums, int64_t block, int64_t size) HWY_ATTR {
    for (int64_t i = 0; i < size; i += lanes) {
      Vec sum = hn::Zero(d);
      for (int64_t r = 0; r < job.cut.slices; ++r) {
        sum = hn::Add(sum, hn::Load(d, sums + (r * blocks + block) * size + i));
      }
      hn::Store(sum, d, total + i);
    }
  };
  for (int64_t b = begin; b < end; ++b) {
    const Block block(job.in, lanes, b);
    const auto store = [&](const Tensor& t, int64_t rows) HWY_ATTR {
      const TileRows to{t.data, t.dtype, rows > 1 ? t.stride(1) : 0, t.stride(0)};
      store_tile(total, rows, block.count, to.at(block.first * t.stride(0)));
    };
    if (job.dA) {
      add_slices(job.sum_dA, b, states * lanes);
      store(job.dA, states);
    }
    if (job.dD) {
      add_slices(job.sum_dD, b, lanes);
      store(job.dD, 1);
    }
    if (job.ddelta_bias) {
      add_slices(job.sum_bias, b, lanes);
      store(job.ddelta_bias, 1);
    }
  }
}

// Adds up the parts' sums of rows [begin, end) of dB or dC, a row being one step of one group.
void finish_shared(const BackwardJob& job, const float* sums, const scan::GroupView& out,
                   int64_t begin, int64_t end) {
  const F32 d;
  const scan::Problem& p = job.in.p;
  const int64_t lanes = hn::Lanes(d), shared = job.shared_floats();
  alignas(64) float total[kMaxLanes];
  for (int64_t row = begin; row < end; ++row) {
    const int64_t group = row % p.groups, step = row / p.groups % p.length;
    const int64_t batch = row / p.groups / p.length;
    const TileRows rows{out.data, out.dtype, 0, out.state};
    const int64_t at = batch * out.batch + step * out.step + group * out.group;
    for (int64_t n = 0; n < p.states; n += lanes) {
      const int64_t count = std::min(lanes, p.states - n);
      for (int64_t i = 0; i < count; ++i) {
        float sum = 0;
        for (int64_t k = 0; k < job.cut.parts; ++k)
          sum += sums[k * shared + row * p.states + n + i];
        total[i] = sum;
      }
      store_tile(total, 1, count, rows.at(at + n * out.state));
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {

FK_CPU_EXPORT(finish_channels);
FK_CPU_EXPORT(finish_shared);

void finish_sums(const scan::BackwardJob& job, const Exec& exec) {
  const auto channels = FK_CPU_DISPATCH(finish_channels);
  exec.parallel_for(job.in.p.groups * job.blocks_per_group, 64,
                    [&](int64_t b, int64_t e) { channels(job, b, e); });
  const auto shared = FK_CPU_DISPATCH(finish_shared);
  const int64_t rows = job.in.p.batch * job.in.p.length * job.in.p.groups;
  for (const auto& [tensor, sums] :
       {std::pair<const Tensor*, const float*>{&job.dB, job.sum_dB}, {&job.dC, job.sum_dC}}) {
    if (!*tensor) continue;
    const scan::GroupView out = scan::group_view_of(*tensor);
    const float* from = sums;
    exec.parallel_for(rows, 2048, [&](int64_t b, int64_t e) { shared(job, from, out, b, e); });
  }
}

}  // namespace fk::cpu
#endif  // HWY_ONCE
