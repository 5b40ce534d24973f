// The kernels that keep the recurrent weights, for blocks that write into the shared memory of each
// other: those of a cluster on Hopper, and a block by itself anywhere.
#include "ops/rnn/cuda/kept_backward.cuh"
#include "ops/rnn/cuda/kept_forward.cuh"

namespace fk::cuda::rnn {

namespace {

template <class T, class Cell>
const void* instance(Direction direction) {
  constexpr Exchange kExchange = Exchange::kShared;
  return direction == Direction::kForward
             ? reinterpret_cast<const void*>(rnn_kept_forward<T, Cell, kExchange>)
             : reinterpret_cast<const void*>(rnn_kept_backward<T, Cell, kExchange>);
}

template <class T>
const void* instance(Direction direction, bool lstm) {
  return lstm ? instance<T, LstmCell>(direction) : instance<T, GruCell>(direction);
}

}  // namespace

const void* kept_through_shared(Direction direction, bool lstm, DType dtype) {
  if (dtype == DType::kFloat32) return instance<float>(direction, lstm);
  if (dtype == DType::kFloat16) return instance<__half>(direction, lstm);
  return instance<__nv_bfloat16>(direction, lstm);
}

}  // namespace fk::cuda::rnn
