// selective_state_update on CUDA.
//
// Floor: the state is read and written once; at batch 1 it is a few hundred kilobytes, so a step is
// as long as a launch and one trip to memory.
//
// Neighbouring threads take kVec neighbouring states each, a power of two of them a channel; where
// the batch is large, of kRows batch rows, which share A. All loads are issued as raw words before
// the first is used, and no load waits for another.
#include "cuda/gates.cuh"
#include "cuda/held.cuh"
#include "cuda/row_walk.cuh"
#include "ops/selective_scan/cuda_step.cuh"
#include "ops/selective_state_update/heads.h"

namespace fk::cuda {
namespace {

constexpr int kUpdateThreads = 128;
constexpr int kUpdateVec = 4;   // states of a thread, where they lie side by side
constexpr int kUpdateRows = 2;  // batch rows of a thread, where there are many
constexpr int64_t kManyStates = 1 << 23;

using state_update::View;

struct UpdateArgs {
  state_update::Problem p;
  bool softplus;
  int lanes;      // of a channel, a power of two
  int64_t tiles;  // blocks side by side across the channels of a batch row
};

// N elements as they lie in memory, float or T, N of them side by side.
template <class T, int N>
struct Raw {
  Held<float, N> wide = {};
  Held<T, N> narrow = {};

  __device__ __forceinline__ static bool is_wide(const View& view) {
    return sizeof(T) == 4 || view.dtype == DType::kFloat32;
  }

  __device__ __forceinline__ void load(const View& view, int64_t at) {
    if (is_wide(view)) {
      wide.load(static_cast<const float*>(view.data) + at);
    } else {
      narrow.load(static_cast<const T*>(view.data) + at);
    }
  }

  __device__ __forceinline__ void decode(const View& view, float (&out)[N]) const {
    if (is_wide(view)) {
      wide.unpack_to(out);
    } else {
      narrow.unpack_to(out);
    }
  }
};

template <class T, int N>
__device__ __forceinline__ void put(const View& view, int64_t at, const float (&values)[N]) {
  if (sizeof(T) == 4 || view.dtype == DType::kFloat32) {
    store(static_cast<float*>(view.data) + at, pack<float, N>(values));
  } else {
    store(static_cast<T*>(view.data) + at, pack<T, N>(values));
  }
}

template <class T>
__device__ __forceinline__ Raw<T, 1> raw_at(const View& view, int64_t at) {
  Raw<T, 1> raw;
  if (view.data != nullptr) raw.load(view, at);
  return raw;
}

template <class T>
__device__ __forceinline__ float value_of(const View& view, const Raw<T, 1>& raw) {
  float value[1];
  raw.decode(view, value);
  return view.data == nullptr ? 0.f : value[0];
}

template <class T>
__device__ __forceinline__ float value_of(const Held<T, 1>& held) {
  float value[1];
  held.unpack_to(value);
  return value[0];
}

// kVec > 1: states lie side by side in all tensors, or A is the same for all.
template <class T, int kVec, int kRows>
__global__ void __launch_bounds__(kUpdateThreads)
    update_state(const __grid_constant__ UpdateArgs a) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const state_update::Problem& p = a.p;
  const int shift = __ffs(a.lanes) - 1;
  const int lane = threadIdx.x & (a.lanes - 1);
  const int64_t strip = quotient(block_index(), a.tiles);
  const int64_t index =
      (block_index() - strip * a.tiles) * (kUpdateThreads >> shift) + (threadIdx.x >> shift);
  const int64_t b0 = strip * kRows;
  // All lanes stay for the sum.
  const bool exists = index < p.heads * p.channels && b0 < p.batch;
  const int64_t at = exists ? index : 0;
  const int64_t h = p.heads == 1 ? 0 : quotient(at, p.channels), c = at - h * p.channels;
  const int64_t group = p.heads == 1 ? quotient(c, p.group_channels) : quotient(h, p.group_heads);
  const bool same_A = p.A.state == 0;

