// The second launch of ssd's backward: the gradients of inputs. Two tasks share it, dB and dC
// (backward_shared.cuh) and dx and dz (backward_inputs.cuh), because both read the chunks' inputs
// and states: blocks of one chunk have neighbouring numbers, so that memory delivers those once.
#pragma once

#include "ops/ssd/cuda/backward_inputs.cuh"
#include "ops/ssd/cuda/backward_shared.cuh"

namespace fk::cuda::ssd {

template <class T>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    backward_chunks(const __grid_constant__ BackwardArguments a) {
  extern __shared__ __align__(128) char memory[];
  const int64_t shared = a.shared_blocks_of_chunk(), each = shared + a.in.heads;
  const int64_t block = blockIdx.x + int64_t{blockIdx.y} * gridDim.x;
  const int64_t slot = block / each, task = block % each;
  if (slot >= a.chunks.slots) return;
  // The blocks that walk over heads are the longest, and come first.
  if (task < shared) {
    shared_gradients<T>(a, slot * shared + task, memory);
  } else {
    input_gradients<T>(a, slot * a.in.heads + task - shared, memory);
  }
}

}  // namespace fk::cuda::ssd
