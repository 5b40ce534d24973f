// The selective scan's backward on CUDA: how a call is cut into blocks, and which kernels it takes.
#include <algorithm>

#include "core/workspace.h"
#include "ops/selective_scan/cuda/backward_sums.cuh"

namespace fk::cuda {

namespace {

struct BackwardPlan {
  bool in_short_kernel;
  int warps;
  int64_t blocks_per_group;
  bool cut;  // sequences are cut into segments
  Segments segments, carry_segments, chunks;
  bool recompute;  // the states between chunks, because there are none, or others
};

constexpr int64_t kShortSteps = 160;

BackwardPlan plan_of(const SelectiveScanBwd& op, const scan::Problem& p) {
  const DeviceProperties& device = device_properties(op.u.device_id);
  const bool several = p.states > kGroupStates;
  const auto blocks_per_group = [&](int warps) {
    return ceil_div(p.channels_per_group(), int64_t{warps} * kWarpChannels);
  };
  const auto blocks = [&](int warps) {
    return blocks_per_group(warps) * p.groups * p.sequences.count;
  };
  constexpr int kStaticBytes = 1400;  // of a block: static variables, and what the system keeps
  BackwardPlan plan{};
  plan.chunks = segments_of(p.sequences, kChunk);
  // Sequences fit shared memory and fill the GPU a few times at most.
  constexpr int64_t kMostTimes = 3;
  const int64_t bytes = short_shared_bytes(std::min(p.length, kShortSteps)) + kStaticBytes;
  plan.in_short_kernel =
      !several && p.length <= kShortSteps && bytes <= device.shared_bytes_per_block &&
      blocks(1) <=
          kMostTimes * (device.shared_bytes_per_multiprocessor / bytes) * device.multiprocessors;
  if (plan.in_short_kernel) {
    plan.warps = 1;
    plan.blocks_per_group = blocks_per_group(1);
    plan.segments = segments_of(p.sequences, std::max<int64_t>(p.length, 1));
    plan.segments.slots = p.sequences.count;
    return plan;
  }
  // A multiprocessor gets as many warps as shared memory and registers have room for, in large
  // blocks.
  const auto resident_blocks = [&](int warps) {
    const int64_t bytes = backward_shared_bytes(warps, several) + kStaticBytes;
    if (bytes > device.shared_bytes_per_block) return int64_t{0};
    return std::min<int64_t>(device.shared_bytes_per_multiprocessor / bytes,
                             2 * kMostWarps / warps);
  };
  plan.warps = 1;
  for (int warps = 2; warps <= kMostWarps; warps *= 2) {
    if (warps * resident_blocks(warps) >= plan.warps * resident_blocks(plan.warps)) {
      plan.warps = warps;
    }
  }
  const int64_t at_once = std::max<int64_t>(resident_blocks(plan.warps), 1);
  // Sequences are few and short here: a warp a multiprocessor is faster than several on some.
  constexpr int64_t kShort = 4 * kChunk;
  while (p.length < kShort && plan.warps > 1 && blocks(plan.warps / 2) <= device.multiprocessors) {
    plan.warps /= 2;
  }
  plan.blocks_per_group = blocks_per_group(plan.warps);
  // There is one wave of blocks; those of carry_states, which are half as long, fit twice as often.
  const int64_t room = at_once * device.multiprocessors / std::max<int64_t>(blocks(plan.warps), 1);
  int64_t steps = std::max<int64_t>(p.length, 1), carry_steps = steps;
  if (room > 1 && p.length >= kShort) {
    const auto in_chunks = [](int64_t x, int64_t parts) {
      return ceil_div(ceil_div(x, parts), int64_t{kChunk}) * kChunk;
    };
    steps = carry_steps = in_chunks(p.length, room);
    constexpr int64_t kLeast = 5 * kChunk;
    if (steps >= kLeast) {
      carry_steps = in_chunks(steps, 2);
      steps = 2 * carry_steps;
    }
  }
  plan.segments = segments_of(p.sequences, steps);
  plan.carry_segments = segments_of(p.sequences, carry_steps);
  plan.cut = steps < p.length;
  plan.recompute =
      p.sequences.packed || p.spacing != kChunk || !op.checkpoints || !op.checkpoints.contiguous();
  return plan;
}

int state_groups(const scan::Problem& p) {
  return static_cast<int>(ceil_div(p.states, int64_t{kGroupStates}));
}

struct BackwardMemory {
  float *kept, *carry_adjoints, *carry_sums, *carried;
  float *parts_of_states, *parts_of_A, *parts_of_channels;

