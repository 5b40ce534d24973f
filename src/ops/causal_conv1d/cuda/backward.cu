// This file computes the gradients of causal_conv1d on CUDA.
//
// Floor: reads of x and dy, a write of dx.
//
// With s_t = bias + sum_k w_k x_{t-(W-1)+k} and ds_t = dy_t act'(s_t), computed again from x,
// dx_p = sum_k w_k ds_{p+(W-1)-k} and dw_k = sum_t ds_t x_{t-(W-1)+k}. The same two walks as the
// forward's: a warp along time with the last W - 1 inputs in registers, and with what ds gives to
// the last W - 1 gradients; or a warp along a channel whose time is contiguous, from its end to its
// beginning. x and dy come through rings in shared memory: in registers, enough of them ahead would
// leave none for the sums. Sums over time leave as one part per block, or per item, which a second
// kernel adds in a fixed order.
#include <algorithm>

#include "ops/causal_conv1d/cuda/backward_time.cuh"
#include "ops/causal_conv1d/cuda/rows.cuh"

namespace fk::cuda {
namespace {

constexpr int kBackWarps = 4, kBackThreads = 32 * kBackWarps;
// This many blocks share a multiprocessor.
template <int kTaps>
constexpr int kBackBlocks = kTaps == kUsualTaps ? 4 : 3;
// A thread's channels take 8 bytes, or 4 where more taps need its registers.
template <int kTaps>
constexpr int kBackBytes = kTaps == kUsualTaps ? 8 : 4;
template <class T, int kTaps>
constexpr int kBackVec = kBackBytes<kTaps> / static_cast<int>(sizeof(T));

// Returns gradient i of those of state and inputs together, as far as it comes from the final
// state.
template <class T>
__device__ __forceinline__ float from_final(const ConvArgs& a, const Segment& g, int64_t i,
                                            int64_t channel) {
  const int64_t k = i - (g.end - g.begin);
  if (k < 0 || k >= a.width - 1 || a.dfinal.data == nullptr) return 0;
  return to_float(static_cast<const T*>(
      a.dfinal
          .data)[g.sequence * a.dfinal.sequence + k * a.dfinal.place + channel * a.dfinal.channel]);
}

template <class T, int kVec, int kTaps>
__global__ void __launch_bounds__(kBackThreads, kBackBlocks<kTaps>)
    conv_back_channels(const __grid_constant__ ConvArgs a) {
  constexpr int kRows = kTaps, kWide = 32 * kVec;
  __shared__ float shared[kTaps + 1][kBackWarps][kWide];
  using Ring = RowRing<T, kVec, kRows>;
  __shared__ __align__(16) typename Ring::Shared rings[kBackWarps][2];
  const RowPlace<kVec, kBackWarps> place(a);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  float dw[kTaps][kVec] = {}, dbias[kVec] = {};
  Segment g{};
  if (place.slot < a.segments.slots) g = segment_at(a, place.slot);
  const bool active = place.channel < a.channels;
  if (g.exists) {
    // Rows are counted from the segment's first. One that does not open its sequence begins
    // earlier, for the values of ds before it.
    const int start = g.opens ? 0 : -kRows;
    const int steps = static_cast<int>(g.last - g.first);
    const T* x = static_cast<const T*>(a.x.data) + g.batch * a.x.batch +
                 (g.first + start) * a.x.step + place.channel * a.x.channel;
    const T* dy = static_cast<const T*>(a.y.data) + g.batch * a.y.batch +
                  (g.first + start) * a.y.step + place.channel * a.y.channel;
    T* dx = static_cast<T*>(a.dx.data) + g.batch * a.dx.batch +
            (g.first + start - (kTaps - 1)) * a.dx.step + place.channel * a.dx.channel;
    const int64_t channels = a.channels - place.first;
    Ring x_ring(rings[place.warp][0], x, a.x.step, place.lane, channels, steps - start);
    Ring dy_ring(rings[place.warp][1], dy, a.y.step, place.lane, channels, steps - start);
    const auto copy = [&] {
      x_ring.copy();
      dy_ring.copy();
      copies_commit();
    };
#pragma unroll 1
    for (int i = 0; i < Ring::kStages - 1; ++i) copy();
    // These loads are issued together with those of the taps.
    RawVec<T, kVec> before[kTaps - 1];
    const int64_t channel = active ? place.channel : a.channels - kVec;
    inputs_before(a, g, g.first + start - g.begin, channel, before);
    const ConvWeights<kTaps, kVec> w = channel_weights<T, kTaps, kVec>(a, channel);
    RowWindow<kTaps, kVec> window(before);
    // Once ds_t is there, the gradient of step t - (kTaps - 1) is whole.
    const int own = a.dx.data == nullptr || !active ? INT_MAX : g.opens ? kTaps - 1 : 0;
    // later[k] is what the values of ds so far give to the step kTaps - 1 - k before the next one.
    float later[kTaps][kVec] = {};
    const auto give = [&](float value, int c) {
      const float whole =
          has_tap<kTaps>(a, 0) ? fmaf(w.tap[0][c], value, later[1][c]) : later[1][c];
#pragma unroll
      for (int k = 1; k < kTaps; ++k) {
        const float before = k + 1 < kTaps ? later[(k + 1) % kTaps][c] : 0.f;
        later[k][c] = has_tap<kTaps>(a, k) ? fmaf(w.tap[k][c], value, before) : before;
      }
      return whole;
    };
    // Takes row t, with its input at `r` in the window.
    const auto row = [&](int r, int t, const float(&value)[kVec]) {
      float out[kVec];
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        const float slope = silu_slope(window.sum(a, w, r, c));
        const float ds = a.silu ? value[c] * slope : value[c];
        dbias[c] += ds;
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
          if (has_tap<kTaps>(a, k)) dw[k][c] = fmaf(ds, window.at(r, k, c), dw[k][c]);
        }
        out[c] = give(ds, c);
      }
      if (t >= own) store_streaming(dx, pack<T, kVec>(out));
      dx += a.dx.step;
    };
    // Waits for the next rows, and asks for others in the place of the last ones.
    const auto turn = [&] {
      copies_wait<Ring::kStages - 2>();
      __syncwarp();
      copy();
    };
    int t = start;
#pragma unroll 1
    for (int end = start < 0 ? 0 : steps;; end = steps) {
#pragma unroll 1
      for (; t + kRows <= end; t += kRows) {
        turn();
        RawVec<T, kVec> in[kRows], grad[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          in[r].load(x_ring.at(r));
          grad[r].load(dy_ring.at(r));
        }
        ++x_ring.used;
        ++dy_ring.used;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float value[kVec];
          in[r].unpack_to(window.rows[r]);
          grad[r].unpack_to(value);
          row(r, t + r, value);
        }
      }
      if (end == steps) break;
        // The rows so far do not belong to the segment itself.
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        dbias[c] = 0;
#pragma unroll
        for (int k = 0; k < kTaps; ++k) dw[k][c] = 0;
      }
    }
    turn();
