// The backward of lstm and gru with a launch for each step (steps.cuh), from a sequence's last step
// to its first and once more for the gradients of its first states; then products over all steps
// (prepare.h). Launch number w takes the step w steps before a sequence's last.
#include "ops/rnn/cuda/cells.cuh"
#include "ops/rnn/cuda/prepare.h"
#include "ops/rnn/cuda/steps.cuh"
#include "ops/rnn/cuda/steps.h"

namespace fk::cuda {

namespace rnn {
namespace {

struct StepArguments {
  BackwardViews views;
  int64_t units;
  float* carried;  // (S, H)
  // With a projection: the gradient of h, (positions, R), and o tanh(c), (positions, H).
  void *dh, *inner;
};

// Says which step of a sequence launch number w is about.
struct Walk {
  int64_t steps;     // of the sequence
  int64_t t;         // -1: before the first step
  int64_t position;  // along L
  int64_t row;       // among all positions

  __device__ __forceinline__ Walk(const Problem& p, const SequenceSteps& s, int64_t w)
      : steps(s.end - s.begin), t(steps - 1 - w), position(0), row(0) {
    if (t < 0) return;
    position = p.position(s, t);
    row = s.batch * p.length + position;
  }
  __device__ __forceinline__ bool is_over() const { return t < -1; }
};

// The gradients of the gates of the step after this one, which are products with h.
struct LaterGates {
  template <class T>
  __device__ __forceinline__ static const T* source(const StepArguments& a,
                                                    const SequenceSteps& steps, int64_t w,
                                                    int64_t) {
    const Problem& p = a.views.p;
    if (w == 0 || w > steps.end - steps.begin) return nullptr;
    const Walk later(p, steps, w - 1);
    return static_cast<const T*>(a.views.of_h) + later.row * p.gates * p.hidden;
  }
};

// The gradient of h: at position `at` or, before the first step, of h0, where it ends.
template <class T>
__device__ __forceinline__ float output_gradient(const StepArguments& a, const SequenceSteps& steps,
                                                 const Walk& at, int64_t s, int64_t u, float sum) {
  if (at.t == at.steps - 1) sum += a.views.dh.load<T>(s, u);
  if (at.t < 0) {
    a.views.dh0.store<T>(s, u, sum);
    return sum;
  }
  return sum + a.views.dy.load<T>(steps.batch, at.position, u);
}

template <class T>
__device__ __forceinline__ float output_before(const BackwardViews& v, const SequenceSteps& steps,
                                               const Walk& at, int64_t s, int64_t u) {
  return at.t == 0 ? v.h0.load<T>(s, u)
                   : v.y.load<T>(steps.batch, v.p.position(steps, at.t - 1), u);
}

// An LSTM's gates from the gradient of o tanh(c).
template <class T>
__device__ __forceinline__ void finish_lstm(const StepArguments& a, const SequenceSteps& steps,
                                            const Walk& at, int64_t s, int64_t u, float dh) {
  const BackwardViews& v = a.views;
  const int64_t H = v.p.hidden;
  float* const carried = a.carried + s * H + u;
  float dc = at.t == at.steps - 1 ? v.dc.load<T>(s, u) : *carried;
  if (at.t < 0) {
    v.dc0.store<T>(s, u, dc);
    return;
  }
  UnitGradient unit;
#pragma unroll
  for (int g = 0; g < 4; ++g) unit.kept[g] = v.gates.load<T>(steps.batch, at.position, g * H + u);
  unit.cell = v.cells.load<T>(steps.batch, at.position, u);
  unit.before = at.t == 0 ? v.c0.load<T>(s, u)
                          : v.cells.load<T>(steps.batch, v.p.position(steps, at.t - 1), u);
  float by[LstmCell::kFactors], of_x[4], of_h[4];
  LstmCell::factors<T>(unit, by);
  LstmCell::backward(by, dh, &dc, of_x, of_h);
  *carried = dc;
  T* const to = static_cast<T*>(v.of_h) + at.row * 4 * H + u;
#pragma unroll
  for (int g = 0; g < 4; ++g) to[g * H] = from_float<T>(of_h[g]);
  if (a.inner != nullptr) {
    static_cast<T*>(a.inner)[at.row * H + u] = from_float<T>(unit.kept[3] * tanh_for<T>(unit.cell));
  }
}

struct LstmStep : LaterGates {
  static constexpr int kRows = 1;

