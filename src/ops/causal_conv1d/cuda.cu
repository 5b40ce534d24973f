// causal_conv1d on CUDA, forward, and its update.
//
// Floor: one read of x and one write of y.
//
// Channels contiguous (and every other layout, one channel at a time): a thread takes a vector of
// channels and walks along a run of time, the last W - 1 inputs in registers; kAhead loads are in
// flight. The rows of a block are neighbouring runs of the same channels, whose taps come through
// shared memory; runs overlap by W - 1 inputs, which come from L2. Runs are as long as leaves
// blocks for all multiprocessors.
//
// Time contiguous: a warp takes a channel, a lane 16 bytes of time, kTimeAhead vectors ahead; the
// W - 1 inputs before them come from the lane before.
#include "cuda/row_walk.cuh"
#include "ops/causal_conv1d/cuda_conv.cuh"

namespace fk::cuda {
namespace {

constexpr int kTimeRun = 2048;  // steps a warp takes of a channel
// Loads of a thread in flight; with 8 bytes each, the registers go to as many threads as possible.
constexpr int kAhead = 8;
template <class T>
constexpr int kTimeAhead = sizeof(T) == 4 ? 2 : 3;
constexpr int kBytes = 8;

template <class T, int kVec, int kTaps>
__global__ void __launch_bounds__(kConvThreads, 2)
    conv_channels(const __grid_constant__ ConvArgs a) {
  __shared__ TapTile<T, kTaps, kVec> taps;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const ConvPlace<kVec> place(a, block_index(), kConvThreads);
  Segment g{};
  if (place.channel < a.channels && place.slot < a.segments.slots) g = segment_at(a, place.slot);
  const T* x = static_cast<const T*>(a.x.data) + g.batch * a.x.batch + g.first * a.x.step +
               place.channel * a.x.channel;
  T* y = static_cast<T*>(a.y.data) + g.batch * a.y.batch + g.first * a.y.step +
         place.channel * a.y.channel;
  const int steps = g.exists ? static_cast<int>(g.last - g.first) : 0;
  Held<T, kVec> in[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i < steps) in[i].load(x + i * a.x.step);
  }
  x += kAhead * a.x.step;
  float window[kTaps - 1][kVec];
  if (g.exists) inputs_before<T>(a, g, g.first - g.begin, place.channel, window);
  taps.fill(a, place.tile);
  const ConvWeights<kTaps, kVec> w = taps.of_lane(a, place.lane);
  const auto step = [&](int t, Held<T, kVec>& held) {
    float now[kVec], out[kVec];
    held.unpack_to(now);
    if (t + kAhead < steps) held.load(x);
    x += a.x.step;
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      float sum = fmaf(w.tap[kTaps - 1][c], now[c], w.bias[c]);
#pragma unroll
      for (int k = 0; k < kTaps - 1; ++k) {
        if (has_tap<kTaps>(a, k)) sum = fmaf(w.tap[k][c], window[k][c], sum);
      }
      out[c] = a.silu ? sum * sigmoid(sum) : sum;
#pragma unroll
      for (int k = 0; k + 1 < kTaps - 1; ++k) window[k][c] = window[k + 1][c];
      window[kTaps - 2][c] = now[c];
    }
    store(y, pack<T, kVec>(out));
    y += a.y.step;
  };
  int t = 0;
#pragma unroll 1
  for (; t + kAhead <= steps; t += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) step(t + i, in[i]);
  }
#pragma unroll 1
  for (; t < steps; ++t) {
    step(t, in[0]);
#pragma unroll
    for (int i = 0; i + 1 < kAhead; ++i) in[i] = in[i + 1];
  }
}

