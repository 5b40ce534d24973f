// The selective scan's backward kernels for half.
#include "ops/selective_scan/cuda_backward_launch.cuh"

namespace fk::cuda {

template Status launch_carry<__half>(bool, const BackwardArgs&, void*);
template Status launch_backward<__half>(const BackwardArgs&, void*);
template Status launch_short<__half>(int64_t, const BackwardArgs&, void*);

}  // namespace fk::cuda