  BackwardMemory(WorkspaceParts& parts, const scan::Problem& p, const BackwardPlan& plan) {
    const int64_t slots = plan.segments.slots, groups = state_groups(p);
    const int64_t blocks = plan.blocks_per_group * p.groups;
    const int64_t of_slots = slots * p.channels * p.states;
    const int64_t carry_rows = plan.carry_segments.slots * p.channels;
    kept = plan.recompute ? parts.take(plan.chunks.slots * p.states * p.channels) : nullptr;
    carry_adjoints = plan.cut ? parts.take(carry_rows * p.states) : nullptr;
    carry_sums = plan.cut ? parts.take(carry_rows) : nullptr;
    carried = plan.in_short_kernel || groups == 1
                  ? nullptr
                  : parts.take(blocks * slots * groups * 4 * 32 * plan.warps);
    parts_of_states = parts.take(blocks * plan.chunks.slots * groups * kChunkParts);
    parts_of_A = parts.take(of_slots);
    parts_of_channels = parts.take(slots * 2 * p.channels);
  }
};

// Sets whether all of them can be read and written by pairs of channels, and whether their steps
// lie closer than their channels.
void set_layout(std::initializer_list<const Tensor*> tensors, BackwardArgs& a) {
  a.pairs = a.channels / a.groups % 2 == 0;
  bool time = true;
  for (const Tensor* t : tensors) {
    if (!*t || t->numel() == 0) continue;
    const auto even = [&](int dim) { return t->size(dim) == 1 || t->stride(dim) % 2 == 0; };
    a.pairs = a.pairs && t->stride(2) == 1 && even(0) && even(1) &&
              reinterpret_cast<uintptr_t>(t->data) % (2 * size_of(t->dtype)) == 0;
    time = time && t->stride(1) == 1;
  }
  a.time_contiguous = time && !a.pairs;
}

template <class T>
Status run_backward(const SelectiveScanBwd& op, const Exec& exec) {
  const cudaStream_t stream = stream_of(exec);
  const scan::Problem p = scan::problem_of(op);
  const BackwardPlan plan = plan_of(op, p);
  WorkspaceParts memory_parts(exec.workspace());
  const BackwardMemory memory(memory_parts, p, plan);

  BackwardArgs a{};
  set_inputs(op, p, &a);
  a.dy = step_view(op.dy);
  a.du = step_view(op.du);
  a.ddelta = step_view(op.ddelta);
  a.dz = step_view(op.dz);
  a.dlast_state = state_view(op.dlast_state);
  a.dinitial_state = state_view(op.dinitial_state);
  a.state_groups = state_groups(p);
  a.warps = plan.warps;
  a.blocks_per_group = static_cast<int>(plan.blocks_per_group);
  set_layout({&op.u, &op.delta, &op.z, &op.dy, &op.du, &op.ddelta, &op.dz}, a);
  a.chunks = plan.chunks;
  a.carry_adjoints = memory.carry_adjoints;
  a.carry_sums = memory.carry_sums;
  a.carried = memory.carried;
  a.parts_of_states = memory.parts_of_states;
  a.parts_of_A = memory.parts_of_A;
  a.parts_of_channels = memory.parts_of_channels;
  if (plan.recompute) {
    a.kept = {memory.kept, kChunk, -1};
    a.segments = segments_of(p.sequences, std::max<int64_t>(p.length, 1));
    if (a.blocks() > 0) FK_RETURN_IF_ERROR(launch_carry<T>(false, a, stream));
  } else if (!plan.in_short_kernel) {
    a.kept = {op.checkpoints.ptr<float>(), kChunk, op.checkpoints.size(1)};
  }
  a.carry_segments = plan.carry_segments;
  if (plan.cut) {
    a.segments = plan.carry_segments;
    if (a.blocks() > 0) FK_RETURN_IF_ERROR(launch_carry<T>(true, a, stream));
  }
  a.segments = plan.segments;
  if (a.blocks() > 0 && plan.in_short_kernel) {
    FK_RETURN_IF_ERROR(launch_short<T>(p.length, a, stream));
  } else if (a.blocks() > 0) {
    FK_RETURN_IF_ERROR(launch_backward<T>(a, stream));
  }

  BackwardSums s{};
  s.args = a;
  s.dB = scan::group_view_of(op.dB);
  s.dC = scan::group_view_of(op.dC);
  s.dA = op.dA ? op.dA.ptr<float>() : nullptr;
  if (op.dA) {
    s.dA_channel = op.dA.stride(0);
    s.dA_state = op.dA.stride(1);
  }
  s.dD = channel_view(op.dD);
  s.dbias = channel_view(op.ddelta_bias);
  s.state_parts = p.groups * a.chunks.slots * a.state_groups * (kChunkParts / 4);
  s.of_A = p.channels * p.states;
  const int64_t room = int64_t{1024} * device_properties(op.u.device_id).multiprocessors;
  s.split = BackwardSums::split_of(s.state_parts, a.blocks_per_group, room);
  s.time_split = BackwardSums::split_of(s.of_A, a.segments.slots, room);
  if (s.blocks() == 0) return {};
  return launch_early(sum_parts, "sum_parts", {grid_of(s.blocks()), kSumThreads}, stream, s);
}

}  // namespace

size_t workspace(const SelectiveScanBwd& op) {
  const scan::Problem p = scan::problem_of(op);
  WorkspaceParts parts;
  BackwardMemory(parts, p, plan_of(op, p));
  return parts.bytes();
}

Status run(const SelectiveScanBwd& a, const Exec& exec) {
  return for_dtype(a.u.dtype,
                   [&](auto tag) { return run_backward<typename decltype(tag)::type>(a, exec); });
}

}  // namespace fk::cuda