  // Those of dtype T need no choice.
  Held<T, 1> x_in[kRows] = {}, dt_in[kRows] = {}, z_in[kRows] = {};
  const Raw<T, 1> D_in = raw_at<T>(p.D, p.D.offset(0, h, c));
  const Raw<T, 1> bias_in = raw_at<T>(p.dt_bias, p.dt_bias.offset(0, h, c));
  const auto has_row = [&](int r) { return exists && (kRows == 1 || b0 + r < p.batch); };
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (!has_row(r)) continue;
    x_in[r].load(static_cast<const T*>(p.x.data) + p.x.offset(b0 + r, h, c));
    dt_in[r].load(static_cast<const T*>(p.dt.data) + p.dt.offset(b0 + r, h, c));
    if (p.z.data != nullptr) {
      z_in[r].load(static_cast<const T*>(p.z.data) + p.z.offset(b0 + r, h, c));
    }
  }
  float x[kRows], dt[kRows], sum[kRows] = {};
  bool ready = false;
#pragma unroll 1
  for (int64_t n = lane * kVec; n < p.states; n += int64_t{a.lanes} * kVec) {
    Held<float, kVec> A_in;
    Held<T, kVec> B_in[kRows], C_in[kRows];
    Raw<T, kVec> state_in[kRows];
    const float* A_at = static_cast<const float*>(p.A.data) + p.A.offset(0, h, c);
    if (same_A) {
      Held<float, 1> one;
      one.load(A_at);
#pragma unroll
      for (int i = 0; i < kVec; ++i) A_in.words[i] = one.words[0];
    } else {
      A_in.load(A_at + n * p.A.state);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!has_row(r)) continue;
      const int64_t b = b0 + r;
      state_in[r].load(p.state, p.state.offset(b, h, c) + n * p.state.state);
      B_in[r].load(static_cast<const T*>(p.B.data) + b * p.B.batch + group * p.B.head +
                   n * p.B.state);
      C_in[r].load(static_cast<const T*>(p.C.data) + b * p.C.batch + group * p.C.head +
                   n * p.C.state);
    }
    if (!ready) {
      ready = true;
      const float bias = value_of(p.dt_bias, bias_in);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        x[r] = value_of(x_in[r]);
        dt[r] = value_of(dt_in[r]) + bias;
        if (a.softplus) dt[r] = softplus<T>(dt[r]);
      }
    }
    float A[kVec];
    A_in.unpack_to(A);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!has_row(r)) continue;
      float B[kVec], C[kVec], state[kVec];
      B_in[r].unpack_to(B);
      C_in[r].unpack_to(C);
      state_in[r].decode(p.state, state);
      const float log2_e_dt = within_power<T>(times_log2e(dt[r]));
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        state[i] = fmaf(power<T>(log2_e_dt, A[i]), state[i], dt[r] * B[i] * x[r]);
        sum[r] = fmaf(C[i], state[i], sum[r]);
      }
      if (p.new_state.data == nullptr) continue;
      put<T>(p.new_state, p.new_state.offset(b0 + r, h, c) + n * p.new_state.state, state);
    }
  }
  const float D = value_of(p.D, D_in);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    for (int away = a.lanes / 2; away > 0; away /= 2) {
      sum[r] += __shfl_xor_sync(kFullMask, sum[r], away);
    }
    if (lane != 0 || !has_row(r) || p.y.data == nullptr) continue;
    float y = fmaf(D, value_of(x_in[r]), sum[r]);
    if (p.z.data != nullptr) {
      const float z = value_of(z_in[r]);
      y *= z * sigmoid(z);
    }
    static_cast<T*>(p.y.data)[p.y.offset(b0 + r, h, c)] = from_float<T>(y);
  }
}

// Whether kUpdateVec states of every channel can be loaded at once.
bool has_vectors(const state_update::Problem& p) {
  if (p.states % kUpdateVec != 0) return false;
  const auto whole = [](const View& v) {
    return v.data == nullptr ||
           (v.state == 1 && v.batch % kUpdateVec == 0 && v.head % kUpdateVec == 0 &&
            v.channel % kUpdateVec == 0 &&
            reinterpret_cast<uintptr_t>(v.data) % (kUpdateVec * size_of(v.dtype)) == 0);
  };
  return whole(p.state) && whole(p.new_state) && whole(p.B) && whole(p.C) &&
         (p.A.state == 0 || whole(p.A));
}

template <class T, int kVec, int kRows>
Status launch_update(UpdateArgs a, cudaStream_t stream) {
  a.lanes = power_of_two_at_least(std::min<int64_t>(32, ceil_div(a.p.states, kVec)));
  a.tiles = ceil_div(a.p.heads * a.p.channels, kUpdateThreads / a.lanes);
  const dim3 grid = grid_of(a.tiles * ceil_div(a.p.batch, kRows));
  return launch_early(update_state<T, kVec, kRows>, "update_state", {grid, kUpdateThreads}, stream,
                      a);
}

}  // namespace

Status run(const SelectiveStateUpdateFwd& a, const Exec& exec) {
  const UpdateArgs args{state_update::problem_of(a), a.dt_softplus, 1, 1};
  const int64_t channels = args.p.batch * args.p.heads * args.p.channels;
  if (channels == 0) return {};
  const cudaStream_t stream = stream_of(exec);
  // Rows of the batch are put together where enough threads are left.
  const bool many = channels * args.p.states >= kManyStates;
  return for_dtype(a.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (!has_vectors(args.p)) return launch_update<T, 1, 1>(args, stream);
    return many ? launch_update<T, kUpdateVec, kUpdateRows>(args, stream)
                : launch_update<T, kUpdateVec, 1>(args, stream);
  });
}

}  // namespace fk::cuda
