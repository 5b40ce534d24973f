// Gradients of causal_conv1d on CUDA.
//
// Floor: reads of x and dy, a write of dx.
//
// With s_t = bias + sum_k w_k x_{t-(W-1)+k} and ds_t = dy_t act'(s_t), computed again from x:
// dx_p = sum_k w_k ds_{p+(W-1)-k}, dw_k = sum_t ds_t x_{t-(W-1)+k}. The same two walks as the
// forward's: a thread along time with the last W - 1 inputs and values of ds in registers, or a
// warp along a channel whose time is contiguous, from its end to its beginning, a lane 16 bytes and
// what the lanes beside it have. Sums over time leave as one part per block, or per warp, which a
// second kernel adds in a fixed order.
#include <algorithm>
#include <climits>
#include <type_traits>

#include "cuda/row_walk.cuh"
#include "ops/causal_conv1d/cuda_backward_time.cuh"
#include "ops/causal_conv1d/cuda_conv.cuh"

namespace fk::cuda {
namespace {

constexpr int kBackThreads = 256;
constexpr RunLimits kBackRun = {16, 256};
constexpr int64_t kBackTimeRun = 2048;
// Loads of a thread in flight, of x and as many of dy: what the registers allow.
template <class T>
constexpr int kBackAhead = sizeof(T) == 4 ? 4 : 3;
constexpr int kBackBytes = 8;
template <class T>
constexpr int kBackVec = kBackBytes / static_cast<int>(sizeof(T));  // channels of a thread

template <class T, int kVec>
__device__ __noinline__ void put_state_gradients(const ConvArgs& a, int64_t slot, int64_t channel) {
  if (a.dinitial.data == nullptr) return;
  const Segment g = segment_at(a, slot);
  if (!g.exists || !g.opens) return;
  for (int i = 0; i < (a.width - 1) * kVec; ++i) {
    put_state_gradient<T>(a, g, i / kVec, channel + i % kVec);
  }
}

// The sums over time of one thread.
template <int kTaps, int kVec>
struct ConvGradients {
  float dw[kTaps][kVec] = {}, dbias[kVec] = {};
};

// Adds up the rows of the block, which have the same channels, and writes their part.
template <int kTaps, int kVec>
__device__ __forceinline__ void put_part(const ConvArgs& a, const ConvPlace<kVec>& place,
                                         const ConvGradients<kTaps, kVec>& sums) {
  __shared__ float rows[kBackThreads][kVec];
  float* part = a.partial + int64_t{place.strip} * (a.width + 1) * a.channels;
  const int wide = a.lanes * kVec;
  const int64_t first = int64_t{place.tile} * wide;
#pragma unroll
  for (int k = 0; k <= kTaps; ++k) {
    if (k < kTaps && !has_tap<kTaps>(a, k)) continue;
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      rows[threadIdx.x][c] = k < kTaps ? sums.dw[k < kTaps ? k : 0][c] : sums.dbias[c];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < wide; i += kBackThreads) {
      if (first + i >= a.channels) break;
      float sum = 0;
      for (int at = i; at < kBackThreads * kVec; at += wide) sum += (&rows[0][0])[at];
      part[(k - missing_taps<kTaps>(a)) * a.channels + first + i] = sum;
    }
  }
}

// One thread's walk. A segment that does not open its sequence begins a few steps early, for the
// values of ds before it; the last gradients of a sequence follow its last step.
template <class T, int kVec, int kTaps>
__device__ __forceinline__ void walk_back(const ConvArgs& a, const Segment& g, int64_t channel,
                                          const TapTile<T, kTaps, kVec>& taps, int lane,
                                          ConvGradients<kTaps, kVec>& sums) {
  constexpr int kAhead = kBackAhead<T>;
  constexpr int kEarly = (kTaps - 1 + kAhead - 1) / kAhead * kAhead;
  const int64_t begin = g.opens ? g.first : g.first - kEarly;
  const T* x = static_cast<const T*>(a.x.data) + g.batch * a.x.batch + begin * a.x.step +
               channel * a.x.channel;
  const T* dy = static_cast<const T*>(a.y.data) + g.batch * a.y.batch + begin * a.y.step +
                channel * a.y.channel;
  T* dx = static_cast<T*>(a.dx.data) + g.batch * a.dx.batch + (begin - (a.width - 1)) * a.dx.step +
          channel * a.dx.channel;
  // Steps are counted from `begin` on. With ds_t the gradient of step t - (W - 1) is whole.
  const int steps = static_cast<int>(g.last - begin);
  const int early = g.opens ? 0 : kEarly;
  const int own = a.dx.data == nullptr ? INT_MAX : g.opens ? a.width - 1 : kEarly;
  const int stop = g.closes ? steps + a.width - 1 : steps;
  const T* dfinal = static_cast<const T*>(a.dfinal.data);
  if (dfinal != nullptr) dfinal += g.sequence * a.dfinal.sequence + channel * a.dfinal.channel;
  Held<T, kVec> in[kAhead], grad[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i < steps) {
      in[i].load(x + i * a.x.step);
      grad[i].load(dy + i * a.y.step);
    }
  }
  x += kAhead * a.x.step;
  dy += kAhead * a.y.step;
  // ds[0] is the last, ds[1] the one before, ...
  float window[kTaps - 1][kVec], ds[kTaps - 1][kVec] = {};
  inputs_before<T>(a, g, begin - g.begin, channel, window);
  const ConvWeights<kTaps, kVec> w = taps.of_lane(a, lane);
  const auto put = [&](int t, const float(&value)[kVec], float(&out)[kVec]) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      // With tap 0 goes ds_t; of W taps it stands behind those that are missing.
      const int missing = missing_taps<kTaps>(a);
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        if (!has_tap<kTaps>(a, k)) continue;
        float from = value[c];
#pragma unroll
        for (int j = 1; j <= k; ++j) from = k - missing == j ? ds[j > 0 ? j - 1 : 0][c] : from;
        out[c] = fmaf(w.tap[k][c], from, out[c]);
      }