  template <class T>
  __device__ __forceinline__ static void finish(const StepArguments& a, const SequenceSteps& steps,
                                                int64_t w, int64_t s, int64_t u,
                                                const float (&products)[1]) {
    const Walk at(a.views.p, steps, w);
    if (at.is_over()) return;
    finish_lstm<T>(a, steps, at, s, u, output_gradient<T>(a, steps, at, s, u, products[0]));
  }
};

// With a projection: first the gradient of h,
struct OutputStep : LaterGates {
  static constexpr int kRows = 1;

  template <class T>
  __device__ __forceinline__ static void finish(const StepArguments& a, const SequenceSteps& steps,
                                                int64_t w, int64_t s, int64_t u,
                                                const float (&products)[1]) {
    const Walk at(a.views.p, steps, w);
    if (at.is_over()) return;
    const float dh = output_gradient<T>(a, steps, at, s, u, products[0]);
    if (at.t >= 0) static_cast<T*>(a.dh)[at.row * a.views.p.outputs + u] = from_float<T>(dh);
  }
};

// then that of what was projected.
struct ProjectedStep {
  static constexpr int kRows = 1;

  template <class T>
  __device__ __forceinline__ static const T* source(const StepArguments& a,
                                                    const SequenceSteps& steps, int64_t w,
                                                    int64_t) {
    const Walk at(a.views.p, steps, w);
    return at.t < 0 ? nullptr : static_cast<const T*>(a.dh) + at.row * a.views.p.outputs;
  }
  template <class T>
  __device__ __forceinline__ static void finish(const StepArguments& a, const SequenceSteps& steps,
                                                int64_t w, int64_t s, int64_t u,
                                                const float (&products)[1]) {
    const Walk at(a.views.p, steps, w);
    if (!at.is_over()) finish_lstm<T>(a, steps, at, s, u, products[0]);
  }
};

// The gradient of a GRU's h, with what earlier launches carried along.
template <class T>
__device__ __forceinline__ float gru_gradient(const StepArguments& a, const SequenceSteps& steps,
                                              const Walk& at, int64_t s, int64_t u, float sum) {
  if (at.t < at.steps - 1) sum += a.carried[s * a.views.p.hidden + u];
  return output_gradient<T>(a, steps, at, s, u, sum);
}

struct GruStep : LaterGates {
  static constexpr int kRows = 1;

  template <class T>
  __device__ __forceinline__ static void finish(const StepArguments& a, const SequenceSteps& steps,
                                                int64_t w, int64_t s, int64_t u,
                                                const float (&products)[1]) {
    const BackwardViews& v = a.views;
    const int64_t H = v.p.hidden;
    const Walk at(v.p, steps, w);
    if (at.is_over()) return;
    const float dh = gru_gradient<T>(a, steps, at, s, u, products[0]);
    if (at.t < 0) return;
    UnitGradient unit;
#pragma unroll
    for (int g = 0; g < 4; ++g) unit.kept[g] = v.gates.load<T>(steps.batch, at.position, g * H + u);
    unit.before = output_before<T>(v, steps, at, s, u);
    float by[GruCell::kFactors], of_x[3], of_h[3];
    GruCell::factors<T>(unit, by);
    GruCell::backward(by, dh, a.carried + s * H + u, of_x, of_h);
    const int64_t to = at.row * 3 * H + u;
#pragma unroll
    for (int g = 0; g < 3; ++g) {
      static_cast<T*>(v.of_x)[to + g * H] = from_float<T>(of_x[g]);
      static_cast<T*>(v.of_h)[to + g * H] = from_float<T>(of_h[g]);
    }
  }
};

// A GRU that resets before the product: first z and n,
struct NewStep : LaterGates {
  static constexpr int kRows = 1;

  template <class T>
  __device__ __forceinline__ static void finish(const StepArguments& a, const SequenceSteps& steps,
                                                int64_t w, int64_t s, int64_t u,
                                                const float (&products)[1]) {
    const BackwardViews& v = a.views;
    const int64_t H = v.p.hidden;
    const Walk at(v.p, steps, w);
    if (at.is_over()) return;
    const float dh = gru_gradient<T>(a, steps, at, s, u, products[0]);
    if (at.t < 0) return;
    const float z = v.gates.load<T>(steps.batch, at.position, H + u);
    const float n = v.gates.load<T>(steps.batch, at.position, 2 * H + u);
    T* const to = static_cast<T*>(v.of_h) + at.row * 3 * H + u;
    to[H] = from_float<T>(dh * (output_before<T>(v, steps, at, s, u) - n) * z * (1.f - z));
    to[2 * H] = from_float<T>(dh * (1.f - z) * fmaf(-n, n, 1.f));
    a.carried[s * H + u] = dh * z;
  }
};

// then r.
struct ResetStep {
  static constexpr int kRows = 1;

