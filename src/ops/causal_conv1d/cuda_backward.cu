// Gradients of causal_conv1d on CUDA.
//
// Floor: reads of x and dy, a write of dx.
//
// With s_t = bias + sum_k w_k x_{t-(W-1)+k} and ds_t = dy_t act'(s_t), computed again from x:
// dx_p = sum_k w_k ds_{p+(W-1)-k}, dw_k = sum_t ds_t x_{t-(W-1)+k}. The same two walks as the
// forward's: a thread along time with the last W inputs and W values of ds in registers, or a warp
// along a channel whose time is contiguous, a lane 16 bytes and what lies beside them. Sums over
// time leave as one part per segment, which a second kernel adds in a fixed order.
#include "cuda/row_walk.cuh"
#include "ops/causal_conv1d/cuda_conv.cuh"

namespace fk::cuda {
namespace {

constexpr int kBackThreads = 128;
constexpr int kBackRun = 64;
constexpr int kBackTimeRun = 2048;
constexpr int kBackVec = 4;  // channels of a thread
constexpr int kBackAhead = 4;

// Gradient i of those of state and inputs together, which may come from the final state too.
template <class T>
__device__ __noinline__ float from_final(const ConvArgs& a, const Segment& g, int64_t i,
                                         int64_t channel) {
  const int64_t k = i - (g.end - g.begin);
  if (k < 0 || a.dfinal.data == nullptr) return 0;
  return to_float(static_cast<const T*>(
      a.dfinal
          .data)[g.sequence * a.dfinal.sequence + k * a.dfinal.place + channel * a.dfinal.channel]);
}

template <class T>
__device__ __noinline__ void put_gradient(const ConvArgs& a, const Segment& g, int64_t i,
                                          int64_t channel, float value) {
  const int64_t step = i - (a.width - 1);
  if (step < 0) {
    if (a.dinitial.data == nullptr) return;
    static_cast<T*>(a.dinitial.data)[g.sequence * a.dinitial.sequence + i * a.dinitial.place +
                                     channel * a.dinitial.channel] = from_float<T>(value);
  } else if (a.dx.data != nullptr) {
    static_cast<T*>(
        a.dx.data)[g.batch * a.dx.batch + (g.begin + step) * a.dx.step + channel * a.dx.channel] =
        from_float<T>(value);
  }
}

template <class T, int kVec, int kTaps>
__global__ void __launch_bounds__(kBackThreads)
    conv_back_channels(const __grid_constant__ ConvArgs a) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t vectors = a.channels / kVec;
  const int64_t index = block_index() * kBackThreads + threadIdx.x;
  if (index >= vectors * a.segments.slots) return;
  const int64_t channel = index % vectors * kVec, slot = index / vectors;
  const Segment g = a.segments[slot];
  const int64_t first = g.first - g.begin, last = g.exists ? g.last - g.begin : first;
  const int64_t length = g.end - g.begin;
  ConvWeights<T, kTaps, kVec> w;
  w.load(a, channel);
  float window[kTaps][kVec], ds[kTaps][kVec], dw[kTaps][kVec] = {}, dbias[kVec] = {};
#pragma unroll
  for (int k = 0; k < kTaps; ++k) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      // Shifted by one before its first use.
      window[k][c] = g.exists && k > 0 && has_tap<kTaps>(a, k - 1)
                         ? conv_input<T>(a, g, first + k - kTaps, channel + c)
                         : 0.f;
      ds[k][c] = 0;
    }
  }
  const T* x = static_cast<const T*>(a.x.data) + g.batch * a.x.batch + g.begin * a.x.step +
               channel * a.x.channel;
  const T* dy = static_cast<const T*>(a.y.data) + g.batch * a.y.batch + g.begin * a.y.step +
                channel * a.y.channel;
  // Gradient t is whole when ds_t is there; a segment's own begin W - 1 steps later, but for the
  // first.
  const int64_t stop = g.exists ? last + a.width - 1 : first;
