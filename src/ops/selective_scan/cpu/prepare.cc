// The parameters of a selective scan as the CPU kernels take them: A with its channels contiguous
// and times log2(e), B and C in float32.

#include "ops/selective_scan/selective_scan.h"

#ifndef FK_OPS_SELECTIVE_SCAN_CPU_PREPARE_ONCE_
#define FK_OPS_SELECTIVE_SCAN_CPU_PREPARE_ONCE_

#include "ops/selective_scan/cpu/plan.h"

#endif  // FK_OPS_SELECTIVE_SCAN_CPU_PREPARE_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/selective_scan/cpu/prepare.cc"
#include "cpu/foreach_target.h"
#include "cpu/simd.h"
#include "cpu/simd_tiles.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

// Transposes the channels [begin, end) of A.
void turn_decays(const Tensor& A, float* out, int64_t begin, int64_t end) {
  constexpr float kLog2e = 1.44269504f;
  const F32 d;
  const int64_t lanes = hn::Lanes(d), channels = A.size(0), states = A.size(1);
  alignas(64) float tile[kMaxScanStates * kMaxLanes];
  for (int64_t c = begin; c < end; c += lanes) {
    const int64_t count = std::min(lanes, end - c);
    const TileRows rows{A.data, A.dtype, A.stride(1), A.stride(0)};
    load_tile(rows.at(c * A.stride(0)), states, count, tile);
    for (int64_t n = 0; n < states; ++n) {
      const auto v = hn::Mul(hn::Load(d, tile + n * lanes), hn::Set(d, kLog2e));
      if (count == lanes) {
        hn::StoreU(v, d, out + n * channels + c);
      } else {
        StoreNF32(d, v, out + n * channels + c, static_cast<size_t>(count));
      }
    }
  }
}

// Widens the rows [begin, end) of B or C, a row being one step of one group.
void widen_rows(const scan::GroupView& v, const scan::Problem& p, float* out, int64_t begin,
                int64_t end) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  alignas(64) float vector[kMaxLanes];
  for (int64_t row = begin; row < end; ++row) {
    const int64_t group = row % p.groups, step = row / p.groups % p.length;
    const int64_t batch = row / p.groups / p.length;
    const TileRows rows{v.data, v.dtype, 0, v.state};
    const int64_t at = batch * v.batch + step * v.step + group * v.group;
    for (int64_t n = 0; n < p.states; n += lanes) {
      const int64_t count = std::min(lanes, p.states - n);
      load_tile(rows.at(at + n * v.state), 1, count, vector);
      std::copy_n(vector, count, out + row * p.states + n);
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {
namespace {

FK_CPU_EXPORT(turn_decays);
FK_CPU_EXPORT(widen_rows);

scan::GroupView in_float(const Tensor& t, const scan::Problem& p, float* memory, const Exec& exec) {
  const scan::GroupView v = scan::group_view_of(t);
  if (t.dtype == DType::kFloat32) return v;
  const auto kernel = FK_CPU_DISPATCH(widen_rows);
  exec.parallel_for(p.batch * p.length * p.groups, 1024,
                    [&](int64_t b, int64_t e) { kernel(v, p, memory, b, e); });
  const int64_t step = p.groups * p.states;
  return {memory, DType::kFloat32, p.length * step, step, p.states, 1};
}

template <class Args>
void prepare(const Args& a, const scan::Parameters& memory, const Exec& exec, scan::Inputs* in) {
  in->p = scan::problem_of(a);
  in->u = step_view(a.u);
  in->delta = step_view(a.delta);
  in->z = step_view(a.z);
  in->B = in_float(a.B, in->p, memory.B, exec);
  in->C = in_float(a.C, in->p, memory.C, exec);
  in->D = a.D;
  in->delta_bias = a.delta_bias;
  in->initial_state = a.initial_state;
  in->softplus = a.delta_softplus;
  const auto kernel = FK_CPU_DISPATCH(turn_decays);
  exec.parallel_for(in->p.channels, 4096,
                    [&](int64_t b, int64_t e) { kernel(a.A, memory.A, b, e); });
  in->A = memory.A;
  in->A_stride = memory.A_stride;
}

}  // namespace

void prepare_inputs(const SelectiveScanFwd& a, const scan::Parameters& memory, const Exec& exec,
                    scan::Inputs* in) {
  prepare(a, memory, exec, in);
}

void prepare_inputs(const SelectiveScanBwd& a, const scan::Parameters& memory, const Exec& exec,
                    scan::Inputs* in) {
  prepare(a, memory, exec, in);
}

}  // namespace fk::cpu
#endif  // HWY_ONCE