  template <class T>
  __device__ __forceinline__ static const T* source(const StepArguments& a,
                                                    const SequenceSteps& steps, int64_t w,
                                                    int64_t) {
    const int64_t H = a.views.p.hidden;
    const Walk at(a.views.p, steps, w);
    return at.t < 0 ? nullptr : static_cast<const T*>(a.views.of_h) + at.row * 3 * H + 2 * H;
  }
  template <class T>
  __device__ __forceinline__ static void finish(const StepArguments& a, const SequenceSteps& steps,
                                                int64_t w, int64_t s, int64_t u,
                                                const float (&products)[1]) {
    const BackwardViews& v = a.views;
    const int64_t H = v.p.hidden;
    const Walk at(v.p, steps, w);
    if (at.t < 0) return;
    const float r = v.gates.load<T>(steps.batch, at.position, u);
    const float before = output_before<T>(v, steps, at, s, u);
    static_cast<T*>(v.of_h)[at.row * 3 * H + u] =
        from_float<T>(products[0] * before * r * (1.f - r));
    a.carried[s * H + u] += products[0] * r;
  }
};

// The parts of a call's workspace. What is transposed has a row for each column of the weight.
struct BackwardParts {
  WorkspaceParts parts;
  void *of_x, *of_h, *transposed, *h_before;
  void *dh = nullptr, *inner = nullptr, *projection = nullptr;
  float *carried, *partials;

