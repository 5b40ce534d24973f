// The selective scan's forward on CUDA: which kernels a call takes, and the small one between them.
// cuda/forward.cuh has the scan, cuda/backward.cu its gradients.
#include <algorithm>

#include "core/workspace.h"
#include "cuda/row_partition.cuh"
#include "ops/selective_scan/cuda/forward.cuh"
#include "ops/selective_scan/cuda/forward_chunks.cuh"
#include "ops/selective_scan/cuda/forward_few.cuh"
#include "ops/selective_scan/cuda/forward_short.cuh"

namespace fk::cuda {

namespace {

constexpr int kJoinThreads = 128;

// Turns what each segment makes of a state of 0 (its last state and the sum of dt) into the state
// that enters each, in place.
__global__ void __launch_bounds__(kJoinThreads) join_segments(const __grid_constant__ ScanArgs a) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t index = block_index() * kJoinThreads + threadIdx.x;
  const int64_t per_sequence = a.channels * a.states;
  if (index >= a.segments.sequences.count * per_sequence) return;
  const int64_t s = index / per_sequence, c = index % per_sequence / a.states;
  const int64_t n = index % a.states;
  const float A = a.A[c * a.A_channel + n * a.A_state];
  float h = 0;
  if (a.initial_state.data != nullptr) {
    const StateView& v = a.initial_state;
    h = load_as(v.is_float ? DType::kFloat32 : a.u.dtype, v.data,
                s * v.sequence + c * v.channel + n * v.state);
  }
  const int64_t first = a.segments.first_slot(s), count = a.segments.count_of(s);
#pragma unroll 8
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = (first + i) * a.channels + c;
    float* state = a.segment_states + row * a.states + n;
    const float made = *state, decay = power<float>(a.segment_sums[row], A);
    *state = h;
    h = fmaf(decay, h, made);
  }
}

// Says which shape of kernel a call takes, and how long the segments are.
struct ScanPlan {
  ScanShape shape;
  int width;  // channels of a block
  bool cut;   // sequences are cut into segments
  Segments segments;
};

constexpr int64_t kLeastSteps = 64;