#pragma unroll 1
    for (int r = 0; t < steps; ++t, ++r) {
      RawVec<T, kVec> in, grad;
      float value[kVec];
      in.load(x_ring.at(r));
      grad.load(dy_ring.at(r));
      in.unpack_to(window.rows[0]);
      grad.unpack_to(value);
      row(0, t, value);
      window.turn();
    }
    // The last gradients of a sequence follow its last step.
    if (g.closes && own < INT_MAX) {
#pragma unroll 1
      for (; t < steps + kTaps - 1; ++t) {
        float out[kVec];
#pragma unroll
        for (int c = 0; c < kVec; ++c) {
          const int64_t i = g.last - g.begin + (t - steps) - missing_taps<kTaps>(a);
          out[c] = give(0.f, c) + from_final<T>(a, g, i, place.channel + c);
        }
        if (t >= own) store_streaming(dx, pack<T, kVec>(out));
        dx += a.dx.step;
      }
    }
    copies_wait<0>();
  }
  // The warps of a block have the same channels.
#pragma unroll
  for (int c = 0; c < kVec; ++c) {
    const int column = place.lane * kVec + c;
#pragma unroll
    for (int k = 0; k < kTaps; ++k) shared[k][place.warp][column] = dw[k][c];
    shared[kTaps][place.warp][column] = dbias[c];
  }
  __syncthreads();
  float* part = a.partial + place.strip * (a.width + 1) * a.channels + place.first;