template <class T, int kTaps>
__global__ void __launch_bounds__(kConvThreads, sizeof(T) == 4 ? 4 : 3)
    conv_time(const __grid_constant__ ConvArgs a) {
  constexpr int kVec = kVecWidth<T>;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t index = block_index() * (kConvThreads / 32) + threadIdx.x / 32;
  if (index >= a.channels * a.segments.slots) return;
  const int lane = threadIdx.x % 32;
  const int64_t slot = quotient(index, a.channels), channel = index - slot * a.channels;
  const Segment g = segment_at(a, slot);
  const T* x = static_cast<const T*>(a.x.data) + g.batch * a.x.batch + channel * a.x.channel +
               g.first + lane * kVec;
  T* y = static_cast<T*>(a.y.data) + g.batch * a.y.batch + channel * a.y.channel + g.first +
         lane * kVec;
  const int total = static_cast<int>(g.last - g.first);
  const int steps = total - lane * kVec;  // from the lane's first on
  const auto fetch = [&](Held<T, kVec>& held, int t) {
    if (t + kVec <= steps) {
      held.load(x + t);
    } else {
      float values[kVec];
#pragma unroll
      for (int e = 0; e < kVec; ++e) values[e] = t + e < steps ? to_float(x[t + e]) : 0.f;
      held.set(values);
    }
  };
  constexpr int kStride = 32 * kVec;
  Held<T, kVec> in[kTimeAhead<T>];
#pragma unroll
  for (int i = 0; i < kTimeAhead<T>; ++i) fetch(in[i], i * kStride);
  Held<T, kVec> last;
  inputs_before_row(a, g, lane, channel, x, last);
  const ConvWeights<kTaps, 1> w = channel_weights<T, kTaps>(a, channel);
  float before[kVec];
  last.unpack_to(before);
#pragma unroll 1
  for (int t0 = 0; t0 < total; t0 += kTimeAhead<T> * kStride) {
#pragma unroll
    for (int i = 0; i < kTimeAhead<T>; ++i) {
      const int t = t0 + i * kStride;
      if (t >= total) break;
      float window[kTaps - 1 + kVec], now[kVec];
      in[i].unpack_to(now);
      if (t + kTimeAhead<T> * kStride < total) fetch(in[i], t + kTimeAhead<T> * kStride);
#pragma unroll
      for (int e = 0; e < kVec; ++e) window[kTaps - 1 + e] = now[e];
#pragma unroll
      for (int h = 1; h < kTaps; ++h) {
        const int e = (kVec - h % kVec) % kVec;
        window[kTaps - 1 - h] = h <= kVec ? from_lane<-1>(now[e], before[e], lane)
                                          : from_lane<-2>(now[e], before[e], lane);
      }
#pragma unroll
      for (int e = 0; e < kVec; ++e) before[e] = now[e];
      float out[kVec];
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        float sum = w.bias[0];
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
          if (has_tap<kTaps>(a, k)) sum = fmaf(w.tap[k][0], window[e + k], sum);
        }
        out[e] = a.silu ? sum * sigmoid(sum) : sum;
      }
      if (t + kVec <= steps) {
        store(y + t, pack<T, kVec>(out));
      } else {
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          if (t + e < steps) y[t + e] = from_float<T>(out[e]);
        }
      }
    }
  }
}

// The last W - 1 inputs of each sequence. In the update, in place of the state they were in.
template <class T>
__global__ void __launch_bounds__(kConvThreads) conv_final(const __grid_constant__ ConvArgs a) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t index = block_index() * kConvThreads + threadIdx.x;
  if (index >= a.channels * a.segments.sequences.count) return;
  const int64_t channel = index % a.channels, s = index / a.channels;
  const scan::Sequence q = a.segments.sequences[s];
  Segment g{};
  g.sequence = s;
  g.batch = q.batch;
  g.begin = q.begin;
  // Ascending: in place, an entry is read before it is written.
  for (int k = 0; k < a.width - 1; ++k) {
    static_cast<T*>(
        a.final.data)[s * a.final.sequence + k * a.final.place + channel * a.final.channel] =
        from_float<T>(conv_input<T>(a, g, q.end - q.begin + k - (a.width - 1), channel));
  }
}

// The step: outputs first, then the state, which may be where it was.
template <class T>
__global__ void __launch_bounds__(kConvThreads) conv_update(const __grid_constant__ ConvArgs a) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t index = block_index() * kConvThreads + threadIdx.x;
  if (index >= a.channels * a.segments.sequences.count) return;
  const int64_t channel = index % a.channels, s = index / a.channels;
  Segment g{};
  g.sequence = g.batch = s;
  const ConvWeights<kMaxConvWidth, 1> w = channel_weights<T, kMaxConvWidth>(a, channel);
  const int64_t length = a.segments.sequences.length;
  float window[kMaxConvWidth];
#pragma unroll
  for (int k = 0; k < kMaxConvWidth; ++k) {
    const int64_t i = k - (kMaxConvWidth - 1) - 1;
    window[k] = i >= 1 - a.width ? conv_input<T>(a, g, i, channel) : 0.f;
  }
  for (int64_t t = 0; t < length; ++t) {
#pragma unroll
    for (int k = 0; k + 1 < kMaxConvWidth; ++k) window[k] = window[k + 1];
    window[kMaxConvWidth - 1] = conv_input<T>(a, g, t, channel);
    float sum = w.bias[0];
#pragma unroll
    for (int k = 0; k < kMaxConvWidth; ++k) {
      if (has_tap<kMaxConvWidth>(a, k)) sum = fmaf(w.tap[k][0], window[k], sum);
    }
    if (a.y.data == nullptr) continue;
    static_cast<T*>(a.y.data)[s * a.y.batch + t * a.y.step + channel * a.y.channel] =
        from_float<T>(a.silu ? sum * sigmoid(sum) : sum);
  }
  if (a.final.data == nullptr) return;
