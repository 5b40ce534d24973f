// The selective scan's backward kernels for bfloat16.
#include "ops/selective_scan/cuda_backward_launch.cuh"

namespace fk::cuda {

template Status launch_reverse<__nv_bfloat16>(ReverseShape, const ReverseArgs&, void*);

}  // namespace fk::cuda