#pragma unroll
      for (int k = kTaps - 2; k > 0; --k) ds[k][c] = ds[k - 1][c];
      ds[0][c] = value[c];
    }
    if (t >= own) store(dx, pack<T, kVec>(out));
    dx += a.dx.step;
  };
  const auto step = [&](int t, Held<T, kVec>& x_t, Held<T, kVec>& dy_t) {
    float now[kVec], value[kVec], out[kVec] = {};
    x_t.unpack_to(now);
    dy_t.unpack_to(value);
    if (t + kAhead < steps) {
      x_t.load(x);
      dy_t.load(dy);
    }
    x += a.x.step;
    dy += a.y.step;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      float sum = fmaf(w.tap[kTaps - 1][c], now[c], w.bias[c]);
#pragma unroll
      for (int k = 0; k < kTaps - 1; ++k) {
        if (has_tap<kTaps>(a, k)) sum = fmaf(w.tap[k][c], window[k][c], sum);
      }
      const float slope = silu_slope(sum);
      value[c] = a.silu ? value[c] * slope : value[c];
      sums.dbias[c] += value[c];
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        if (has_tap<kTaps>(a, k)) {
          const float input = k == kTaps - 1 ? now[c] : window[k < kTaps - 1 ? k : 0][c];
          sums.dw[k][c] = fmaf(value[c], input, sums.dw[k][c]);
        }
      }
#pragma unroll
      for (int k = 0; k + 1 < kTaps - 1; ++k) window[k][c] = window[k + 1][c];
      window[kTaps - 2][c] = now[c];
    }
    put(t, value, out);
  };
  int t = 0;
#pragma unroll 1
  for (; t + kAhead <= steps; t += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) step(t + i, in[i], grad[i]);
    if (t + kAhead == early) sums = {};
  }
