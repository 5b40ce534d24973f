// The host's side of the kernels that keep the recurrent weights (kept.cuh): which calls they take,
// the workspace, and the launches: weights are packed, then x is multiplied, then all steps are
// walked.
#include <string>
#include <type_traits>

#include "core/refusal.h"
#include "ops/rnn/cuda/cells.cuh"
#include "ops/rnn/cuda/kept.h"
#include "ops/rnn/cuda/kept_kernels.h"
#include "ops/rnn/cuda/prepare.h"

namespace fk::cuda::rnn {
namespace {

constexpr int64_t kBlocksOfCluster = 8;  // the most that every Hopper GPU takes

template <class Args>
constexpr Direction kDirectionOf =
    std::is_same_v<Args, LstmFwd> || std::is_same_v<Args, GruFwd> ? Direction::kForward
                                                                  : Direction::kBackward;
template <class Args>
constexpr bool kIsLstm = std::is_same_v<Args, LstmFwd> || std::is_same_v<Args, LstmBwd>;

// How a call is walked.
struct Choice {
  bool found = false;
  Exchange exchange = Exchange::kShared;
  KeptPlan plan = {};
};

// Tells whether there are kernels for such a call, whatever its size; gives the reason where not.
template <class Args>
bool has_kernel(const Args& a) {
  const auto refuse = [](const char* why) {
    RefusalReason::give([&] { return std::string(why); });
    return false;
  };
  if constexpr (kIsLstm<Args>) {
    if (a.w_hr) return refuse("its kernels have no projection (w_hr)");
  } else {
    if (!a.reset_after) return refuse("its kernels reset after the product with the state only");
  }
  if (a.x.dtype == DType::kBFloat16 && device_properties(a.x.device_id).code < 80) {
    return refuse("this GPU's tensor cores do not multiply bfloat16");
  }
  return a.x.size(1) > 1 || refuse("it takes two steps or more");
}

// Gives as the reason that blocks, of which there are so many at once, do not hold the weights.
template <class Args>
void refuse_weights(const Args& a, int64_t blocks, const char* of) {
  RefusalReason::give([&] {
    const Problem p = fk::rnn::problem_of(a);
    return "the recurrent weights of " + std::to_string(p.hidden) + " units with " +
           std::to_string(p.gates) + " gates do not fit the registers of " +
           std::to_string(blocks) + " blocks, the most that " + of + " at once";
  });
}

template <class Args>
KeptCall kept_call(const Args& a, int64_t most_blocks) {
  const Problem p = fk::rnn::problem_of(a);
  return {kDirectionOf<Args>,
          a.x.dtype,
          p.hidden,
          p.gates,
          p.sequences.count,
          most_blocks,
          device_properties(a.x.device_id).shared_bytes_per_block};
}

template <class Args>
Choice shared_choice(const Args& a, int64_t most_blocks) {
  Choice c;
  c.found = has_kernel(a) && plan_kept(kept_call(a, most_blocks), Exchange::kShared, &c.plan);
  return c;
}

// A block for itself where that does, else as many as the device holds at once.
template <class Args>
Choice persistent_choice(const Args& a) {
  Choice c = shared_choice(a, 1);
  if (c.found || !has_kernel(a)) return c;
  c.exchange = Exchange::kGlobal;
  const int64_t multiprocessors = device_properties(a.x.device_id).multiprocessors;
  if (!plan_kept(kept_call(a, multiprocessors), Exchange::kGlobal, &c.plan)) {
    refuse_weights(a, multiprocessors, "this GPU's multiprocessors run");
    return c;
  }
  const void* const kernel = kept_through_global(kDirectionOf<Args>, kIsLstm<Args>, a.x.dtype);
  const int bytes = static_cast<int>(c.plan.shared_bytes(a.x.dtype, c.exchange));
  const DeviceGuard guard(
      a.x.device_id);  // another device may be current, with fewer multiprocessors
  const int64_t resident = resident_blocks(kernel, kKeptThreads, bytes);
  const int64_t needed = int64_t{c.plan.blocks} * c.plan.teams;
  c.found = resident >= needed;
  if (!c.found) {
    RefusalReason::give([&] {
      return "it needs " + std::to_string(needed) + " blocks at once, and this GPU holds " +
             std::to_string(resident);
    });
  }
  return c;
}

template <class Args>
Choice cluster_choice(const Args& a) {
  if (device_properties(a.x.device_id).code < 90) {
    RefusalReason::give([] { return std::string("this GPU has no clusters of blocks"); });
    return {};
  }
  const Choice c = shared_choice(a, kBlocksOfCluster);
  if (!c.found && has_kernel(a)) refuse_weights(a, kBlocksOfCluster, "a cluster has");
  return c;
}

// Tells whether the kernel's lanes load their vectors of W_hh as it lies. Its address counts, too,
// so a workspace is asked for before that is known.
template <class Args>
bool loads_rows(const Args& a) {
  const int64_t width = 16 / size_of(a.x.dtype);
  return kDirectionOf<Args> == Direction::kForward && serves(a.w_hh, a.x.dtype) &&
         a.w_hh.size(1) % width == 0 && a.w_hh.stride(0) % width == 0 &&
         reinterpret_cast<uintptr_t>(a.w_hh.data) % 16 == 0;
}

// The parts of a call's workspace.
struct Parts {
  WorkspaceParts parts;
  uint4* packed;
  float *partials, *from_x = nullptr, *bias_sums = nullptr;
  void* published = nullptr;
  int64_t pitch = 0;  // of the gradients' matrices
  void *of_x = nullptr, *of_h = nullptr, *h_before = nullptr;

