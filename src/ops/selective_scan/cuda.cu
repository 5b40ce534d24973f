// The selective scan on CUDA: which kernels a call takes, forward and backward, and the small ones
// between them. cuda_forward.cuh has the scan, cuda_backward.cuh its gradients.
#include <algorithm>

#include "core/workspace.h"
#include "cuda/row_walk.cuh"
#include "ops/selective_scan/cuda_backward.cuh"

namespace fk::cuda {

namespace {

constexpr int kJoinThreads = 128;

template <class Tile>
constexpr ScanBlock block_of_tile() {
  return {Tile::kChannels, Tile::kStates, Tile::kT, Tile::kSharedBytes};
}

// Turns what each segment makes of nothing (its last state and the sum of dt) into what enters
// each, in place: in the order of time, or in reverse for adjoints. `ends` is what enters the
// first.
template <class T>
__global__ void __launch_bounds__(kJoinThreads)
    join_segments(const __grid_constant__ ScanArgs a, bool reverse, StateView ends) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t index = block_index() * kJoinThreads + threadIdx.x;
  const int64_t per_sequence = a.channels * a.states;
  if (index >= a.segments.sequences.count * per_sequence) return;
  const int64_t s = index / per_sequence, c = index % per_sequence / a.states;
  const int64_t n = index % a.states;
  const float A = kLog2E * a.A[c * a.A_channel + n * a.A_state];
  float h = 0;
  if (ends.data != nullptr) {
    h = load_either<T>(ends.data, ends.is_float,
                       s * ends.sequence + c * ends.channel + n * ends.state);
  }
  const int64_t first = a.segments.first_slot(s), count = a.segments.count_of(s);
#pragma unroll 8
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = (first + (reverse ? count - 1 - i : i)) * a.channels + c;
    float* state = a.segment_states + row * a.states + n;
    const float made = *state, decay = exp2_fast(A * a.segment_sums[row]);
    *state = h;
    h = fmaf(decay, h, made);
  }
}

// dB and dC: the sums of the parts of all blocks of channels.
template <class T>
__global__ void __launch_bounds__(kJoinThreads)
    sum_state_parts(const float* parts, int64_t blocks, int64_t rows_per_batch, int64_t batch,
                    int groups, int states, scan::GroupView dB, scan::GroupView dC) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t index = block_index() * kJoinThreads + threadIdx.x;
  const int64_t all = batch * rows_per_batch * groups * 2 * states;
  if (index >= all) return;
  float sum = 0;
#pragma unroll 8
  for (int64_t i = 0; i < blocks; ++i) sum += parts[i * all + index];
  const int64_t value = index % (2 * states), row = index / (2 * states);
  const int64_t n = value % states, group = row % groups, l = row / groups % rows_per_batch;
  const auto store = [&](const scan::GroupView& to) {
    if (to.data == nullptr) return;
    static_cast<T*>(to.data)[row / groups / rows_per_batch * to.batch + l * to.step +
                             group * to.group + n * to.state] = from_float<T>(sum);
  };
  if (value < states) {
    store(dB);
  } else {
    store(dC);
  }
}

// Sums over slots of rows [slot][outer][inner], to a tensor of those two dims.
template <class T>
__global__ void __launch_bounds__(kJoinThreads)
    sum_slots(const float* parts, int64_t slots, int64_t slot_stride, int64_t outer, int64_t inner,
              void* out, bool is_float, int64_t outer_stride, int64_t inner_stride) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t index = block_index() * kJoinThreads + threadIdx.x;
  if (index >= outer * inner) return;
  float sum = 0;
#pragma unroll 8
  for (int64_t i = 0; i < slots; ++i) sum += parts[i * slot_stride + index];
  store_either<T>(out, is_float, index / inner * outer_stride + index % inner * inner_stride, sum);
}

// Which shape, and how long the segments are.
struct ScanPlan {
  ScanShape shape;
  bool cut;  // sequences are cut into segments
  Segments segments;
};

// Segments of at least kLeastSteps, about as many as fill the device once: two passes of the
// exponentials pay if each then takes a third of the time or less.
constexpr int64_t kLeastSteps = 64;