// Returns segments of at least kLeastSteps, about as many as fill the device once, if those are
// `worth` pieces of a sequence or more: each is scanned twice.
Segments cut(const Sequences& sequences, int64_t blocks, int64_t room, int64_t multiple,
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

// Plans a call. kMany takes the fewest instructions and needs two blocks a multiprocessor; with
// fewer channels kFew spreads them over the device, as thinly as it takes.
ScanPlan plan_of(const SelectiveScanFwd& op, const scan::Problem& p) {
  const DeviceProperties& properties = device_properties(op.u.device_id);
  const int64_t multiprocessors = properties.multiprocessors;
  const int64_t sharing = p.channels_per_group();       // channels with the same B and C
  const int64_t groups = p.groups * p.sequences.count;  // of those
  const ForwardBlock many = block_of(ScanShape::kMany);
  const bool fits = serves<FewTile>(properties.code) &&
                    block_of(ScanShape::kFew).shared_bytes <= properties.shared_bytes_per_block;
  ScanPlan plan;
  plan.shape = fits ? ScanShape::kFew : ScanShape::kSmall;
  plan.segments = segments_of(p.sequences, std::max<int64_t>(p.length, 1));
  if (op.algorithm == kChunkedScan) {
    plan.segments = segments_of(p.sequences, kLeastSteps);
  } else if (op.algorithm != kSequentialScan) {
    plan.segments = cut(p.sequences, ceil_div(sharing, block_of(plan.shape).channels) * groups,
                        multiprocessors, kLeastSteps, 4);
  }
  plan.cut = plan.segments.steps < p.length;
  if (plan.cut) {
    // The shape stays as it is.
  } else if (p.states > many.states) {
    plan.shape = ScanShape::kWide;
  } else if (ceil_div(sharing, many.channels) * groups * 2 >= 3 * multiprocessors) {
    plan.shape = ScanShape::kMany;
  } else if (p.length <= ShortTile::kT && op.algorithm != kSequentialScan) {
    plan.shape = ScanShape::kShort;
  }
  const ForwardBlock block = block_of(plan.shape);
  plan.width = block.channels;
  if (!plan.cut && plan.shape != ScanShape::kMany) {
    const int64_t share = std::min(ceil_div(sharing * groups, multiprocessors), sharing);
    plan.width = static_cast<int>(std::min<int64_t>(
        ceil_div(std::max<int64_t>(share, 1), block.warp_channels) * block.warp_channels,
        block.channels));
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

// Says which dimension of u, delta, z and y is contiguous, and whether their channels, their steps
// and the states of B and C can be read in units of several elements.
struct Units {
  bool in_time = true, channels = true, steps = true, states = true;

  Units(const ScanArgs& a, int count) {
    const auto whole = [&](int64_t stride, int64_t size) {
      return size <= 1 || stride % count == 0;
    };
    const auto begins = [&](const auto& v) {
      return reinterpret_cast<uintptr_t>(v.data) % (count * size_of(v.dtype)) == 0 &&
             whole(v.batch, a.batch);
    };
    channels = whole(a.channels / a.groups, a.groups);
    for (const StepView* v : {&a.u, &a.delta, &a.z, &a.y}) {
      if (v->data == nullptr) continue;
      channels = channels && begins(*v) && v->channel == 1 && whole(v->step, a.length);
      in_time = in_time && (v->step == 1 || a.length <= 1);
      steps = steps && begins(*v) && whole(v->channel, a.channels);
    }
    steps = steps && in_time;
    states = a.states % count == 0;
    for (const scan::GroupView* v : {&a.B, &a.C}) {
      states = states && begins(*v) && v->state == 1 && whole(v->step, a.length) &&
               whole(v->group, a.groups);
    }
  }
};

// Sets which layout the tensors have.
void set_quads(ScanArgs& a) {
  const auto [in_time, channels, steps, states] = Units(a, 4);
  a.time_contiguous = in_time && !channels;
  // Sums over states between launches are read and written one by one.
  a.quads = (channels || steps) && a.sums_before == nullptr && a.sums_after == nullptr;
  a.state_quads = states;
}

// Returns whether kChunks takes the call, instead of what is planned. It is made of the copy engine
// and Hopper's barriers.
bool in_chunks(const SelectiveScanFwd& op, const scan::Problem& p, const ScanPlan& plan,
               const ScanArgs& a) {
  const DeviceProperties& properties = device_properties(op.u.device_id);
  const int64_t multiprocessors = properties.multiprocessors;
  if (size_of(op.u.dtype) != 2 || properties.code < 90 || op.algorithm != kAutoScan ||
      a.y.data == nullptr || ChunkTile::kSharedBytes > properties.shared_bytes_per_block ||
      p.sequences.packed || p.length <= ChunkTile::kT || p.length >= 1 << 30 ||
      p.channels >= 1 << 30 || p.states != ChunkTile::kStates || p.groups * p.batch > 65535 ||
      plan.shape == ScanShape::kMany) {
    return false;
  }
  const Units units(a, 8);
  if (!units.states || !(a.time_contiguous ? units.steps : units.channels)) return false;
  const auto repeats = [](int64_t stride, int64_t size) { return size > 1 && stride <= 0; };
  for (const StepView* v : {&a.u, &a.delta, &a.z, &a.y}) {
    if (v->data == nullptr) continue;
    if (repeats(v->step, a.length) || repeats(v->channel, a.channels) ||
        repeats(v->batch, a.batch)) {
      return false;  // the copy engine does not take those
    }
  }
  const int64_t blocks = ceil_div(p.channels_per_group(), ChunkTile::kChannels) * p.groups *
                         p.batch * ChunkTile::kTurns;
  // Where there are few blocks, segments fill the device.
  return blocks <= multiprocessors && !(plan.cut && 3 * blocks < multiprocessors);
}

template <class Op>
ScanArgs scan_args(const Op& op, const scan::Problem& p) {
  ScanArgs a{};
  set_inputs(op, p, &a);
  a.batch = p.batch;
  a.length = p.length;
  return a;
}

// Adds the outputs that the forward writes.
ScanArgs forward_args(const SelectiveScanFwd& op, const scan::Problem& p) {
  ScanArgs a = scan_args(op, p);
  a.y = step_view(op.y);
  if (op.y && op.y.numel() == 0) a.y = {};
  a.last_state = state_view(op.last_state);
  return a;
}

// Scans `a` over all states, as planned.
template <class T>
Status scan_all(ScanArgs a, const ScanPlan& plan, const ScanMemory& memory, cudaStream_t stream) {
  a.segments = plan.segments;
  a.block_channels = plan.width;
  if (a.y.data == nullptr) a.z = {};
  set_quads(a);
  const int step = block_of(plan.shape).states;
  if (plan.cut) {
    a.segment_states = memory.segment_states;
    a.segment_sums = memory.segment_sums;
    for (a.first_state = 0; a.first_state < a.states; a.first_state += step) {
      FK_RETURN_IF_ERROR(launch_scan<T>(ScanPass::kStates, plan.shape, a, stream));
    }
    const int64_t threads = a.segments.sequences.count * a.channels * a.states;
    FK_RETURN_IF_ERROR(launch_early(join_segments, "join_segments",
                                    {grid_of(ceil_div(threads, kJoinThreads)), kJoinThreads},
                                    stream, a));
  }
  for (a.first_state = 0; a.first_state < std::max(a.states, 1); a.first_state += step) {
    a.sums_before = a.first_state > 0 ? memory.sums : nullptr;
    a.sums_after = a.first_state + step < a.states ? memory.sums : nullptr;
    set_quads(a);
    FK_RETURN_IF_ERROR(launch_scan<T>(ScanPass::kOutputs, plan.shape, a, stream));
  }
  return {};
}

// `chunks` says that the kernel of kChunks takes the call.
template <class T>
Status run_forward(const SelectiveScanFwd& op, bool chunks, const Exec& exec) {
  const cudaStream_t stream = stream_of(exec);
  const scan::Problem p = scan::problem_of(op);
  if (p.channels == 0 || p.sequences.count == 0) return {};
  ScanArgs a = forward_args(op, p);
  const bool keeps = op.checkpoints && op.checkpoints.numel() > 0;
  KeptStates kept;
  if (keeps) {
    kept = {op.checkpoints.ptr<float>(), p.spacing, op.checkpoints.size(1)};
    std::copy_n(op.checkpoints.strides, 4, kept.strides);
  }
  a.segments.sequences = p.sequences;
  if (named(op.algorithm)) {
    a.kept = kept;
    return launch_named(op.algorithm, a, stream);
  }
  ScanPlan plan = plan_of(op, p);
  WorkspaceParts parts(exec.workspace());
  const ScanMemory memory(parts, p, plan);
  set_quads(a);
  if (chunks) {
    plan = {ScanShape::kChunks, ChunkTile::kChannels, false,
            segments_of(p.sequences, std::max<int64_t>(p.length, 1))};
  }
  // States are kept on the way where the spacing allows, otherwise by a scan of their own.
  const bool between = keeps && !p.sequences.packed &&
                       p.spacing % block_of(plan.shape).between == 0 && op.checkpoints.contiguous();
  if (between) a.kept = kept;
  FK_RETURN_IF_ERROR(scan_all<T>(a, plan, memory, stream));
  if (!keeps || between) return {};
  ScanArgs only_states = a;
  only_states.kept = kept;
  only_states.segments.sequences = p.sequences;
  only_states.y = {};
  only_states.last_state = {};
  return launch_named(kHillisSteeleScan, only_states, stream);
}

}  // namespace

ForwardBlock block_of(ScanShape shape) {
  const auto of = [](auto tile) -> ForwardBlock {
    using Tile = decltype(tile);
    return {Tile::kChannels, Tile::kWarpChannels, Tile::kStates, Tile::kBetween,
            Tile::kSharedBytes};
  };
  switch (shape) {
    case ScanShape::kFew:
      return of(FewTile());
    case ScanShape::kSmall:
      return of(SmallTile());
    case ScanShape::kShort:
      return of(ShortTile());
    case ScanShape::kChunks:
      return of(ChunkTile());
    case ScanShape::kWide:
      return of(WideTile());
    default:
      return of(ManyTile());
  }
}

size_t workspace(const SelectiveScanFwd& op) {
  const scan::Problem p = scan::problem_of(op);
  if (p.channels == 0 || p.sequences.count == 0 || named(op.algorithm)) return 0;
  WorkspaceParts parts;
  ScanMemory(parts, p, plan_of(op, p));
  return parts.bytes();
}

Status run(const SelectiveScanFwd& a, const Exec& exec) {
  return for_dtype(a.u.dtype, [&](auto tag) {
    return run_forward<typename decltype(tag)::type>(a, false, exec);
  });
}

}  // namespace fk::cuda

namespace fk::cuda_sm90 {

bool accepts(const SelectiveScanFwd& op) {
  if (size_of(op.u.dtype) != 2 || op.algorithm != kAutoScan) return false;
  const scan::Problem p = scan::problem_of(op);
  if (p.channels == 0 || p.sequences.count == 0) return false;
  cuda::ScanArgs a = cuda::forward_args(op, p);
  cuda::set_quads(a);
  return cuda::in_chunks(op, p, cuda::plan_of(op, p), a);
}

Status run(const SelectiveScanFwd& a, const Exec& exec) {
  return a.u.dtype == DType::kFloat16 ? cuda::run_forward<__half>(a, true, exec)
                                      : cuda::run_forward<__nv_bfloat16>(a, true, exec);
}

}  // namespace fk::cuda_sm90
