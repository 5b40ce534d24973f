// causal_conv1d on CUDA, forward, and its update.
//
// Floor: one read of x and one write of y.
//
// Channels contiguous (and every other layout, one channel at a time): a thread takes a vector of
// channels and walks along a run of time, the last W - 1 inputs in registers; kAhead loads are in
// flight. Runs overlap by W - 1 inputs, which come from L2. Time contiguous: a warp takes a
// channel, a lane 16 bytes of time and, from L1, the W - 1 inputs before them.
#include "cuda/row_walk.cuh"
#include "ops/causal_conv1d/cuda_conv.cuh"

namespace fk::cuda {
namespace {

constexpr int kRun = 64;        // steps a thread walks
constexpr int kTimeRun = 2048;  // steps a warp takes of a channel
constexpr int kAhead = 4;

template <class T, int kVec, int kTaps>
__global__ void __launch_bounds__(kConvThreads) conv_channels(const __grid_constant__ ConvArgs a) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t vectors = a.channels / kVec;
  const int64_t index = block_index() * kConvThreads + threadIdx.x;
  if (index >= vectors * a.segments.slots) return;
  const int64_t channel = index % vectors * kVec;
  const Segment g = a.segments[index / vectors];
  if (!g.exists) return;
  ConvWeights<T, kTaps, kVec> w;
  w.load(a, channel);
  float window[kTaps - 1][kVec];
#pragma unroll
  for (int k = 0; k < kTaps - 1; ++k) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      window[k][c] = has_tap<kTaps>(a, k)
                         ? conv_input<T>(a, g, g.first - g.begin + k - (kTaps - 1), channel + c)
                         : 0.f;
    }
  }
  const T* x = static_cast<const T*>(a.x.data) + g.batch * a.x.batch + channel * a.x.channel;
  T* y = static_cast<T*>(a.y.data) + g.batch * a.y.batch + channel * a.y.channel;
#pragma unroll 1
  for (int64_t t = g.first; t < g.last; t += kAhead) {
    Vec<T, kVec> in[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (t + i < g.last) in[i] = load<kVec>(x + (t + i) * a.x.step);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (t + i >= g.last) break;
      float now[kVec], out[kVec];
      unpack(in[i], now);
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
      store(y + (t + i) * a.y.step, pack<T, kVec>(out));
    }
  }
}

template <class T, int kTaps>
__global__ void __launch_bounds__(kConvThreads) conv_time(const __grid_constant__ ConvArgs a) {
  constexpr int kVec = kVecWidth<T>;
  constexpr int kBefore = (kTaps - 1 + kVec - 1) / kVec;  // vectors before the lane's own
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t index = block_index() * (kConvThreads / 32) + threadIdx.x / 32;
  if (index >= a.channels * a.segments.slots) return;
  const int64_t channel = index % a.channels;
  const Segment g = a.segments[index / a.channels];
  ConvWeights<T, kTaps, 1> w;
  w.load(a, channel);
  const T* x = static_cast<const T*>(a.x.data) + g.batch * a.x.batch + channel * a.x.channel;
  T* y = static_cast<T*>(a.y.data) + g.batch * a.y.batch + channel * a.y.channel;
#pragma unroll 1
  for (int64_t t = g.first + threadIdx.x % 32 * kVec; t < g.last; t += 32 * kVec) {
    float in[(kBefore + 1) * kVec];
#pragma unroll
    for (int v = 0; v <= kBefore; ++v) {
      const int64_t at = t + (v - kBefore) * kVec;
      float values[kVec];
      if (at >= 0 && at + kVec <= g.end) {
        unpack(load<kVec>(x + at), values);
      } else {
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          const bool exists = at + e >= 1 - a.width && at + e < g.end;
          values[e] = exists ? conv_input<T>(a, g, at + e, channel) : 0.f;
        }
      }
#pragma unroll
      for (int e = 0; e < kVec; ++e) in[v * kVec + e] = values[e];
    }
    float out[kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      float sum = w.bias[0];
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        if (has_tap<kTaps>(a, k))
          sum = fmaf(w.tap[k][0], in[kBefore * kVec + e - (kTaps - 1) + k], sum);
      }
      out[e] = a.silu ? sum * sigmoid(sum) : sum;
    }
    if (t + kVec <= g.end) {
      store(y + t, pack<T, kVec>(out));
    } else {
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        if (t + e < g.end) y[t + e] = from_float<T>(out[e]);
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
  ConvWeights<T, kMaxConvWidth, 1> w;
  w.load(a, channel);
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
Status launch_forward(ConvArgs a, const ConvLayout& layout, cudaStream_t stream) {
  if (layout.time) {
    a.segments = segments_of(a.segments.sequences, kTimeRun);
    const dim3 grid = grid_of(ceil_div(a.channels * a.segments.slots, kConvThreads / 32));
    return launch_early(conv_time<T, kTaps>, "conv_time", {grid, kConvThreads}, stream, a);
  }
  a.segments = segments_of(a.segments.sequences, kRun);
  constexpr int kVec = kTaps == kUsualTaps ? kVecWidth<T> : kVecWidth<T> / 2;  // registers
  const int vec = layout.channels ? kVec : 1;
  const dim3 grid = grid_of(ceil_div(a.channels / vec * a.segments.slots, kConvThreads));
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
    FK_RETURN_IF_ERROR((op.weight.size(1) == kUsualTaps
                            ? launch_forward<T, kUsualTaps>(a, layout, stream)
                            : launch_forward<T, kMaxConvWidth>(a, layout, stream)));
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
