// The selective scan's forward kernels for float.
#include "ops/selective_scan/cuda_forward_launch.cuh"

namespace fk::cuda {

template Status launch_scan<float>(ScanPass, ScanShape, const ScanArgs&, void*);

}  // namespace fk::cuda