#pragma unroll 1
  for (int64_t t0 = first; t0 < stop; t0 += kBackAhead) {
    Vec<T, kVec> in[kBackAhead], grad[kBackAhead];
#pragma unroll
    for (int i = 0; i < kBackAhead; ++i) {
      if (t0 + i < stop && t0 + i < length) {
        in[i] = load<kVec>(x + (t0 + i) * a.x.step);
        grad[i] = load<kVec>(dy + (t0 + i) * a.y.step);
      }
    }
#pragma unroll
    for (int i = 0; i < kBackAhead; ++i) {
      const int64_t t = t0 + i;
      if (t >= stop) break;
      const bool exists = t < length;
      float now[kVec], dnow[kVec], out[kVec];
      unpack(in[i], now);
      unpack(grad[i], dnow);
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
#pragma unroll
        for (int k = 0; k + 1 < kTaps; ++k) window[k][c] = window[k + 1][c];
        window[kTaps - 1][c] = now[c];
        float sum = w.bias[c], value = exists ? dnow[c] : 0.f;
        if (a.silu && exists) {
#pragma unroll
          for (int k = 0; k < kTaps; ++k) {
            if (has_tap<kTaps>(a, k)) sum = fmaf(w.tap[k][c], window[k][c], sum);
          }
          value *= silu_slope(sum);
        }
        // ds_t stands at the first tap there is, ds_{t-1} at the second, ...
#pragma unroll
        for (int k = kTaps - 1; k >= 0; --k) {
          ds[k][c] = k == missing_taps<kTaps>(a) ? value : k == 0 ? 0.f : ds[k - 1][c];
        }
        if (t < last) {
          dbias[c] += value;
#pragma unroll
          for (int k = 0; k < kTaps; ++k) {
            if (has_tap<kTaps>(a, k)) dw[k][c] = fmaf(value, window[k][c], dw[k][c]);
          }
        }
        out[c] = exists ? 0.f : from_final<T>(a, g, t, channel + c);
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
          if (has_tap<kTaps>(a, k)) out[c] = fmaf(w.tap[k][c], ds[k][c], out[c]);
        }
      }
      const int64_t step = t - (a.width - 1);
      if (step < (g.opens ? 1 - a.width : first)) continue;
      if (step >= 0 && a.dx.data != nullptr) {
        store(static_cast<T*>(a.dx.data) + g.batch * a.dx.batch + (g.begin + step) * a.dx.step +
                  channel * a.dx.channel,
              pack<T, kVec>(out));
      } else if (step < 0) {
#pragma unroll
        for (int c = 0; c < kVec; ++c) put_gradient<T>(a, g, t, channel + c, out[c]);
      }
    }
  }
  float* part = a.partial + slot * (a.width + 1) * a.channels + channel;
#pragma unroll
  for (int c = 0; c < kVec; ++c) {
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      if (has_tap<kTaps>(a, k)) part[(k - missing_taps<kTaps>(a)) * a.channels + c] = dw[k][c];
    }
    part[a.width * a.channels + c] = dbias[c];
  }
}

// Inputs i - kTaps + 1 to i + kVec + kTaps - 2 matter to the kVec gradients from i on.
template <class T, int kTaps>
__global__ void __launch_bounds__(kConvThreads) conv_back_time(const __grid_constant__ ConvArgs a) {
  constexpr int kVec = kVecWidth<T>;
  constexpr int kBeside = (kTaps - 1 + kVec - 1) / kVec;  // vectors on either side
  constexpr int kSums = kVec + kTaps - 1;                 // values of ds
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t index = block_index() * (kConvThreads / 32) + threadIdx.x / 32;
  if (index >= a.channels * a.segments.slots) return;
  const int lane = threadIdx.x % 32;
  const int64_t channel = index % a.channels, slot = index / a.channels;
  const Segment g = a.segments[slot];
  ConvWeights<T, kTaps, 1> w;
  w.load(a, channel);
  const int missing = missing_taps<kTaps>(a);
  float dw[kTaps] = {}, dbias = 0;
  const auto values_at = [&](const scan::View& view, int64_t at, bool with_state,
                             float(&values)[kVec]) {
    const T* row = static_cast<const T*>(view.data) + g.batch * view.batch + channel * view.channel;
    if (at >= 0 && at + kVec <= g.end) {
      unpack(load<kVec>(row + at), values);
      return;
    }
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const bool exists = at + e < g.end && at + e >= (with_state ? 1 - a.width : 0);
      values[e] = !exists      ? 0.f
                  : with_state ? conv_input<T>(a, g, at + e, channel)
                               : to_float(row[at + e]);
    }
  };
  // A lane more than the steps need in the first segment: the state's gradients stand before step
  // 0.
  const int64_t begin = g.opens && a.dinitial.data != nullptr ? -int64_t{kBeside} * kVec : g.first;
