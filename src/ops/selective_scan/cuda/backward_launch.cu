// How the backward's kernels are launched, for each dtype.
#include "cuda/row_partition.cuh"
#include "ops/selective_scan/cuda/backward.cuh"
#include "ops/selective_scan/cuda/backward_carry.cuh"
#include "ops/selective_scan/cuda/backward_short.cuh"

namespace fk::cuda {

template <class T>
Status launch_carry(bool reverse, const BackwardArgs& a, void* stream) {
  const LaunchShape shape = {grid_of(a.blocks()), static_cast<unsigned>(a.warps * 32),
                             4 * carry_shared_floats(a.warps)};
  for (int first = 0; first < a.states; first += kGroupStates) {
    FK_RETURN_IF_ERROR(launch_early(reverse ? carry_states<T, true> : carry_states<T, false>,
                                    "carry_states", shape, static_cast<cudaStream_t>(stream), a,
                                    first));
  }
  return {};
}

template <class T>
Status launch_backward(const BackwardArgs& a, void* stream) {
  const LaunchShape shape = {grid_of(a.blocks()), static_cast<unsigned>(a.warps * 32),
                             backward_shared_bytes(a.warps, a.state_groups > 1)};
  return launch_early(reverse_chunks<T>, "reverse_chunks", shape, static_cast<cudaStream_t>(stream),
                      a);
}

template <class T>
Status launch_short(int64_t steps, const BackwardArgs& a, void* stream) {
  const LaunchShape shape = {
      dim3(static_cast<unsigned>(a.blocks_per_group), static_cast<unsigned>(a.groups),
           static_cast<unsigned>(a.segments.slots)),
      kShortThreads, short_shared_bytes(steps)};
  return launch_early(reverse_short<T>, "reverse_short", shape, static_cast<cudaStream_t>(stream),
                      a);
}

template Status launch_carry<__nv_bfloat16>(bool, const BackwardArgs&, void*);
template Status launch_backward<__nv_bfloat16>(const BackwardArgs&, void*);
template Status launch_short<__nv_bfloat16>(int64_t, const BackwardArgs&, void*);

template Status launch_carry<float>(bool, const BackwardArgs&, void*);
template Status launch_backward<float>(const BackwardArgs&, void*);
template Status launch_short<float>(int64_t, const BackwardArgs&, void*);

template Status launch_carry<__half>(bool, const BackwardArgs&, void*);
template Status launch_backward<__half>(const BackwardArgs&, void*);
template Status launch_short<__half>(int64_t, const BackwardArgs&, void*);

}  // namespace fk::cuda