  BackwardParts(const Problem& p, bool one_gradient, const Tensor& w_hr, const Tensor& x,
                void* memory)
      : parts(memory) {
    const DType dtype = x.dtype;
    const int64_t size = size_of(dtype), positions = p.positions();
    const int64_t all_gates = p.gates * p.hidden;
    of_x = parts.take<char>(positions * all_gates * size);
    of_h = one_gradient ? of_x : parts.take<char>(positions * all_gates * size);
    transposed = parts.take<char>(p.outputs * all_gates * size);
    h_before = parts.take<char>(positions * p.outputs * size);
    carried = parts.take(p.sequences.count * p.hidden);
    partials = parts.take(partial_floats_of(p, dtype, x.device_id, true));
    if (!w_hr) return;
    dh = parts.take<char>(positions * p.outputs * size);
    inner = parts.take<char>(positions * p.hidden * size);
    projection = parts.take<char>(w_hr.numel() * size);
  }
};
BackwardParts parts_of(const LstmBwd& a, void* memory) {
  return {fk::rnn::problem_of(a), true, a.w_hr, a.x, memory};
}
BackwardParts parts_of(const GruBwd& a, void* memory) {
  return {fk::rnn::problem_of(a), !a.reset_after, {}, a.x, memory};
}

template <class T>
UnitRows<T> transposed_rows(const void* data, int64_t pitch, int64_t first, int64_t depth) {
  const T* const begin = static_cast<const T*>(data) + first;
  return {begin, pitch, 0, depth, rows_in_vectors<T>(begin, depth, pitch)};
}

// One launch more than there are steps. Without units there may still be outputs of a projection.
int64_t launches(const Problem& p) {
  return (p.hidden == 0 && p.outputs == 0) || p.sequences.count == 0 ? 0 : p.length + 1;
}

template <class Args>
Status finish_backward(const Args& a, const Problem& p, const BackwardParts& parts,
                       const Tensor& met, cudaStream_t stream) {
  const int64_t all_gates = p.gates * p.hidden;
  const Tensor of_x = matrix_like(a.x, a.x.dtype, parts.of_x, p.positions(), all_gates);
  const Tensor of_h = matrix_like(a.x, a.x.dtype, parts.of_h, p.positions(), all_gates);
  return add_gradients(p,
                       {a.x, a.w_ih, a.y, a.h0, met, of_x, of_h, a.dx, a.dw_ih, a.dw_hh, a.db_ih,
                        a.db_hh, parts.h_before, parts.partials},
                       stream);
}

}  // namespace
}  // namespace rnn

size_t workspace(const LstmBwd& a) { return rnn::parts_of(a, nullptr).parts.bytes(); }
size_t workspace(const GruBwd& a) { return rnn::parts_of(a, nullptr).parts.bytes(); }

Status run(const LstmBwd& a, const Exec& exec) {
  using namespace rnn;
  const cudaStream_t stream = stream_of(exec);
  const BackwardParts parts = parts_of(a, exec.workspace());
  StepArguments steps = {};
  steps.views = backward_views(a, parts.of_x, parts.of_h, a.w_ih.size(0));
  steps.carried = parts.carried;
  steps.dh = parts.dh;
  steps.inner = parts.inner;
  const Problem& p = steps.views.p;
  const DType dtype = a.x.dtype;
  FK_RETURN_IF_ERROR(copy_weight(a.w_hh, dtype, parts.transposed, true, stream));
  if (a.w_hr) FK_RETURN_IF_ERROR(copy_weight(a.w_hr, dtype, parts.projection, true, stream));
  StepArguments outputs = steps;
  outputs.units = p.outputs;
  steps.units = p.hidden;
  FK_RETURN_IF_ERROR(with_type(dtype, [&](auto t) -> Status {
    using T = decltype(t);
    const int64_t all_gates = 4 * p.hidden;
    const UnitRows<T> rows = transposed_rows<T>(parts.transposed, all_gates, 0, all_gates);
    const UnitRows<T> rows_out = transposed_rows<T>(parts.projection, p.outputs, 0, p.outputs);
    for (int64_t w = 0; w < launches(p); ++w) {
      if (!a.w_hr) {
        FK_RETURN_IF_ERROR((launch_step<LstmStep>(steps, rows, "lstm_step_back", w, stream)));
        continue;
      }
      if (p.outputs > 0) {
        FK_RETURN_IF_ERROR((launch_step<OutputStep>(outputs, rows, "lstm_output_back", w, stream)));
      }
      if (p.hidden > 0) {
        FK_RETURN_IF_ERROR(
            (launch_step<ProjectedStep>(steps, rows_out, "lstm_step_back", w, stream)));
      }
    }
    return {};
  }));
  if (a.dw_hr) {
    FK_RETURN_IF_ERROR(
        multiply_over_steps(matrix_like(a.x, dtype, parts.dh, p.positions(), p.outputs),
                            matrix_like(a.x, dtype, parts.inner, p.positions(), p.hidden), a.dw_hr,
                            parts.partials, stream));
  }
  return finish_backward(a, p, parts, {}, stream);
}

Status run(const GruBwd& a, const Exec& exec) {
  using namespace rnn;
  const cudaStream_t stream = stream_of(exec);
  const BackwardParts parts = parts_of(a, exec.workspace());
  StepArguments steps = {};
  steps.views = backward_views(a, parts.of_x, parts.of_h, a.w_ih.size(0));
  steps.carried = parts.carried;
  const Problem& p = steps.views.p;
  const int64_t H = p.hidden;
  steps.units = H;
  FK_RETURN_IF_ERROR(copy_weight(a.w_hh, a.x.dtype, parts.transposed, true, stream));
  FK_RETURN_IF_ERROR(with_type(a.x.dtype, [&](auto t) -> Status {
    using T = decltype(t);
    const UnitRows<T> rows =
        transposed_rows<T>(parts.transposed, 3 * H, 0, a.reset_after ? 3 * H : 2 * H);
    const UnitRows<T> rows_of_n = transposed_rows<T>(parts.transposed, 3 * H, 2 * H, H);
    for (int64_t w = 0; w < launches(p); ++w) {
      if (a.reset_after) {
        FK_RETURN_IF_ERROR((launch_step<GruStep>(steps, rows, "gru_step_back", w, stream)));
        continue;
      }
      FK_RETURN_IF_ERROR((launch_step<NewStep>(steps, rows, "gru_new_back", w, stream)));
      FK_RETURN_IF_ERROR((launch_step<ResetStep>(steps, rows_of_n, "gru_reset_back", w, stream)));
    }
    return {};
  }));
  Tensor met;
  if (!a.reset_after) {
    met = a.gates;
    met.shape[2] = H;
    met.data = static_cast<char*>(met.data) + 3 * H * met.stride(2) * size_of(met.dtype);
  }
  return finish_backward(a, p, parts, met, stream);
}

}  // namespace fk::cuda