#pragma unroll 1
  for (int64_t t = begin + lane * kVec; t < g.last; t += 32 * kVec) {
    float x[(2 * kBeside + 1) * kVec], dy[(kBeside + 1) * kVec];
#pragma unroll
    for (int v = 0; v <= 2 * kBeside; ++v) {
      float values[kVec];
      values_at(a.x, t + (v - kBeside) * kVec, true, values);
#pragma unroll
      for (int e = 0; e < kVec; ++e) x[v * kVec + e] = values[e];
    }
#pragma unroll
    for (int v = 0; v <= kBeside; ++v) {
      float values[kVec];
      values_at(a.y, t + v * kVec, false, values);
#pragma unroll
      for (int e = 0; e < kVec; ++e) dy[v * kVec + e] = values[e];
    }
    float ds[kSums];
#pragma unroll
    for (int e = 0; e < kSums; ++e) {
      ds[e] = dy[e];
      if (a.silu) {
        float sum = w.bias[0];
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
          if (has_tap<kTaps>(a, k))
            sum = fmaf(w.tap[k][0], x[kBeside * kVec + e - (kTaps - 1) + k], sum);
        }
        // Nothing beyond the sequence, even where the slope there is no number.
        ds[e] = dy[e] == 0.f ? 0.f : dy[e] * silu_slope(sum);
      }
    }
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      if (t + e >= 0 && t + e < g.last) {
        dbias += ds[e];
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
          if (has_tap<kTaps>(a, k))
            dw[k] = fmaf(ds[e], x[kBeside * kVec + e - (kTaps - 1) + k], dw[k]);
        }
      }
    }
    float out[kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      // dx_p = sum over k of w_k ds_{p + W - 1 - k}; tap k stands at k + missing.
      out[e] =
          t + e + a.width - 1 < g.end ? 0.f : from_final<T>(a, g, t + e + a.width - 1, channel);
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        if (has_tap<kTaps>(a, k)) out[e] = fmaf(w.tap[k][0], ds[e + kTaps - 1 - k], out[e]);
      }
    }
    T* dx = static_cast<T*>(a.dx.data) + g.batch * a.dx.batch + channel * a.dx.channel;
    if (a.dx.data != nullptr && t >= 0 && t + kVec <= g.end) {
      store(dx + t, pack<T, kVec>(out));
    } else {
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        if (t + e >= 1 - a.width && t + e < g.end) {
          put_gradient<T>(a, g, t + e + a.width - 1, channel, out[e]);
        }
      }
    }
  }
  dbias = warp_sum(dbias);
  float* part = a.partial + slot * (a.width + 1) * a.channels + channel;
  if (lane == 0) part[a.width * a.channels] = dbias;
#pragma unroll
  for (int k = 0; k < kTaps; ++k) {
    const float sum = warp_sum(dw[k]);
    if (lane == 0 && k >= missing) part[(k - missing) * a.channels] = sum;
  }
}

struct ConvSums {
  const float* partial;
  int64_t slots, channels;
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
    for (int64_t s = row; s < a.slots; s += kRows) sum += a.partial[s * all + i];
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

// Steps per segment: only the walk whose layout the tensors have knows.
int64_t run_of(const ConvLayout& layout) { return layout.time ? kBackTimeRun : kBackRun; }

ConvLayout layout_of_call(const CausalConv1dBwd& op) {
  const int vec = static_cast<int>(16 / size_of(op.x.dtype));
  std::initializer_list<const Tensor*> with = {&op.x, &op.dy, &op.dx}, without = {&op.x, &op.dy};
  ConvLayout layout = layout_of(op.dx ? with : without, op.cu_seqlens.defined, vec);
  layout.channels = layout_of(op.dx ? with : without, op.cu_seqlens.defined, kBackVec).channels;
  layout.time = layout.time && !layout.channels;
  return layout;
}

template <class T, int kTaps>
Status launch_backward(const ConvArgs& a, const ConvLayout& layout, cudaStream_t stream) {
  if (layout.time) {
    const dim3 grid = grid_of(ceil_div(a.channels * a.segments.slots, kConvThreads / 32));
    return launch_early(conv_back_time<T, kTaps>, "conv_back_time", {grid, kConvThreads}, stream,
                        a);
  }
  const int vec = layout.channels ? kBackVec : 1;
  const dim3 grid = grid_of(ceil_div(a.channels / vec * a.segments.slots, kBackThreads));
  const auto kernel =
      layout.channels ? conv_back_channels<T, kBackVec, kTaps> : conv_back_channels<T, 1, kTaps>;
  return launch_early(kernel, "conv_back_channels", {grid, kBackThreads}, stream, a);
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
  a.segments = segments_of(scan::sequences_of(op.x, op.cu_seqlens), run_of(layout));
  a.partial = exec.workspace<float>();
  if (a.segments.slots > 0) {
    FK_RETURN_IF_ERROR((a.width == kUsualTaps
                            ? launch_backward<T, kUsualTaps>(a, layout, stream)
                            : launch_backward<T, kMaxConvWidth>(a, layout, stream)));
  }
  ConvSums s{};
  s.partial = a.partial;
  s.slots = a.segments.slots;
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
  const Segments segments = segments_of(scan::sequences_of(a.x, a.cu_seqlens), kBackRun);
  return static_cast<size_t>(segments.slots * (a.weight.size(1) + 1) * a.x.size(2)) * sizeof(float);
}

Status run(const CausalConv1dBwd& a, const Exec& exec) {
  return for_dtype(a.x.dtype,
                   [&](auto tag) { return run_backward<typename decltype(tag)::type>(a, exec); });
}

}  // namespace fk::cuda