#pragma unroll
  for (int k = 0; k < kMaxConvWidth - 1; ++k) {
    const int place = k - (kMaxConvWidth - a.width);
    if (place < 0) continue;
    static_cast<T*>(
        a.final.data)[s * a.final.sequence + place * a.final.place + channel * a.final.channel] =
        from_float<T>(window[k + 1]);
  }
}

template <class T, int kTaps>
Status launch_forward(ConvArgs a, const ConvLayout& layout, int device, cudaStream_t stream) {
  if (layout.time) {
    a.segments = segments_of(a.segments.sequences, kTimeRun);
    a.per_row = a.segments.per_row();
    const dim3 grid = grid_of(ceil_div(a.channels * a.segments.slots, kConvThreads / 32));
    return launch_early(conv_time<T, kTaps>, "conv_time", {grid, kConvThreads}, stream, a);
  }
  constexpr int kVec = kBytes / static_cast<int>(sizeof(T));
  const int vec = layout.channels ? kVec : 1;
  a.lanes = column_lanes(a.channels, vec);
  a.tiles = ceil_div(a.channels, int64_t{a.lanes} * vec);
  // What a run costs beside its steps counts where few bytes make up for it.
  const int waves = sizeof(T) == 4 ? 8 : 1;
  a.segments = segments_that_fill(a.segments.sequences, {16, 128}, a.tiles, kConvThreads / a.lanes,
                                  waves, device);
  a.per_row = a.segments.per_row();
  const dim3 grid = grid_of(a.tiles * ceil_div(a.segments.slots, kConvThreads / a.lanes));
  const auto kernel = layout.channels ? conv_channels<T, kVec, kTaps> : conv_channels<T, 1, kTaps>;
  return launch_early(kernel, "conv_channels", {grid, kConvThreads}, stream, a);
}

template <class T>
Status run_forward(const CausalConv1dFwd& op, const Exec& exec) {
  const cudaStream_t stream = stream_of(exec);
  ConvArgs a = conv_args(op);
  if (a.channels == 0) return {};
  a.y = scan::view_of(op.y);
  a.initial = conv_state(op.initial_state);
  a.segments.sequences = scan::sequences_of(op.x, op.cu_seqlens);
  if (op.y && op.y.numel() > 0) {
    const ConvLayout layout = layout_of({&op.x, &op.y}, op.cu_seqlens.defined, kVecWidth<T>);
    const int device = op.x.device_id;
    FK_RETURN_IF_ERROR((op.weight.size(1) == kUsualTaps
                            ? launch_forward<T, kUsualTaps>(a, layout, device, stream)
                            : launch_forward<T, kMaxConvWidth>(a, layout, device, stream)));
  }
  if (!op.final_state || op.final_state.numel() == 0) return {};
  a.final = conv_state(op.final_state);
  const dim3 grid = grid_of(ceil_div(a.channels * a.segments.sequences.count, kConvThreads));
  return launch_early(conv_final<T>, "conv_final", {grid, kConvThreads}, stream, a);
}

template <class T>
Status run_update(const CausalConv1dUpdateFwd& op, const Exec& exec) {
  ConvArgs a = conv_args(op);
  a.initial = conv_state(op.state);
  a.final = conv_state(op.new_state);
  a.y = update_view(op.y);
  a.segments.sequences.count = op.x.size(0);
  a.segments.sequences.length = op.x.ndim == 3 ? op.x.size(1) : 1;
  if (a.channels * op.x.size(0) == 0) return {};
  const dim3 grid = grid_of(ceil_div(a.channels * op.x.size(0), kConvThreads));
  return launch_early(conv_update<T>, "conv_update", {grid, kConvThreads}, stream_of(exec), a);
}

}  // namespace

Status run(const CausalConv1dFwd& a, const Exec& exec) {
  return for_dtype(a.x.dtype,
                   [&](auto tag) { return run_forward<typename decltype(tag)::type>(a, exec); });
}

Status run(const CausalConv1dUpdateFwd& a, const Exec& exec) {
  return for_dtype(a.x.dtype,
                   [&](auto tag) { return run_update<typename decltype(tag)::type>(a, exec); });
}

}  // namespace fk::cuda