Segments cut(const scan::Sequences& sequences, int64_t blocks, int64_t room, int64_t multiple,
             int64_t worth) {
  const int64_t pieces = blocks == 0 ? 1 : room / blocks;
  const int64_t steps =
      ceil_div(ceil_div(std::max<int64_t>(sequences.length, 1), std::max<int64_t>(pieces, 1)),
               multiple) *
      multiple;
  if (pieces < worth || sequences.length < worth * kLeastSteps) {
    return segments_of(sequences, std::max<int64_t>(sequences.length, 1));
  }
  return segments_of(sequences, std::max(steps, kLeastSteps));
}

ScanPlan plan_of(const scan::Problem& p, int64_t algorithm, int device) {
  const int64_t multiprocessors = device_properties(device).multiprocessors;
  const int64_t few_blocks = ceil_div(p.channels_per_group(), block_of(ScanShape::kFew).channels) *
                             p.groups * p.sequences.count;
  ScanPlan plan;
  plan.shape = p.states > block_of(ScanShape::kMany).states ? ScanShape::kWide : ScanShape::kMany;
  const ScanBlock block = block_of(plan.shape);
  const int64_t blocks =
      ceil_div(p.channels_per_group(), block.channels) * p.groups * p.sequences.count;
  plan.segments = segments_of(p.sequences, std::max<int64_t>(p.length, 1));
  if (algorithm == kChunkedScan) {
    plan.segments = segments_of(p.sequences, kLeastSteps);
  } else if (algorithm != kSequentialScan) {
    plan.segments = cut(p.sequences, blocks, 2 * multiprocessors, kLeastSteps, 3);
  }
  plan.cut = plan.segments.steps < p.length;
  if (plan.cut) plan.shape = ScanShape::kMany;
  if (!plan.cut && plan.shape == ScanShape::kMany && few_blocks <= 2 * multiprocessors) {
    plan.shape = ScanShape::kFew;
  }
  return plan;
}

struct ScanMemory {
  float *segment_states, *segment_sums, *sums;
  ScanMemory(WorkspaceParts& parts, const scan::Problem& p, const ScanPlan& plan) {
    segment_states = plan.cut ? parts.take(plan.segments.slots * p.channels * p.states) : nullptr;
    segment_sums = plan.cut ? parts.take(plan.segments.slots * p.channels) : nullptr;
    const bool several = p.states > block_of(plan.shape).states;
    sums = several ? parts.take(p.batch * p.length * p.channels) : nullptr;
  }
};

bool named(int64_t algorithm) {
  return algorithm == kBlellochScan || algorithm == kHillisSteeleScan || algorithm == kCumsumScan;
}

StateView state_view(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.dtype == DType::kFloat32, t.stride(0), t.stride(1), t.stride(2)};
}

ChannelView channel_view(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.dtype == DType::kFloat32, t.stride(0)};
}

// Stride 1 along time, or pairs of channels that can be read at once, in all of them.
void set_layout(std::initializer_list<const Tensor*> tensors, ScanArgs& a) {
  bool time = true, pairs = true, units = true;
  for (const Tensor* t : tensors) {
    if (!*t || t->numel() == 0) continue;
    const int64_t unit = 8 / size_of(t->dtype);
    const auto whole = [&](int dim, int64_t width) {
      return t->size(dim) == 1 || t->stride(dim) % width == 0;
    };
    const auto aligned = [&](int64_t width) {
      return reinterpret_cast<uintptr_t>(t->data) % (width * size_of(t->dtype)) == 0 &&
             whole(0, width);
    };
    time = time && t->stride(1) == 1;
    units = units && aligned(unit) && whole(2, unit);
    pairs = pairs && t->stride(2) == 1 && aligned(2) && whole(1, 2);
  }
  pairs = pairs && (a.groups == 1 || a.channels / a.groups % 2 == 0);  // where blocks begin
  a.time_contiguous = time && !pairs;
  a.vectors = a.time_contiguous ? units : pairs;
}