#pragma unroll 1
  for (; t < steps; ++t) {
    step(t, in[0], grad[0]);
#pragma unroll
    for (int i = 0; i + 1 < kAhead; ++i) {
      in[i] = in[i + 1];
      grad[i] = grad[i + 1];
    }
  }
#pragma unroll 1
  for (; t < stop; ++t) {
    float nothing[kVec] = {}, out[kVec] = {};
    if (dfinal != nullptr) {
#pragma unroll
      for (int c = 0; c < kVec; ++c) out[c] = to_float(dfinal[c * a.dfinal.channel]);
      dfinal += a.dfinal.place;
    }
    put(t, nothing, out);
  }
}

template <class T, int kVec, int kTaps>
__global__ void __launch_bounds__(kBackThreads, kTaps == kUsualTaps ? 2 : 1)
    conv_back_channels(const __grid_constant__ ConvArgs a) {
  __shared__ TapTile<T, kTaps, kVec> taps;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const ConvPlace<kVec> place(a, block_index(), kBackThreads);
  taps.fill(a, place.tile);
  ConvGradients<kTaps, kVec> sums;
  if (place.channel < a.channels && place.slot < a.segments.slots) {
    put_state_gradients<T, kVec>(a, place.slot, place.channel);
    const Segment g = segment_at(a, place.slot);
    if (g.exists) walk_back<T>(a, g, place.channel, taps, place.lane, sums);
  }
  put_part(a, place, sums);
}

struct ConvSums {
  const float* partial;
  int64_t parts, channels;
  int width;
  void *dweight, *dbias;  // NULL: not wanted
  int64_t weight_channel, weight_tap, bias_channel;
  bool weight_is_float, bias_is_float;
};

template <class T>
__global__ void __launch_bounds__(kConvThreads) conv_sums(const __grid_constant__ ConvSums a) {
  constexpr int kColumns = 32, kRows = kConvThreads / kColumns;
  __shared__ float sums[kRows][kColumns + 1];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t all = (a.width + 1) * a.channels;
  const int column = threadIdx.x % kColumns, row = threadIdx.x / kColumns;
  const int64_t i = block_index() * kColumns + column;
  float sum = 0;
  if (i < all) {
#pragma unroll 4
    for (int64_t s = row; s < a.parts; s += kRows) sum += a.partial[s * all + i];
  }
  sums[row][column] = sum;
  __syncthreads();
  if (row != 0 || i >= all) return;
#pragma unroll
  for (int r = 1; r < kRows; ++r) sum += sums[r][column];
  const int64_t tap = i / a.channels, channel = i % a.channels;
  if (tap < a.width) {
    if (a.dweight == nullptr) return;
    store_either<T>(a.dweight, a.weight_is_float, channel * a.weight_channel + tap * a.weight_tap,
                    sum);
  } else if (a.dbias != nullptr) {
    store_either<T>(a.dbias, a.bias_is_float, channel * a.bias_channel, sum);
  }
}

ConvLayout layout_of_call(const CausalConv1dBwd& op) {
  const int size = static_cast<int>(size_of(op.x.dtype));
  std::initializer_list<const Tensor*> with = {&op.x, &op.dy, &op.dx}, without = {&op.x, &op.dy};
  ConvLayout layout = layout_of(op.dx ? with : without, op.cu_seqlens.defined, 16 / size);
  layout.channels =
      layout_of(op.dx ? with : without, op.cu_seqlens.defined, kBackBytes / size).channels;
  layout.time = layout.time && !layout.channels;
  return layout;
}

// How a call is spread over blocks; `parts` of the sums over time.
struct BackwardPlan {
  Segments segments;
  int lanes = 1;
  int64_t tiles = 1, parts;
};