  template <class Args>
  Parts(const Args& a, const Choice& choice, void* memory) : parts(memory) {
    const Problem p = fk::rnn::problem_of(a);
    const int64_t size = size_of(a.x.dtype), all_gates = p.gates * p.hidden;
    const bool shared = choice.exchange == Exchange::kShared;
    const int64_t depth = choice.plan.depth();
    packed = parts.take<uint4>(choice.plan.packed());
    partials = parts.take(
        partial_floats_of(p, a.x.dtype, a.x.device_id, kDirectionOf<Args> == Direction::kBackward));
    if constexpr (kDirectionOf<Args> == Direction::kForward) {
      from_x = parts.take(p.positions() * all_gates);
      if (shared) return;
      published = parts.take<char>((p.positions() + p.sequences.count) * depth * size);
    } else {
      pitch = shared ? all_gates : depth;
      of_x = parts.take<char>(p.positions() * pitch * size);
      of_h = kIsLstm<Args> ? of_x : parts.take<char>(p.positions() * pitch * size);
      h_before = parts.take<char>(p.positions() * p.hidden * size);
      if (!shared) published = of_h;
      bias_sums = parts.take(choice.plan.teams * p.hidden * kBiasSums);
    }
  }
};

Status launch_kept(const Choice& choice, Direction direction, bool lstm, DType dtype,
                   const void* arguments, cudaStream_t stream) {
  const KeptPlan& plan = choice.plan;
  const bool shared = choice.exchange == Exchange::kShared;
  LaunchShape shape{{static_cast<unsigned>(plan.teams), 1, static_cast<unsigned>(plan.blocks)},
                    {kKeptThreads}};
  shape.shared_bytes = static_cast<int>(plan.shared_bytes(dtype, choice.exchange));
  shape.clustered = shared && plan.blocks > 1;
  shape.cooperative = !shared;
  const void* const kernel = shared ? kept_through_shared(direction, lstm, dtype)
                                    : kept_through_global(direction, lstm, dtype);
  const char* const name =
      direction == Direction::kForward ? "rnn_kept_forward" : "rnn_kept_backward";
  return launch(kernel, name, shape, stream, &arguments, true);
}

template <class Args>
Status run_kept(const Args& a, const Exec& exec, const Choice& choice) {
  const cudaStream_t stream = stream_of(exec);
  const Parts parts(a, choice, exec.workspace());
  const Problem p = fk::rnn::problem_of(a);
  constexpr Direction kDirection = kDirectionOf<Args>;
  PackedWeight weight;
  weight.w_hh = a.w_hh;
  weight.dtype = a.x.dtype;
  weight.hidden = p.hidden;
  weight.gates = p.gates;
  weight.direction = kDirection;
  weight.plan = choice.plan;
  weight.packed = loads_rows(a) ? nullptr : parts.packed;
  weight.published = parts.published;
  weight.unpublished = p.positions();
  if (kDirection == Direction::kForward) {
    weight.known = a.h0;
    weight.known_rows = p.sequences.count;
  }
  FK_RETURN_IF_ERROR(pack_weight(weight, stream));
  if constexpr (kDirection == Direction::kForward) {
    FK_RETURN_IF_ERROR(multiply_inputs(a.x, a.w_ih, a.b_ih, parts.from_x, parts.partials, stream));
    const KeptForward f = {forward_views(a, parts.from_x),
                           choice.plan,
                           weight.packed,
                           a.w_hh.data,
                           a.w_hh.stride(0),
                           parts.published};
    return launch_kept(choice, kDirection, kIsLstm<Args>, a.x.dtype, &f, stream);
  } else {
    const KeptBackward b = {backward_views(a, parts.of_x, parts.of_h, parts.pitch), choice.plan,
                            parts.packed, parts.bias_sums};
    FK_RETURN_IF_ERROR(launch_kept(choice, kDirection, kIsLstm<Args>, a.x.dtype, &b, stream));
    const int64_t all_gates = p.gates * p.hidden;
    const auto matrix = [&](void* data) {
      return matrix_like(a.x, a.x.dtype, data, p.positions(), all_gates, parts.pitch);
    };
    return add_gradients(p,
                         {a.x,
                          a.w_ih,
                          a.y,
                          a.h0,
                          {},
                          matrix(parts.of_x),
                          matrix(parts.of_h),
                          a.dx,
                          a.dw_ih,
                          a.dw_hh,
                          a.db_ih,
                          a.db_hh,
                          parts.h_before,
                          parts.partials,
                          parts.bias_sums,
                          choice.plan.teams},
                         stream);
  }
}

}  // namespace
}  // namespace fk::cuda::rnn

namespace fk {

#define FK_RNN_KEPT(Args, choice)                                            \
  bool accepts(const Args& a) { return cuda::rnn::choice(a).found; }         \
  Status run(const Args& a, const Exec& exec) {                              \
    return cuda::rnn::run_kept(a, exec, cuda::rnn::choice(a));               \
  }                                                                          \
  size_t workspace(const Args& a) {                                          \
    return cuda::rnn::Parts(a, cuda::rnn::choice(a), nullptr).parts.bytes(); \
  }

namespace cuda_persistent {
FK_RNN_KEPT(LstmFwd, persistent_choice)
FK_RNN_KEPT(LstmBwd, persistent_choice)
FK_RNN_KEPT(GruFwd, persistent_choice)
FK_RNN_KEPT(GruBwd, persistent_choice)
}  // namespace cuda_persistent

namespace cuda_sm90 {
FK_RNN_KEPT(LstmFwd, cluster_choice)
FK_RNN_KEPT(LstmBwd, cluster_choice)
FK_RNN_KEPT(GruFwd, cluster_choice)
FK_RNN_KEPT(GruBwd, cluster_choice)
}  // namespace cuda_sm90

#undef FK_RNN_KEPT

}  // namespace fk