template <class Op>
ScanArgs scan_args(const Op& op, const scan::Problem& p) {
  ScanArgs a{};
  a.u = scan::view_of(op.u);
  a.delta = scan::view_of(op.delta);
  a.z = scan::view_of(op.z);
  a.B = scan::group_view_of(op.B);
  a.C = scan::group_view_of(op.C);
  a.A = op.A.template ptr<const float>();
  a.A_channel = op.A.stride(0);
  a.A_state = op.A.stride(1);
  a.D = channel_view(op.D);
  a.bias = channel_view(op.delta_bias);
  a.initial_state = state_view(op.initial_state);
  a.batch = p.batch;
  a.length = p.length;
  a.channels = p.channels;
  a.states = static_cast<int>(p.states);
  a.groups = static_cast<int>(p.groups);
  a.softplus = op.delta_softplus;
  return a;
}

// The scan of `a`, all states, as planned.
template <class T>
Status scan_all(ScanArgs a, const ScanPlan& plan, const ScanMemory& memory, cudaStream_t stream) {
  a.segments = plan.segments;
  const int step = block_of(plan.shape).states;
  if (plan.cut) {
    a.segment_states = memory.segment_states;
    a.segment_sums = memory.segment_sums;
    for (a.first_state = 0; a.first_state < a.states; a.first_state += step) {
      FK_RETURN_IF_ERROR(launch_scan<T>(ScanPass::kStates, plan.shape, a, stream));
    }
    const int64_t threads = a.segments.sequences.count * a.channels * a.states;
    FK_RETURN_IF_ERROR(launch_early(join_segments<T>, "join_segments",
                                    {grid_of(ceil_div(threads, kJoinThreads)), kJoinThreads},
                                    stream, a, false, a.initial_state));
  }
  for (a.first_state = 0; a.first_state < std::max(a.states, 1); a.first_state += step) {
    a.sums_before = a.first_state > 0 ? memory.sums : nullptr;
    a.sums_after = a.first_state + step < a.states ? memory.sums : nullptr;
    FK_RETURN_IF_ERROR(launch_scan<T>(ScanPass::kOutputs, plan.shape, a, stream));
  }
  return {};
}

template <class T>
Status run_forward(const SelectiveScanFwd& op, const Exec& exec) {
  const cudaStream_t stream = stream_of(exec);
  const scan::Problem p = scan::problem_of(op);
  if (p.channels == 0 || p.sequences.count == 0) return {};
  ScanArgs a = scan_args(op, p);
  a.y = scan::view_of(op.y);
  if (op.y && op.y.numel() == 0) a.y = {};
  a.last_state = state_view(op.last_state);
  set_layout({&op.u, &op.delta, &op.z, &op.y}, a);
  const bool keeps = op.checkpoints && op.checkpoints.numel() > 0;
  KeptStates kept;
  if (keeps) {
    kept = {op.checkpoints.ptr<float>(), p.spacing, op.checkpoints.size(1)};
    std::copy_n(op.checkpoints.strides, 4, kept.strides);
  }
  a.segments.sequences = p.sequences;
  if (named(op.algorithm)) {
    a.kept = kept;
    return launch_named<T>(op.algorithm, a, stream);
  }
  const ScanPlan plan = plan_of(p, op.algorithm, op.u.device_id);
  WorkspaceParts parts(exec.workspace());
  const ScanMemory memory(parts, p, plan);
  // Between two tiles states can be kept for nothing.
  const bool between = keeps && !p.sequences.packed &&
                       p.spacing % block_of(plan.shape).steps == 0 && op.checkpoints.contiguous();
  if (between) a.kept = kept;
  FK_RETURN_IF_ERROR(scan_all<T>(a, plan, memory, stream));
  if (!keeps || between) return {};
  ScanArgs only_states = a;
  only_states.kept = kept;
  only_states.segments.sequences = p.sequences;
  only_states.y = {};
  only_states.last_state = {};
  return launch_named<T>(kHillisSteeleScan, only_states, stream);
}

struct ReversePlan {
  ReverseShape shape;
  bool cut;
  Segments segments;
  bool recompute;  // the states between chunks, because there are none, or others
  Segments chunks;
  ScanPlan forward;  // how
  int64_t parts;     // blocks of channels
};

