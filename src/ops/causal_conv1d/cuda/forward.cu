// This file computes causal_conv1d and its update on CUDA.
//
// Floor: one read of x and one write of y.
//
// Channels contiguous (and every other layout, one channel at a time): a warp walks along a run of
// time, a lane 8 bytes of channels, the last W - 1 inputs in registers. The warps of a block are in
// neighbouring runs of the same channels; runs overlap by W - 1 inputs. Rows are brought to L2
// kRows ahead, which takes no registers.
//
// Time contiguous: a warp takes a channel, a lane 16 bytes of time, through a ring in shared
// memory, from which the W - 1 inputs before them come too.
#include "cuda/row_partition.cuh"
#include "ops/causal_conv1d/cuda/forward_time.cuh"
#include "ops/causal_conv1d/cuda/rows.cuh"

namespace fk::cuda {
namespace {

constexpr int kWarps = kConvThreads / 32;
constexpr int kTimeWarps = 2;
// This many blocks share a multiprocessor.
constexpr int kChannelBlocks = 2;
template <int kTaps>
constexpr int kTimeBlocks = kTaps == kUsualTaps ? 16 : 12;
// So many blocks follow each other there. Many even out how fast multiprocessors are, but where few
// bytes make up for what a run costs beside its steps, they cost more than that.
template <class T>
constexpr int kWaves = sizeof(T) == 4 ? 16 : 1;
// A thread has so many channels.
template <class T, int kTaps>
constexpr int kForwardVec = (kTaps == kUsualTaps ? 8 : 4) / static_cast<int>(sizeof(T));

template <class T, int kVec, int kTaps>
__global__ void __launch_bounds__(kConvThreads, kChannelBlocks)
    conv_channels(const __grid_constant__ ConvArgs a) {
  constexpr int kRows = 8;
  const RowPlace<kVec, kWarps> place(a);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (place.slot >= a.segments.slots || place.channel >= a.channels) return;
  const Segment g = segment_at(a, place.slot);
  if (!g.exists) return;
  const int steps = static_cast<int>(g.last - g.first);
  const T* x = static_cast<const T*>(a.x.data) + g.batch * a.x.batch + g.first * a.x.step +
               place.channel * a.x.channel;
  T* y = static_cast<T*>(a.y.data) + g.batch * a.y.batch + g.first * a.y.step +
         place.channel * a.y.channel;
  const RowPrefetch<T, kVec, kRows> prefetch(x, a.x.step, place.lane);
  if (kVec > 1) prefetch(0, a.x.step, steps);
  // These loads are issued together with those of the taps.
  RawVec<T, kVec> before[kTaps - 1];
  inputs_before(a, g, g.first - g.begin, place.channel, before);
  const ConvWeights<kTaps, kVec> w = channel_weights<T, kTaps, kVec>(a, place.channel);
  RowWindow<kTaps, kVec> window(before);
  const auto row = [&](int r) {
    float out[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      const float sum = window.sum(a, w, r, c);
      out[c] = a.silu ? sum * sigmoid(sum) : sum;
    }
    store_streaming(y, pack<T, kVec>(out));
    y += a.y.step;
  };
  int t = 0;
#pragma unroll 1
  for (; t + kRows <= steps; t += kRows) {
    if (kVec > 1) prefetch(t + kRows, a.x.step, steps);
    RawVec<T, kVec> in[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) in[r].load(x + r * a.x.step);
    x += kRows * a.x.step;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      in[r].unpack_to(window.rows[r % kTaps]);
      row(r);
    }
  }
#pragma unroll 1
  for (; t < steps; ++t) {
    RawVec<T, kVec> in;
    in.load(x);
    x += a.x.step;
    in.unpack_to(window.rows[0]);
    row(0);
    window.turn();
  }
}

template <class T, int kTaps>
__global__ void __launch_bounds__(32 * kTimeWarps, kTimeBlocks<kTaps>)
    conv_time(const __grid_constant__ ConvArgs a) {
  constexpr int kVec = kVecWidth<T>, kStride = 32 * kVec, kHalo = kTaps - 1;
  using Stream = TimeStream<T, false>;
  __shared__ __align__(16) typename Stream::Shared rings[kTimeWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  TimeItem next(a, block_index() * kTimeWarps + warp);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (!next.exists(a)) return;
  Stream stream(a, rings[warp], next);
  LaneTap<T> tap;
  tap.load(a, next.channel, lane);
#pragma unroll 1
  while (next.exists(a)) {
    const ConvWeights<kTaps, 1> w = tap.template all<kTaps>(a, lane);
    T* y = next.at<T>(a, a.y) + lane * kVec;
    const int steps = next.steps(a);
    next.next(a);
    if (next.exists(a)) tap.load(a, next.channel, lane);
#pragma unroll 1
    for (int t = -kStride; t < steps; t += kStride) {
      stream.advance(a);
      if (t < 0) continue;  // the row before
      float window[kHalo + kVec], out[kVec];
      stream.template inputs<kHalo>(window);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float sum = time_sum(a, w, window, e);
        out[e] = a.silu ? sum * sigmoid(sum) : sum;
      }
      store_part(y, out, steps - t - lane * kVec);
      y += kStride;
    }
  }
}

// Stores the last W - 1 inputs of each sequence. In the update they replace the state they were in.
template <class T>
__global__ void __launch_bounds__(kConvThreads) conv_final(const __grid_constant__ ConvArgs a) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  int64_t channel;
  Segment g{};
  if (!find_sequence(a, &channel, &g)) return;
  // Entries go in ascending order, so that in place one is read before it is written.
  for (int k = 0; k < a.width - 1; ++k) {
    static_cast<T*>(a.final.data)[g.sequence * a.final.sequence + k * a.final.place +
                                  channel * a.final.channel] =
        from_float<T>(conv_input<T>(a, g, g.end - g.begin + k - (a.width - 1), channel));
  }
}

