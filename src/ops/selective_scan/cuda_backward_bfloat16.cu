// The selective scan's backward kernels for bfloat16.
#include "ops/selective_scan/cuda_backward_launch.cuh"

namespace fk::cuda {

template Status launch_carry<__nv_bfloat16>(bool, const BackwardArgs&, void*);
template Status launch_backward<__nv_bfloat16>(const BackwardArgs&, void*);
template Status launch_short<__nv_bfloat16>(int64_t, const BackwardArgs&, void*);

}  // namespace fk::cuda
