// The forward of lstm and gru with a launch for each step (steps.cuh). With a projection, and where
// a GRU resets before the product, a step takes two launches.
#include "ops/rnn/cuda/cells.cuh"
#include "ops/rnn/cuda/prepare.h"
#include "ops/rnn/cuda/steps.cuh"
#include "ops/rnn/cuda/steps.h"

namespace fk::cuda {

namespace rnn {
namespace {

struct StepArguments {
  ForwardViews views;
  int64_t units;
  float* state;      // (S, H)
  void* outputs[2];  // (S, R) of T: h after an even number of steps, after an odd one
  void* inner;       // (S, H) of T: what the second launch of a step multiplies
  float* update;     // (S, H): z, for the second launch of a GRU
  bool projected;

  template <class T>
  __device__ __forceinline__ T* output(int64_t steps_done, int64_t s) const {
    return static_cast<T*>(outputs[steps_done % 2]) + s * views.p.outputs;
  }
};

// The position of step t, or -1 behind the sequence's end.
__device__ __forceinline__ int64_t position_at(const Problem& p, const SequenceSteps& steps,
                                               int64_t t) {
  return t < steps.end - steps.begin ? p.position(steps, t) : -1;
}

template <class T>
__device__ __forceinline__ void put_output(const StepArguments& a, const SequenceSteps& steps,
                                           int64_t position, int64_t t, int64_t s, int64_t u,
                                           float h) {
  a.views.y.store<T>(steps.batch, position, u, h);
  a.output<T>(t + 1, s)[u] = from_float<T>(h);
  if (t + 1 == steps.end - steps.begin) a.views.h.store<T>(s, u, h);
}

struct OutputAsSource {
  template <class T>
  __device__ __forceinline__ static const T* source(const StepArguments& a,
                                                    const SequenceSteps& steps, int64_t t,
                                                    int64_t s) {
    return t < steps.end - steps.begin ? a.output<T>(t, s) : nullptr;
  }
};
struct InnerAsSource {
  template <class T>
  __device__ __forceinline__ static const T* source(const StepArguments& a,
                                                    const SequenceSteps& steps, int64_t t,
                                                    int64_t s) {
    return t < steps.end - steps.begin ? static_cast<const T*>(a.inner) + s * a.views.p.hidden
                                       : nullptr;
  }
};

// All gates of a unit at once.
template <class Cell>
struct CellStep : OutputAsSource {
  static constexpr int kRows = Cell::kGates;

  template <class T>
  __device__ __forceinline__ static void finish(const StepArguments& a, const SequenceSteps& steps,
                                                int64_t t, int64_t s, int64_t u,
                                                const float (&products)[kRows]) {
    const ForwardViews& v = a.views;
    const int64_t H = v.p.hidden, position = position_at(v.p, steps, t);
    if (position < 0) return;
    const float* const from_x = v.from_x + (steps.batch * v.p.length + position) * kRows * H + u;
    float x[kRows], h[kRows], kept[kKeptGates];
#pragma unroll
    for (int g = 0; g < kRows; ++g) {
      x[g] = from_x[g * H];
      h[g] = products[g] + v.b_hh.load<T>(0, g * H + u);
    }
    float* const state = a.state + s * H + u;
    float carried = *state;
    const float output = Cell::template forward<T>(x, h, &carried, kept);
    *state = carried;
#pragma unroll
    for (int g = 0; g < kKeptGates; ++g) {
      v.gates.store<T>(steps.batch, position, g * H + u, kept[g]);
    }
    v.cells.store<T>(steps.batch, position, u, carried);
    if (Cell::kHasCell && t + 1 == steps.end - steps.begin) v.c.store<T>(s, u, carried);
    if (a.projected) {
      static_cast<T*>(a.inner)[s * H + u] = from_float<T>(output);
    } else {
      put_output<T>(a, steps, position, t, s, u, output);
    }
  }
};

struct ProjectionStep : InnerAsSource {
  static constexpr int kRows = 1;

  template <class T>
  __device__ __forceinline__ static void finish(const StepArguments& a, const SequenceSteps& steps,
                                                int64_t t, int64_t s, int64_t u,
                                                const float (&products)[1]) {
    const int64_t position = position_at(a.views.p, steps, t);
    if (position >= 0) put_output<T>(a, steps, position, t, s, u, products[0]);
  }
};

// r and z, and what the product with W_hn takes.
struct ResetStep : OutputAsSource {
  static constexpr int kRows = 2;