ReversePlan plan_of(const SelectiveScanBwd& op, const scan::Problem& p) {
  const DeviceProperties& device = device_properties(op.u.device_id);
  ReversePlan plan;
  plan.shape =
      p.states > block_of(ReverseShape::kMany).states ? ReverseShape::kWide : ReverseShape::kMany;
  if (block_of(plan.shape).shared_bytes > device.shared_bytes_per_block) {
    plan.shape = ReverseShape::kSmall;
  }
  const ScanBlock block = block_of(plan.shape);
  const int64_t blocks_per_group = ceil_div(p.channels_per_group(), block.channels);
  plan.parts = blocks_per_group;
  plan.segments = cut(p.sequences, blocks_per_group * p.groups * p.sequences.count,
                      device.multiprocessors, block.steps, 2);
  plan.cut = plan.segments.steps < p.length;
  plan.chunks = segments_of(p.sequences, block.steps);
  plan.recompute = p.sequences.packed || p.spacing != block.steps || !op.checkpoints ||
                   !op.checkpoints.contiguous();
  plan.forward = plan_of(p, kAutoScan, op.u.device_id);
  // States are kept between tiles.
  if (block.steps % block_of(plan.forward.shape).steps != 0) plan.forward.shape = ScanShape::kMany;
  return plan;
}

struct ReverseMemory {
  float *kept, *segment_states, *segment_sums, *sums;
  float *partial_states, *partial_A, *partial_channels;
  ScanMemory forward;

  ReverseMemory(WorkspaceParts& parts, const scan::Problem& p, const ReversePlan& plan)
      : kept(plan.recompute ? parts.take(plan.chunks.slots * p.states * p.channels) : nullptr),
        segment_states(plan.cut ? parts.take(plan.segments.slots * p.channels * p.states)
                                : nullptr),
        segment_sums(plan.cut ? parts.take(plan.segments.slots * p.channels) : nullptr),
        sums(p.states > block_of(plan.shape).states
                 ? parts.take(3 * p.batch * p.length * p.channels)
                 : nullptr),
        partial_states(parts.take(plan.parts * p.batch * p.length * p.groups * 2 * p.states)),
        partial_A(parts.take(plan.segments.slots * p.channels * p.states)),
        partial_channels(parts.take(plan.segments.slots * 2 * p.channels)),
        forward(parts, p, plan.recompute ? plan.forward : ScanPlan{plan.forward.shape, false, {}}) {
  }
};

template <class T>
Status sum_to(const float* parts, const Segments& segments, int64_t slot_stride, int64_t outer,
              int64_t inner, const Tensor& out, cudaStream_t stream) {
  if (!out || out.numel() == 0) return {};
  return launch_early(
      sum_slots<T>, "sum_slots", {grid_of(ceil_div(outer * inner, kJoinThreads)), kJoinThreads},
      stream, parts, segments.slots, slot_stride, outer, inner, out.data,
      out.dtype == DType::kFloat32, out.ndim == 2 ? out.stride(0) : int64_t{0}, out.stride(-1));
}

// dB and dC, zeros where there are no parts.
template <class T>
Status sum_states(const SelectiveScanBwd& op, const scan::Problem& p, const float* parts,
                  int64_t count, cudaStream_t stream) {
  const int64_t values = p.batch * p.length * p.groups * 2 * p.states;
  if ((!op.dB && !op.dC) || values == 0) return {};
  return launch_early(sum_state_parts<T>, "sum_state_parts",
                      {grid_of(ceil_div(values, kJoinThreads)), kJoinThreads}, stream, parts, count,
                      p.length, p.batch, static_cast<int>(p.groups), static_cast<int>(p.states),
                      scan::group_view_of(op.dB), scan::group_view_of(op.dC));
}

