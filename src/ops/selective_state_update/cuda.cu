// selective_state_update on CUDA.
//
// Floor: the state is read and written once; at batch 1 it is a few hundred kilobytes, so a step is
// as long as a launch and one trip to memory. kLanes threads share a channel, neighbouring states
// in neighbouring threads; all loads of a thread are in flight before the first is used.
#include "cuda/gates.cuh"
#include "cuda/parameter.cuh"
#include "cuda/row_walk.cuh"
#include "ops/selective_state_update/heads.h"

namespace fk::cuda {
namespace {

constexpr int kUpdateThreads = 128;
constexpr int kLanes = 8;
constexpr int kAhead = 2;  // states of a thread at a time

struct UpdateArgs {
  state_update::Problem p;
  bool softplus;
};

template <class T>
__device__ __forceinline__ float value_at(const state_update::View& view, int64_t at) {
  return load_either<T>(view.data, view.dtype == DType::kFloat32, at);
}

template <class T>
__global__ void __launch_bounds__(kUpdateThreads)
    update_state(const __grid_constant__ UpdateArgs a) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const state_update::Problem& p = a.p;
  const int lane = threadIdx.x % kLanes;
  const int64_t index = block_index() * (kUpdateThreads / kLanes) + threadIdx.x / kLanes;
  const bool exists = index < p.batch * p.heads * p.channels;
  // All lanes stay for the sum.
  const int64_t at = exists ? index : 0;
  const int64_t c = at % p.channels, h = at / p.channels % p.heads, b = at / p.channels / p.heads;
  const int64_t group = p.group(h, c);
  const int64_t B_at = b * p.B.batch + group * p.B.head, C_at = b * p.C.batch + group * p.C.head;
  const int64_t A_at = p.A.offset(b, h, c), from = p.state.offset(b, h, c);
  const int64_t to = p.new_state.offset(b, h, c);

  const float x = value_at<T>(p.x, p.x.offset(b, h, c));
  float dt = value_at<T>(p.dt, p.dt.offset(b, h, c));
  if (p.dt_bias.data != nullptr) dt += value_at<T>(p.dt_bias, p.dt_bias.offset(b, h, c));
  if (a.softplus) dt = softplus<T>(dt);
  const float D = p.D.data == nullptr ? 0.f : value_at<T>(p.D, p.D.offset(b, h, c));
  const float z = p.z.data == nullptr ? 0.f : value_at<T>(p.z, p.z.offset(b, h, c));
  float sum = 0;
  for (int64_t n0 = lane; n0 < p.states; n0 += kLanes * kAhead) {
    float A[kAhead], B[kAhead], C[kAhead], state[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t n = n0 + i * kLanes;
      if (n < p.states) {
        A[i] = value_at<T>(p.A, A_at + n * p.A.state);
        B[i] = value_at<T>(p.B, B_at + n * p.B.state);
        C[i] = value_at<T>(p.C, C_at + n * p.C.state);
        state[i] = value_at<T>(p.state, from + n * p.state.state);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t n = n0 + i * kLanes;
      if (n < p.states) {
        const float after = fmaf(exp2_fast(kLog2E * dt * A[i]), state[i], dt * B[i] * x);
        sum = fmaf(C[i], after, sum);
        if (p.new_state.data != nullptr && exists) {
          store_either<T>(p.new_state.data, p.new_state.dtype == DType::kFloat32,
                          to + n * p.new_state.state, after);
        }
      }
    }
  }
  sum = warp_sum<kLanes>(sum);
  if (lane != 0 || !exists || p.y.data == nullptr) return;
  sum = fmaf(D, x, sum);
  if (p.z.data != nullptr) sum *= z * sigmoid(z);
  static_cast<T*>(p.y.data)[p.y.offset(b, h, c)] = from_float<T>(sum);
}

}  // namespace

Status run(const SelectiveStateUpdateFwd& a, const Exec& exec) {
  UpdateArgs args{state_update::problem_of(a), a.dt_softplus};
  const int64_t channels = args.p.batch * args.p.heads * args.p.channels;
  if (channels == 0) return {};
  return for_dtype(a.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const dim3 grid = grid_of(ceil_div(channels, kUpdateThreads / kLanes));
    return launch_early(update_state<T>, "update_state", {grid, kUpdateThreads}, stream_of(exec),
                        args);
  });
}

}  // namespace fk::cuda