  template <class T>
  __device__ __forceinline__ static void finish(const StepArguments& a, const SequenceSteps& steps,
                                                int64_t t, int64_t s, int64_t u,
                                                const float (&products)[2]) {
    const ForwardViews& v = a.views;
    const int64_t H = v.p.hidden, position = position_at(v.p, steps, t);
    if (position < 0) return;
    const float* const from_x = v.from_x + (steps.batch * v.p.length + position) * 3 * H + u;
    float gates[2];
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      gates[g] = sigmoid_for<T>(from_x[g * H] + products[g] + v.b_hh.load<T>(0, g * H + u));
      v.gates.store<T>(steps.batch, position, g * H + u, gates[g]);
    }
    const float met = gates[0] * a.state[s * H + u];
    v.gates.store<T>(steps.batch, position, 3 * H + u, met);
    a.update[s * H + u] = gates[1];
    static_cast<T*>(a.inner)[s * H + u] = from_float<T>(met);
  }
};

// n, and h.
struct NewStep : InnerAsSource {
  static constexpr int kRows = 1;

  template <class T>
  __device__ __forceinline__ static void finish(const StepArguments& a, const SequenceSteps& steps,
                                                int64_t t, int64_t s, int64_t u,
                                                const float (&products)[1]) {
    const ForwardViews& v = a.views;
    const int64_t H = v.p.hidden, position = position_at(v.p, steps, t);
    if (position < 0) return;
    const float from_x = v.from_x[(steps.batch * v.p.length + position) * 3 * H + 2 * H + u];
    const float n = tanh_for<T>(from_x + products[0] + v.b_hh.load<T>(0, 2 * H + u));
    float* const state = a.state + s * H + u;
    const float h = GruCell::mix(a.update[s * H + u], *state, n);
    *state = h;
    v.gates.store<T>(steps.batch, position, 2 * H + u, n);
    put_output<T>(a, steps, position, t, s, u, h);
  }
};

// The parts of a call's workspace.
struct ForwardParts {
  WorkspaceParts parts;
  float *from_x, *state, *partials;
  void *outputs[2], *weight = nullptr, *inner = nullptr, *projection = nullptr;
  float* update = nullptr;

  ForwardParts(const Problem& p, const Tensor& w_hh, const Tensor& w_hr, bool resets_before,
               const Tensor& x, void* memory)
      : parts(memory) {
    const DType dtype = x.dtype;
    const int64_t count = p.sequences.count, size = size_of(dtype);
    from_x = parts.take(p.positions() * p.gates * p.hidden);
    state = parts.take(count * p.hidden);
    partials = parts.take(partial_floats_of(p, dtype, x.device_id, false));
    for (void*& output : outputs) output = parts.take<char>(count * p.outputs * size);
    if (!serves(w_hh, dtype)) weight = parts.take<char>(w_hh.numel() * size);
    if (w_hr || resets_before) inner = parts.take<char>(count * p.hidden * size);
    if (w_hr && !serves(w_hr, dtype)) projection = parts.take<char>(w_hr.numel() * size);
    if (resets_before) update = parts.take(count * p.hidden);
  }
};
ForwardParts parts_of(const LstmFwd& a, void* memory) {
  return {fk::rnn::problem_of(a), a.w_hh, a.w_hr, false, a.x, memory};
}
ForwardParts parts_of(const GruFwd& a, void* memory) {
  return {fk::rnn::problem_of(a), a.w_hh, {}, !a.reset_after, a.x, memory};
}

// The matrix itself where it serves, else its copy, which this makes.
Status dense_rows(const Tensor& weight, DType dtype, void* copy, const void** rows, int64_t* pitch,
                  cudaStream_t stream) {
  *rows = copy == nullptr ? weight.data : copy;
  *pitch = copy == nullptr ? weight.stride(0) : weight.size(1);
  return copy == nullptr ? Status() : copy_weight(weight, dtype, copy, false, stream);
}

// What all forwards do ahead of the first step.
template <class Args>
Status begin(const Args& a, const ForwardParts& parts, const Tensor& c0, const Tensor& last_c,
             StepArguments* steps, const void** weight, int64_t* pitch, cudaStream_t stream) {
  *steps = {};
  steps->views = forward_views(a, parts.from_x);
  const Problem& p = steps->views.p;
  steps->units = p.hidden;
  steps->state = parts.state;
  for (int i = 0; i < 2; ++i) steps->outputs[i] = parts.outputs[i];
  steps->inner = parts.inner;
  steps->update = parts.update;
  FK_RETURN_IF_ERROR(begin_states(
      p, {a.h0, c0, a.h, last_c, p.gates == 4, a.x.dtype, parts.outputs[0], parts.state}, stream));
  FK_RETURN_IF_ERROR(dense_rows(a.w_hh, a.x.dtype, parts.weight, weight, pitch, stream));
  return multiply_inputs(a.x, a.w_ih, a.b_ih, parts.from_x, parts.partials, stream);
}

template <class T>
UnitRows<T> unit_rows(const void* data, int64_t pitch, int64_t between, int64_t depth) {
  return {static_cast<const T*>(data), pitch, between, depth,
          rows_in_vectors<T>(data, depth, pitch)};
}

// How many steps the longest sequence may have: packed ones are known on the device only. Without
// units there may still be outputs of a projection.
int64_t most_steps(const Problem& p) {
  return (p.hidden == 0 && p.outputs == 0) || p.sequences.count == 0 ? 0 : p.length;
}

}  // namespace
}  // namespace rnn

