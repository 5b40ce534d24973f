// The selective scan's backward kernels for half.
#include "ops/selective_scan/cuda_backward_launch.cuh"

namespace fk::cuda {

template Status launch_reverse<__half>(ReverseShape, const ReverseArgs&, void*);

}  // namespace fk::cuda