#pragma unroll 1
  for (int i = threadIdx.x; i < (a.width + 1) * kWide; i += kBackThreads) {
    const int k = i / kWide, c = i % kWide;
    if (place.first + c >= a.channels) continue;
    float sum = 0;
#pragma unroll
    for (int r = 0; r < kBackWarps; ++r) sum += shared[k + missing_taps<kTaps>(a)][r][c];
    part[k * a.channels + c] = sum;
  }
}

// Computes ds of one step from the inputs alone.
template <class T>
__device__ __forceinline__ float slope_at(const ConvArgs& a, const Segment& g, int64_t i,
                                          int64_t channel) {
  if (i >= g.end - g.begin) return 0;
  const float dy = to_float(static_cast<const T*>(
      a.y.data)[g.batch * a.y.batch + (g.begin + i) * a.y.step + channel * a.y.channel]);
  if (!a.silu) return dy;
  float sum =
      a.bias == nullptr ? 0.f : load_either<T>(a.bias, a.bias_is_float, channel * a.bias_channel);
#pragma unroll 1
  for (int k = 0; k < a.width; ++k) {
    sum = fmaf(
        load_either<T>(a.weight, a.weight_is_float, channel * a.weight_channel + k * a.weight_tap),
        conv_input<T>(a, g, i - (a.width - 1) + k, channel), sum);
  }
  return dy * silu_slope(sum);
}

// Computes the gradient of the state before each sequence. It comes from few steps, so what they
// share with dx is computed again, in a kernel that only calls with such a state launch.
template <class T>
__global__ void __launch_bounds__(kConvThreads)
    conv_back_state(const __grid_constant__ ConvArgs a) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  int64_t channel;
  Segment g{};
  if (!find_sequence(a, &channel, &g)) return;
#pragma unroll 1
  for (int i = 0; i < a.width - 1; ++i) {
    float sum = from_final<T>(a, g, i, channel);
#pragma unroll 1
    for (int k = 0; k <= i; ++k) {
      sum = fmaf(load_either<T>(a.weight, a.weight_is_float,
                                channel * a.weight_channel + k * a.weight_tap),
                 slope_at<T>(a, g, i - k, channel), sum);
    }
    static_cast<T*>(a.dinitial.data)[g.sequence * a.dinitial.sequence + i * a.dinitial.place +
                                     channel * a.dinitial.channel] = from_float<T>(sum);
  }
}

struct ConvSums {
  const float* partial;
  int64_t parts, channels;
  int width;
  void *dweight, *dbias;  // NULL: not wanted
  int64_t weight_channel, weight_tap, bias_channel;
  bool weight_is_float, bias_is_float;
};

// A block has so few threads that it waits on the multiprocessors beside the kernel whose parts it
// adds.
constexpr int kSumThreads = 128;

template <class T>
__global__ void __launch_bounds__(kSumThreads) conv_sums(const __grid_constant__ ConvSums a) {
  constexpr int kColumns = 32, kRows = kSumThreads / kColumns;
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
  const int64_t tap = divide_likely_small(i, a.channels), channel = i - tap * a.channels;
  if (tap < a.width) {
    if (a.dweight == nullptr) return;
    store_either<T>(a.dweight, a.weight_is_float, channel * a.weight_channel + tap * a.weight_tap,
                    sum);
  } else if (a.dbias != nullptr) {
    store_either<T>(a.dbias, a.bias_is_float, channel * a.bias_channel, sum);
  }
}

// Says how a call is spread over blocks, with `parts` of the sums over time.
struct BackwardPlan {
  ConvLayout layout;
  int64_t blocks = 0, parts = 0;

