// The selective scan's forward kernels for bfloat16.
#include "ops/selective_scan/cuda_forward_launch.cuh"

namespace fk::cuda {

template Status launch_scan<__nv_bfloat16>(ScanPass, ScanShape, const ScanArgs&, void*);

}  // namespace fk::cuda
