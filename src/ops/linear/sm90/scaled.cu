// scaled_linear on Hopper: which calls, and the descriptors of copies. The kernel is in scaled.cuh.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/tma.h"
#include "ops/linear/sm90/call.h"
#include "ops/linear/sm90/few_rows.h"
#include "ops/linear/sm90/scaled.cuh"

namespace fk::cuda_sm90 {

namespace {

Status scaled_map(CUtensorMap* map, const Tensor& t, int outer) {
  const Rows r = rows_of(t);
  cuda::TensorMapShape shape;
  shape.dims = 2;
  shape.sizes[0] = t.size(-1);
  shape.sizes[1] = r.count;
  shape.strides[1] = r.last_stride;
  shape.box[0] = static_cast<int>(kScaleBlock);
  shape.box[1] = outer;
  return cuda::make_tensor_map(map, t.data, t.dtype, shape);
}

// Tiles of 128 rows. An H200 takes 922 us for (8192, 4096, 16384) with them, and with 256 rows, two
// for each warpgroup, 1016.
constexpr int kRowBlocks = 1;

Status launch_scaled(ScaledArguments f, const ScaledLinearFwd& a, cudaStream_t stream) {
  using Plan = ScaledPlan<kRowBlocks>;
  FK_RETURN_IF_ERROR(scaled_map(&f.product.a, a.x, Plan::kRows));
  FK_RETURN_IF_ERROR(scaled_map(&f.product.b, a.weight, Plan::kColumns));
  constexpr int kRowsTogether = 8;  // of tiles, that share columns of the weight in the L2 cache
  cuda::TileOrder& order = f.product.order;
  order = {static_cast<int>(ceil_div(f.product.rows, Plan::kRows)),
           static_cast<int>(ceil_div(f.product.columns, Plan::kColumns)), kRowsTogether};
  const int blocks =
      std::min(cuda::device_properties(a.x.device_id).multiprocessors, order.count());
  return cuda::launch_early(scaled_product<kRowBlocks>, "scaled_product",
                            {{static_cast<unsigned>(blocks)}, {Plan::kThreads}, Plan::kSharedBytes},
                            stream, f);
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
  const cudaStream_t stream = cuda::stream_of(exec);
  ScaledArguments f = {};
  f.x_scale = x_scales(a);
  f.weight_scale = weight_scales(a);
  Product p;
  p.dtype = DType::kBFloat16;
  p.out = a.y;
  p.residual = a.residual;
  p.epilogue.activation = static_cast<Activation>(a.activation);
  if (a.bias) {
    p.epilogue.bias = a.bias.data;
    p.epilogue.float_bias = a.bias.dtype == DType::kFloat32;
    p.epilogue.bias_stride = a.bias.stride(0);
  }
  if (takes_few_rows(a.x, a.weight) && f.x_scale.rows.ndim <= 1) {
    WorkspaceParts none(nullptr);
    p.a = Matrix(a.x, a.x.dtype, none);
    p.b = Matrix(a.weight, a.x.dtype, none);
    p.rows = p.a.rows;
    p.columns = p.b.rows;
    p.depth = p.b.columns;
    return multiply_few_rows(p, a.x.dtype, &a, a.x.device_id, stream);
  }
  f.product.epilogue = p.epilogue;
  FK_RETURN_IF_ERROR(set_results(&f.product, p));
  f.product.rows = static_cast<int>(rows_of(a.x).count);
  f.product.columns = static_cast<int>(a.weight.size(0));
  f.product.slices = static_cast<int>(scale_blocks(a.weight.size(1)));
  return launch_scaled(f, a, stream);
}

}  // namespace fk::cuda_sm90