  // Cuts the sequences of a.segments.
  BackwardPlan(const CausalConv1dBwd& op, const ConvLayout& layout, ConvArgs& a) : layout(layout) {
    const bool usual = a.width == kUsualTaps;
    const int taps = usual ? kUsualTaps : kMaxConvWidth;
    const int64_t multiprocessors = device_properties(op.x.device_id).multiprocessors;
    const int size = static_cast<int>(size_of(op.x.dtype));
    if (layout.time) {
      blocks = cut_time(a, size, multiprocessors * back_time_blocks(size, taps), kBackTimeWarps);
      parts = a.segments.slots;
      return;
    }
    const int bytes = usual ? kBackBytes<kUsualTaps> : kBackBytes<kMaxConvWidth>;
    const int64_t at_once =
        multiprocessors * (usual ? kBackBlocks<kUsualTaps> : kBackBlocks<kMaxConvWidth>);
    a.tiles = ceil_div(a.channels, 32 * (layout.channels ? bytes / size : 1));
    a.segments = best_runs(a.segments.sequences,
                           {a.tiles, kBackWarps, at_once, size == 4 ? 2 : 1, 16, 8, 4 * taps});
    a.per_row = a.segments.per_row();
    parts = ceil_div(a.segments.slots, kBackWarps);
    blocks = a.tiles * parts;
  }
};

// Returns the layout. In both directions vectors have 16 bytes, which is what a lane copies at
// once.
ConvLayout layout_of_call(const CausalConv1dBwd& op) {
  const std::initializer_list<const Tensor*> with = {&op.x, &op.dy, &op.dx},
                                             without = {&op.x, &op.dy};
  return layout_of(op.dx ? with : without, op.cu_seqlens.defined,
                   16 / static_cast<int>(size_of(op.x.dtype)));
}

template <class T, int kTaps>
Status launch_backward(const ConvArgs& a, const BackwardPlan& plan, cudaStream_t stream) {
  const dim3 grid = grid_of(plan.blocks);
  if (plan.layout.time) {
    return launch_early(conv_back_time<T, kTaps>, "conv_back_time", {grid, 32 * kBackTimeWarps},
                        stream, a);
  }
  const auto kernel = plan.layout.channels ? conv_back_channels<T, kBackVec<T, kTaps>, kTaps>
                                           : conv_back_channels<T, 1, kMaxConvWidth>;
  return launch_early(kernel, "conv_back_channels", {grid, kBackThreads}, stream, a);
}

template <class T>
Status run_backward(const CausalConv1dBwd& op, const Exec& exec) {
  const cudaStream_t stream = stream_of(exec);
  ConvArgs a = conv_args(op);
  if (a.channels == 0) return {};
  a.y = step_view(op.dy);
  a.dx = step_view(op.dx);
  a.initial = conv_state(op.initial_state);
  a.dinitial = conv_state(op.dinitial_state);
  a.dfinal = conv_state(op.dfinal_state);
  a.segments.sequences = sequences_of(op.x, op.cu_seqlens);
  a.partial = exec.workspace<float>();
  const BackwardPlan plan(op, layout_of_call(op), a);
  if (a.segments.slots > 0) {
    const auto launch =
        a.width == kUsualTaps ? launch_backward<T, kUsualTaps> : launch_backward<T, kMaxConvWidth>;
    FK_RETURN_IF_ERROR(launch(a, plan, stream));
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
  FK_RETURN_IF_ERROR(launch_early(conv_sums<T>, "conv_sums", {grid, kSumThreads}, stream, s));
  if (!op.dinitial_state || op.dinitial_state.numel() == 0) return {};
  const dim3 states = grid_of(ceil_div(a.channels * a.segments.sequences.count, kConvThreads));
  return launch_early(conv_back_state<T>, "conv_back_state", {states, kConvThreads}, stream, a);
}

}  // namespace

size_t workspace(const CausalConv1dBwd& a) {
  if (a.x.size(2) == 0) return 0;
  // It is not known here where the tensors lie, so this is enough for every layout.
  int64_t parts = 0;
  for (const ConvLayout layout : {ConvLayout{true, false}, {false, true}, {false, false}}) {
    ConvArgs args = conv_args(a);
    args.segments.sequences = sequences_of(a.x, a.cu_seqlens);
    parts = std::max(parts, BackwardPlan(a, layout, args).parts);
  }
  return static_cast<size_t>(parts * (a.weight.size(1) + 1) * a.x.size(2)) * sizeof(float);
}

Status run(const CausalConv1dBwd& a, const Exec& exec) {
  return for_dtype(a.x.dtype,
                   [&](auto tag) { return run_backward<typename decltype(tag)::type>(a, exec); });
}

}  // namespace fk::cuda
