// This file computes selective_state_update on CUDA.
//
// Floor: the state is read and written once; at batch 1 it is a few hundred kilobytes, so a step is
// as long as a launch and one trip to memory.
//
// Neighbouring threads take kVec neighbouring states each, a power of two of them a channel; where
// there is enough to do, of kChannels channels, which share B and C. All loads are issued as raw
// words before the first is used, and no load waits for another.
#include "cuda/raw_vec.cuh"
#include "cuda/row_partition.cuh"
#include "cuda/scan_step.cuh"
#include "ops/selective_state_update/heads.h"

namespace fk::cuda {
namespace {

constexpr int kUpdateThreads = 128;
constexpr int kUpdateVec = 4;       // states of a thread, where they lie side by side
constexpr int kUpdateChannels = 4;  // of a thread, where enough threads are left
constexpr int64_t kEnoughThreads = 1 << 14;

using state_update::HeadView;

struct UpdateArgs {
  state_update::Problem p;
  bool softplus;
  int lanes;      // of a channel, a power of two
  int64_t tiles;  // blocks side by side across the channels of a batch row
};

// Holds N elements as they lie in memory, float or T, side by side.
template <class T, int N>
struct Raw {
  RawVec<float, N> wide = {};
  RawVec<T, N> narrow = {};

  __device__ __forceinline__ static bool is_wide(const HeadView& view) {
    return sizeof(T) == 4 || view.dtype == DType::kFloat32;
  }

  __device__ __forceinline__ void load(const HeadView& view, int64_t at) {
    if (is_wide(view)) {
      wide.load(static_cast<const float*>(view.data) + at);
    } else {
      narrow.load(static_cast<const T*>(view.data) + at);
    }
  }

  __device__ __forceinline__ void decode(const HeadView& view, float (&out)[N]) const {
    if (is_wide(view)) {
      wide.unpack_to(out);
    } else {
      narrow.unpack_to(out);
    }
  }
};

template <class T, int N>
__device__ __forceinline__ void put(const HeadView& view, int64_t at, const float (&values)[N]) {
  if (sizeof(T) == 4 || view.dtype == DType::kFloat32) {
    store(static_cast<float*>(view.data) + at, pack<float, N>(values));
  } else {
    store(static_cast<T*>(view.data) + at, pack<T, N>(values));
  }
}

template <class T>
__device__ __forceinline__ Raw<T, 1> raw_at(const HeadView& view, int64_t at) {
  Raw<T, 1> raw;
  if (view.data != nullptr) raw.load(view, at);
  return raw;
}

template <class T>
__device__ __forceinline__ float value_of(const HeadView& view, const Raw<T, 1>& raw) {
  float value[1];
  raw.decode(view, value);
  return view.data == nullptr ? 0.f : value[0];
}

// `lanes` threads take kChannels channels of a head. One of them reads and works out what belongs
// to a channel, and shows it to the others. kVec > 1 says that states lie side by side in all
// tensors, or that A is the same for all.
template <class T, int kVec, int kChannels>
__global__ void __launch_bounds__(kUpdateThreads)
    update_state(const __grid_constant__ UpdateArgs a) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const state_update::Problem& p = a.p;
  const int shift = __ffs(a.lanes) - 1;
  const int lane = threadIdx.x & (a.lanes - 1);
  const int64_t b = divide_likely_small(block_index(), a.tiles);
  const int64_t index =
      ((block_index() - b * a.tiles) * (kUpdateThreads >> shift) + (threadIdx.x >> shift)) *
      kChannels;
  // All lanes stay for the sum.
  const bool exists = index < p.heads * p.channels && b < p.batch;
  const int64_t at = exists ? index : 0;
  const int64_t h = p.heads == 1 ? 0 : divide_likely_small(at, p.channels), c = at - h * p.channels;
  const int64_t group = p.heads == 1 ? divide_likely_small(c, p.group_channels)
                                     : divide_likely_small(h, p.group_heads);
  const bool same_A = p.A.state == 0;
  const T* B_at = static_cast<const T*>(p.B.data) + b * p.B.batch + group * p.B.head;
  const T* C_at = static_cast<const T*>(p.C.data) + b * p.C.batch + group * p.C.head;
  const float* A_at = static_cast<const float*>(p.A.data) + p.A.offset(0, h, c);
  const int64_t state_at = p.state.offset(b, h, c);
  const bool owns = exists && lane < kChannels;
  const int64_t own = c + (owns ? lane : 0);