BackwardPlan plan_of(const CausalConv1dBwd& op, const ConvLayout& layout) {
  BackwardPlan plan;
  const scan::Sequences sequences = scan::sequences_of(op.x, op.cu_seqlens);
  const int64_t channels = op.x.size(2);
  if (layout.time) {
    plan.segments = segments_of(sequences, kBackTimeRun);
    plan.parts = plan.segments.slots;
    return plan;
  }
  const int vec = layout.channels ? kBackBytes / static_cast<int>(size_of(op.x.dtype)) : 1;
  plan.lanes = column_lanes(channels, vec);
  plan.tiles = ceil_div(channels, int64_t{plan.lanes} * vec);
  plan.segments = segments_that_fill(sequences, kBackRun, plan.tiles, kBackThreads / plan.lanes, 1,
                                     op.x.device_id);
  plan.parts = ceil_div(plan.segments.slots, kBackThreads / plan.lanes);
  return plan;
}

template <class T, int kTaps>
Status launch_backward(const ConvArgs& a, const ConvLayout& layout, const BackwardPlan& plan,
                       cudaStream_t stream) {
  if (layout.time) {
    const dim3 grid = grid_of(ceil_div(a.channels * a.segments.slots, kConvThreads / 32));
    return launch_early(conv_back_time<T, kTaps>, "conv_back_time", {grid, kConvThreads}, stream,
                        a);
  }
  const auto kernel =
      layout.channels ? conv_back_channels<T, kBackVec<T>, kTaps> : conv_back_channels<T, 1, kTaps>;
  return launch_early(kernel, "conv_back_channels",
                      {grid_of(plan.tiles * plan.parts), kBackThreads}, stream, a);
}

template <class T>
Status run_backward(const CausalConv1dBwd& op, const Exec& exec) {
  const cudaStream_t stream = stream_of(exec);
  ConvArgs a = conv_args(op);
  if (a.channels == 0) return {};
  a.y = scan::view_of(op.dy);
  a.dx = scan::view_of(op.dx);
  a.initial = conv_state(op.initial_state);
  a.dinitial = conv_state(op.dinitial_state);
  a.dfinal = conv_state(op.dfinal_state);
  const ConvLayout layout = layout_of_call(op);
  const BackwardPlan plan = plan_of(op, layout);
  a.segments = plan.segments;
  a.lanes = plan.lanes;
  a.tiles = plan.tiles;
  a.per_row = plan.segments.per_row();
  a.partial = exec.workspace<float>();
  if (a.segments.slots > 0) {
    FK_RETURN_IF_ERROR((a.width == kUsualTaps
                            ? launch_backward<T, kUsualTaps>(a, layout, plan, stream)
                            : launch_backward<T, kMaxConvWidth>(a, layout, plan, stream)));
  }
  ConvSums s{};
  s.partial = a.partial;
  s.parts = plan.parts;
  s.channels = a.channels;
  s.width = a.width;
  if (op.dweight) {
    s.dweight = op.dweight.data;
    s.weight_is_float = op.dweight.dtype == DType::kFloat32;
    s.weight_channel = op.dweight.stride(0);
    s.weight_tap = op.dweight.stride(1);
  }
  if (op.dbias) {
    s.dbias = op.dbias.data;
    s.bias_is_float = op.dbias.dtype == DType::kFloat32;
    s.bias_channel = op.dbias.stride(0);
  }
  const dim3 grid = grid_of(ceil_div((a.width + 1) * a.channels, 32));
  return launch_early(conv_sums<T>, "conv_sums", {grid, kConvThreads}, stream, s);
}

}  // namespace

size_t workspace(const CausalConv1dBwd& a) {
  // Where the tensors lie is not known here: enough for every layout.
  int64_t parts = 0;
  for (const ConvLayout layout : {ConvLayout{true, false}, {false, true}, {false, false}}) {
    parts = std::max(parts, plan_of(a, layout).parts);
  }
  return static_cast<size_t>(parts * (a.weight.size(1) + 1) * a.x.size(2)) * sizeof(float);
}

Status run(const CausalConv1dBwd& a, const Exec& exec) {
  return for_dtype(a.x.dtype,
                   [&](auto tag) { return run_backward<typename decltype(tag)::type>(a, exec); });
}

}  // namespace fk::cuda
