// The selective scan's backward kernels for float.
#include "ops/selective_scan/cuda_backward_launch.cuh"

namespace fk::cuda {

template Status launch_carry<float>(bool, const BackwardArgs&, void*);
template Status launch_backward<float>(const BackwardArgs&, void*);
template Status launch_short<float>(int64_t, const BackwardArgs&, void*);

}  // namespace fk::cuda
