// The selective scan's backward kernels for float.
#include "ops/selective_scan/cuda_backward_launch.cuh"

namespace fk::cuda {

template Status launch_reverse<float>(ReverseShape, const ReverseArgs&, void*);

}  // namespace fk::cuda