size_t workspace(const LstmFwd& a) { return rnn::parts_of(a, nullptr).parts.bytes(); }
size_t workspace(const GruFwd& a) { return rnn::parts_of(a, nullptr).parts.bytes(); }

Status run(const LstmFwd& a, const Exec& exec) {
  using namespace rnn;
  const cudaStream_t stream = stream_of(exec);
  const ForwardParts parts = parts_of(a, exec.workspace());
  StepArguments steps;
  const void *weight, *projection = nullptr;
  int64_t pitch, projection_pitch = 0;
  FK_RETURN_IF_ERROR(begin(a, parts, a.c0, a.c, &steps, &weight, &pitch, stream));
  const Problem& p = steps.views.p;
  steps.projected = static_cast<bool>(a.w_hr);
  if (a.w_hr) {
    FK_RETURN_IF_ERROR(
        dense_rows(a.w_hr, a.x.dtype, parts.projection, &projection, &projection_pitch, stream));
  }
  StepArguments project = steps;
  project.units = p.outputs;
  return with_type(a.x.dtype, [&](auto t) -> Status {
    using T = decltype(t);
    const UnitRows<T> rows = unit_rows<T>(weight, pitch, p.hidden * pitch, p.outputs);
    const UnitRows<T> rows_out = unit_rows<T>(projection, projection_pitch, 0, p.hidden);
    for (int64_t i = 0; i < most_steps(p); ++i) {
      if (p.hidden > 0) {
        FK_RETURN_IF_ERROR((launch_step<CellStep<LstmCell>>(steps, rows, "lstm_step", i, stream)));
      }
      if (a.w_hr && p.outputs > 0) {
        FK_RETURN_IF_ERROR(
            (launch_step<ProjectionStep>(project, rows_out, "lstm_projection", i, stream)));
      }
    }
    return {};
  });
}

Status run(const GruFwd& a, const Exec& exec) {
  using namespace rnn;
  const cudaStream_t stream = stream_of(exec);
  const ForwardParts parts = parts_of(a, exec.workspace());
  StepArguments steps;
  const void* weight;
  int64_t pitch;
  FK_RETURN_IF_ERROR(begin(a, parts, {}, {}, &steps, &weight, &pitch, stream));
  const Problem& p = steps.views.p;
  return with_type(a.x.dtype, [&](auto t) -> Status {
    using T = decltype(t);
    const int64_t H = p.hidden;
    const UnitRows<T> rows = unit_rows<T>(weight, pitch, H * pitch, H);
    UnitRows<T> rows_of_n = rows;
    rows_of_n.data += 2 * H * pitch;
    for (int64_t i = 0; i < most_steps(p); ++i) {
      if (a.reset_after) {
        FK_RETURN_IF_ERROR((launch_step<CellStep<GruCell>>(steps, rows, "gru_step", i, stream)));
        continue;
      }
      FK_RETURN_IF_ERROR((launch_step<ResetStep>(steps, rows, "gru_reset", i, stream)));
      FK_RETURN_IF_ERROR((launch_step<NewStep>(steps, rows_of_n, "gru_new", i, stream)));
    }
    return {};
  });
}

}  // namespace fk::cuda
