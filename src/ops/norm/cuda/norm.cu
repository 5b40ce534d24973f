// rms_norm and layer_norm on CUDA, by the kernels of cuda/norm.
#include "cuda/norm/norm.h"
#include "ops/norm/norm.h"

namespace fk::cuda {

namespace {

norm::ForwardCall call_of(const RmsNormFwd& a) {
  return {a.x,   a.residual, a.weight, Tensor(), a.y,
          a.sum, Tensor(),   a.rstd,   a.eps,    a.weight_offset};
}

norm::ForwardCall call_of(const LayerNormFwd& a) {
  return {a.x, a.residual, a.weight, a.bias, a.y, a.sum, a.mean, a.rstd, a.eps};
}

norm::BackwardCall call_of(const RmsNormBwd& a) {
  return {a.dy,   a.dsum, a.x,       a.weight, Tensor(),
          a.rstd, a.dx,   a.dweight, Tensor(), a.weight_offset};
}

norm::BackwardCall call_of(const LayerNormBwd& a) {
  return {a.dy, a.dsum, a.x, a.weight, a.mean, a.rstd, a.dx, a.dweight, a.dbias};
}

}  // namespace

Status run(const RmsNormFwd& a, const Exec& exec) {
  return norm::run_forward(call_of(a), false, stream_of(exec));
}
Status run(const LayerNormFwd& a, const Exec& exec) {
  return norm::run_forward(call_of(a), true, stream_of(exec));
}

size_t workspace(const RmsNormBwd& a) { return norm::backward_bytes(call_of(a), false); }
size_t workspace(const LayerNormBwd& a) { return norm::backward_bytes(call_of(a), true); }

Status run(const RmsNormBwd& a, const Exec& exec) {
  return norm::run_backward(call_of(a), false, exec.workspace<float>(), stream_of(exec));
}
Status run(const LayerNormBwd& a, const Exec& exec) {
  return norm::run_backward(call_of(a), true, exec.workspace<float>(), stream_of(exec));
}

}  // namespace fk::cuda