template <class T>
Status run_backward(const SelectiveScanBwd& op, const Exec& exec) {
  const cudaStream_t stream = stream_of(exec);
  const scan::Problem p = scan::problem_of(op);
  if (p.channels == 0) return sum_states<T>(op, p, nullptr, 0, stream);
  const ReversePlan plan = plan_of(op, p);
  WorkspaceParts parts(exec.workspace());
  const ReverseMemory memory(parts, p, plan);

  ScanArgs a = scan_args(op, p);
  a.dy = scan::view_of(op.dy);
  set_layout({&op.u, &op.delta, &op.z, &op.dy, &op.du, &op.ddelta, &op.dz}, a);
  const ScanBlock block = block_of(plan.shape);
  if (!plan.recompute) {
    a.kept = {op.checkpoints.ptr<float>(), p.spacing, op.checkpoints.size(1)};
  } else if (plan.chunks.slots > 0) {
    a.kept = {memory.kept, block.steps, -1};
    FK_RETURN_IF_ERROR(scan_all<T>(a, plan.forward, memory.forward, stream));
  }
  a.segments = plan.segments;
  const StateView dlast = state_view(op.dlast_state);
  if (plan.cut) {
    a.segment_states = memory.segment_states;
    a.segment_sums = memory.segment_sums;
    const int step = block_of(ScanShape::kMany).states;
    for (a.first_state = 0; a.first_state < a.states; a.first_state += step) {
      FK_RETURN_IF_ERROR(launch_scan<T>(ScanPass::kAdjoints, ScanShape::kMany, a, stream));
    }
    const int64_t threads = p.sequences.count * a.channels * a.states;
    FK_RETURN_IF_ERROR(launch_early(join_segments<T>, "join_segments",
                                    {grid_of(ceil_div(threads, kJoinThreads)), kJoinThreads},
                                    stream, a, true, dlast));
  }
  ReverseArgs r{};
  r.scan = a;
  r.du = scan::view_of(op.du);
  r.ddelta = scan::view_of(op.ddelta);
  r.dz = scan::view_of(op.dz);
  r.dlast_state = dlast;
  r.dinitial_state = state_view(op.dinitial_state);
  r.partial_states = memory.partial_states;
  r.partial_A = memory.partial_A;
  r.partial_channels = memory.partial_channels;
  r.sums_stride = p.batch * p.length * p.channels;
  int& first = r.scan.first_state;
  for (first = 0; first < std::max(a.states, 1); first += block.states) {
    r.scan.sums_before = first > 0 ? memory.sums : nullptr;
    r.scan.sums_after = first + block.states < a.states ? memory.sums : nullptr;
    FK_RETURN_IF_ERROR(launch_reverse<T>(plan.shape, r, stream));
  }
  FK_RETURN_IF_ERROR(sum_states<T>(op, p, memory.partial_states, plan.parts, stream));
  FK_RETURN_IF_ERROR(sum_to<T>(memory.partial_A, plan.segments, p.channels * p.states, p.channels,
                               p.states, op.dA, stream));
  FK_RETURN_IF_ERROR(sum_to<T>(memory.partial_channels, plan.segments, 2 * p.channels, 1,
                               p.channels, op.dD, stream));
  return sum_to<T>(memory.partial_channels + p.channels, plan.segments, 2 * p.channels, 1,
                   p.channels, op.ddelta_bias, stream);
}

}  // namespace

ScanBlock block_of(ScanShape shape) {
  switch (shape) {
    case ScanShape::kFew:
      return block_of_tile<FewTile>();
    case ScanShape::kWide:
      return block_of_tile<WideTile>();
    default:
      return block_of_tile<ManyTile>();
  }
}

ScanBlock block_of(ReverseShape shape) {
  switch (shape) {
    case ReverseShape::kWide:
      return block_of_tile<WideReverseTile>();
    case ReverseShape::kSmall:
      return block_of_tile<SmallReverseTile>();
    default:
      return block_of_tile<ManyReverseTile>();
  }
}

size_t workspace(const SelectiveScanFwd& op) {
  const scan::Problem p = scan::problem_of(op);
  if (p.channels == 0 || p.sequences.count == 0 || named(op.algorithm)) return 0;
  WorkspaceParts parts;
  ScanMemory(parts, p, plan_of(p, op.algorithm, op.u.device_id));
  return parts.bytes();
}

size_t workspace(const SelectiveScanBwd& op) {
  const scan::Problem p = scan::problem_of(op);
  if (p.channels == 0) return 0;
  WorkspaceParts parts;
  ReverseMemory(parts, p, plan_of(op, p));
  return parts.bytes();
}

Status run(const SelectiveScanFwd& a, const Exec& exec) {
  return for_dtype(a.u.dtype,
                   [&](auto tag) { return run_forward<typename decltype(tag)::type>(a, exec); });
}

Status run(const SelectiveScanBwd& a, const Exec& exec) {
  return for_dtype(a.u.dtype,
                   [&](auto tag) { return run_backward<typename decltype(tag)::type>(a, exec); });
}

}  // namespace fk::cuda
