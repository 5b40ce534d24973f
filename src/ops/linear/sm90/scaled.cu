// scaled_linear on Hopper: which calls, and the descriptors of copies. The kernel is in scaled.cuh.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/tma.h"
#include "ops/linear/sm90/call.h"
#include "ops/linear/sm90/scaled.cuh"

namespace fk::cuda_sm90 {

namespace {

Status scaled_map(CUtensorMap* map, const Tensor& t) {
  const Rows r = rows_of(t);
  cuda::TensorMapShape shape;
  shape.dims = 2;
  shape.sizes[0] = t.size(-1);
  shape.sizes[1] = r.count;
  shape.strides[1] = r.last_stride;
  shape.box[0] = ScaledPlan::kDepth;
  shape.box[1] = ScaledPlan::kRows;
  return cuda::make_tensor_map(map, t.data, t.dtype, shape);
}

cuda::PlainMatrix scaled_result(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.dtype, rows_of(t).last_stride, t.stride(-1)};
}

// Rows of 8-bit floats that the copy engine fetches as they lie, but for the address.
bool fetched(const Tensor& t) {
  const Rows r = rows_of(t);
  return r.ndim <= 1 && r.count > 0 && r.count < (int64_t{1} << 30) && t.size(-1) > 0 &&
         t.size(-1) < (int64_t{1} << 30) && (t.stride(-1) == 1 || t.size(-1) == 1) &&
         cuda::tensor_map_takes(r.count, r.last_stride);
}

}  // namespace

bool accepts(const ScaledLinearFwd& a) {
  if (a.x.dtype != DType::kFloat8E4M3) return false;
  if (cuda::device_properties(a.x.device_id).code < 90) return false;
  const int64_t tiles = (rows_of(a.x).count / 128 + 1) * (a.weight.size(0) / 128 + 1);
  return a.y && fetched(a.x) && fetched(a.weight) && tiles < (int64_t{1} << 30) &&
         in_even_rows(a.y) && in_even_rows(a.residual);
}

// Calls whose addresses the copy engine cannot take are the portable room's.
size_t workspace(const ScaledLinearFwd& a) { return cuda::workspace(a); }

Status run(const ScaledLinearFwd& a, const Exec& exec) {
  if (!aligned(a.x) || !aligned(a.weight)) return cuda::run(a, exec);
  using Plan = ScaledPlan;
  ScaledArguments f = {};
  FK_RETURN_IF_ERROR(scaled_map(&f.x, a.x));
  FK_RETURN_IF_ERROR(scaled_map(&f.weight, a.weight));
  f.x_scale = x_scales(a);
  f.weight_scale = weight_scales(a);
  f.rows = static_cast<int>(rows_of(a.x).count);
  f.columns = static_cast<int>(a.weight.size(0));
  f.slices = static_cast<int>(scale_blocks(a.weight.size(1)));
  constexpr int kRowsTogether = 8;  // of tiles, that share columns of the weight in the L2 cache
  f.order = {static_cast<int>(ceil_div(f.rows, Plan::kRows)),
             static_cast<int>(ceil_div(f.columns, Plan::kColumns)), kRowsTogether};
  f.epilogue.activation = static_cast<Activation>(a.activation);
  if (a.bias) {
    f.epilogue.bias = a.bias.data;
    f.epilogue.float_bias = a.bias.dtype == DType::kFloat32;
    f.epilogue.bias_stride = a.bias.stride(0);
  }
  f.out = scaled_result(a.y);
  f.residual = scaled_result(a.residual);
  f.pairs =
      f.out.column == 1 && f.out.row % 2 == 0 && reinterpret_cast<uintptr_t>(f.out.data) % 4 == 0;
  const int blocks =
      std::min(cuda::device_properties(a.x.device_id).multiprocessors, f.order.count());
  return cuda::launch_early(scaled_product, "scaled_product",
                            {{static_cast<unsigned>(blocks)}, {Plan::kThreads}, Plan::kSharedBytes},
                            cuda::stream_of(exec), f);
}

}  // namespace fk::cuda_sm90