  float y = 0, z = 0, x = 0, decay = 0;
  float2 dt = {0, 0};
  // The lanes' sums may cancel.
  using Sum = std::conditional_t<std::is_same_v<T, float>, double, float>;
  Sum sum[kChannels] = {};
  bool ready = false;
  int64_t first = 0;
  do {
    const int64_t n = first + lane * kVec;
    const bool has = exists && n < p.states;
    RawVec<T, kVec> B_in = {}, C_in = {};
    RawVec<float, kVec> A_in[kChannels] = {};
    Raw<T, kVec> state_in[kChannels];
    if (has) {
#pragma unroll
      for (int j = 0; j < kChannels; ++j) {
        state_in[j].load(p.state, state_at + j * p.state.channel + n * p.state.state);
        if (!same_A) A_in[j].load(A_at + j * p.A.channel + n * p.A.state);
      }
      B_in.load(B_at + n * p.B.state);
      C_in.load(C_at + n * p.C.state);
    }
    if (!ready) {
      ready = true;
      if (owns) {
        RawVec<T, 1> x_in, dt_in, z_in;
        x_in.load(static_cast<const T*>(p.x.data) + p.x.offset(b, h, own));
        dt_in.load(static_cast<const T*>(p.dt.data) + p.dt.offset(b, h, own));
        if (p.z.data != nullptr) {
          z_in.load(static_cast<const T*>(p.z.data) + p.z.offset(b, h, own));
        }
        const Raw<T, 1> D_in = raw_at<T>(p.D, p.D.offset(0, h, own));
        const Raw<T, 1> bias_in = raw_at<T>(p.dt_bias, p.dt_bias.offset(0, h, own));
        const float A = same_A ? A_at[lane * p.A.channel] : 0.f;
        x = value_of(x_in);
        dt = time_step<T>(value_of(dt_in), value_of(p.dt_bias, bias_in), a.softplus);
        decay = power<T>(dt.x, A);
        y = value_of(p.D, D_in) * x;
        if (p.z.data != nullptr) z = value_of(z_in);
        x *= dt.y;
      }
    }
    float B[kVec], C[kVec];
    B_in.unpack_to(B);
    C_in.unpack_to(C);
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
      const float input = __shfl_sync(kFullMask, x, j, a.lanes);
      const float step = __shfl_sync(kFullMask, same_A ? decay : dt.x, j, a.lanes);
      float A[kVec], state[kVec];
      A_in[j].unpack_to(A);
      state_in[j].decode(p.state, state);
      float part = 0;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        state[i] = fmaf(same_A ? step : power<T>(step, A[i]), state[i], input * B[i]);
        part = fmaf(C[i], state[i], part);
      }
      sum[j] += part;
      if (has && p.new_state.data != nullptr) {
        put<T>(p.new_state, p.new_state.offset(b, h, c + j) + n * p.new_state.state, state);
      }
    }
    first += int64_t{a.lanes} * kVec;
  } while (first < p.states);
  // Each sum ends up with the thread that owns the channel.
#pragma unroll
  for (int half = kChannels / 2; half > 0; half /= 2) {
#pragma unroll
    for (int j = 0; j < half; ++j) {
      const bool upper = lane & half;
      const Sum sent = upper ? sum[j] : sum[j + half];
      sum[j] = (upper ? sum[j + half] : sum[j]) + __shfl_xor_sync(kFullMask, sent, half);
    }
  }
  for (int away = kChannels; away < a.lanes; away *= 2) {
    sum[0] += __shfl_xor_sync(kFullMask, sum[0], away);
  }
  if (!owns || p.y.data == nullptr) return;
  y = static_cast<float>(sum[0] + y);
  if (p.z.data != nullptr) y = gated<T>(y, z);
  static_cast<T*>(p.y.data)[p.y.offset(b, h, own)] = from_float<T>(y);
}

// Returns whether kUpdateVec states of every channel can be loaded at once.
bool has_vectors(const state_update::Problem& p) {
  if (p.states % kUpdateVec != 0) return false;
  const auto whole = [](const HeadView& v) {
    return v.data == nullptr ||
           (v.state == 1 && v.batch % kUpdateVec == 0 && v.head % kUpdateVec == 0 &&
            v.channel % kUpdateVec == 0 &&
            reinterpret_cast<uintptr_t>(v.data) % (kUpdateVec * size_of(v.dtype)) == 0);
  };
  return whole(p.state) && whole(p.new_state) && whole(p.B) && whole(p.C) &&
         (p.A.state == 0 || whole(p.A));
}

template <class T, int kVec, int kChannels>
Status launch_update(UpdateArgs a, cudaStream_t stream) {
  a.tiles = ceil_div(a.p.heads * a.p.channels / kChannels, kUpdateThreads / a.lanes);
  return launch_early(update_state<T, kVec, kChannels>, "update_state",
                      {grid_of(a.tiles * a.p.batch), kUpdateThreads}, stream, a);
}

}  // namespace

Status run(const SelectiveStateUpdateFwd& a, const Exec& exec) {
  UpdateArgs args{state_update::problem_of(a), a.dt_softplus, 1, 1};
  const state_update::Problem& p = args.p;
  const int64_t channels = p.batch * p.heads * p.channels;
  if (channels == 0) return {};
  const cudaStream_t stream = stream_of(exec);
  const int vec = has_vectors(p) ? kUpdateVec : 1;
  args.lanes = power_of_two_at_least(std::min<int64_t>(32, ceil_div(p.states, vec)));
  const bool several = vec > 1 && args.lanes >= kUpdateChannels &&
                       p.channels % kUpdateChannels == 0 &&
                       p.group_channels % kUpdateChannels == 0 &&
                       channels / kUpdateChannels * args.lanes >= kEnoughThreads;
  return for_dtype(a.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (vec == 1) return launch_update<T, 1, 1>(args, stream);
    return several ? launch_update<T, kUpdateVec, kUpdateChannels>(args, stream)
                   : launch_update<T, kUpdateVec, 1>(args, stream);
  });
}

}  // namespace fk::cuda