// Takes one step: outputs first, then the state, which may be where it was.
template <class T>
__global__ void __launch_bounds__(kConvThreads) conv_update(const __grid_constant__ ConvArgs a) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t index = block_index() * kConvThreads + threadIdx.x;
  if (index >= a.channels * a.segments.sequences.count) return;
  const int64_t channel = index % a.channels, s = index / a.channels;
  Segment g{};
  g.sequence = g.batch = s;
  const ConvWeights<kMaxConvWidth, 1> w = channel_weights<T, kMaxConvWidth, 1>(a, channel);
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
  const int64_t multiprocessors = device_properties(device).multiprocessors;
  if (layout.time) {
    const int64_t blocks = cut_time(a, sizeof(T), multiprocessors * kTimeBlocks<kTaps>, kTimeWarps);
    return launch_early(conv_time<T, kTaps>, "conv_time", {grid_of(blocks), 32 * kTimeWarps},
                        stream, a);
  }
  constexpr int kVec = kForwardVec<T, kTaps>;
  const bool vectors = layout.channels;
  a.tiles = ceil_div(a.channels, 32 * (vectors ? kVec : 1));
  a.segments = best_runs(a.segments.sequences, {a.tiles, kWarps, multiprocessors * kChannelBlocks,
                                                kWaves<T>, 16, 8, 2 * kTaps});
  a.per_row = a.segments.per_row();
  const dim3 grid = grid_of(a.tiles * ceil_div(a.segments.slots, kWarps));
  const auto kernel = vectors ? conv_channels<T, kVec, kTaps> : conv_channels<T, 1, kMaxConvWidth>;
  return launch_early(kernel, "conv_channels", {grid, kConvThreads}, stream, a);
}

template <class T>
Status run_forward(const CausalConv1dFwd& op, const Exec& exec) {
  const cudaStream_t stream = stream_of(exec);
  ConvArgs a = conv_args(op);
  if (a.channels == 0) return {};
  a.y = step_view(op.y);
  a.initial = conv_state(op.initial_state);
  a.segments.sequences = sequences_of(op.x, op.cu_seqlens);
  if (op.y && op.y.numel() > 0) {
    const bool usual = a.width == kUsualTaps, packed = op.cu_seqlens.defined;
    const int vector = usual ? kForwardVec<T, kUsualTaps> : kForwardVec<T, kMaxConvWidth>;
    const ConvLayout layout = layout_of({&op.x, &op.y}, packed, vector);
    const auto launch = usual ? launch_forward<T, kUsualTaps> : launch_forward<T, kMaxConvWidth>;
    FK_RETURN_IF_ERROR(launch(a, layout, op.x.device_id, stream));
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
