// This file runs attention's backward on any GPU from Turing on: the host side, and the passes over
// rows before and after the kernels of cuda/backward.cuh. Those read dout and out once.
#include "cuda/reduce.cuh"
#include "ops/attention/cuda/backward_launch.h"
#include "ops/attention/cuda/plan.h"

namespace fk::cuda {
namespace attention {
namespace {

struct Statistics {
  Problem problem;
  View dout;
  int64_t batch;         // of the tensors
  bool vectors;          // dout and out: 16 bytes at a time
  RowStatistics result;  // `maxima` NULL: not wanted
};

constexpr int kLanes = 8;  // a row
constexpr int kRowThreads = 256;

template <class T>
__global__ void __launch_bounds__(kRowThreads)
    row_statistics(const __grid_constant__ Statistics p) {
  const Problem& problem = p.problem;
  const int64_t index =
      (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * (kRowThreads / kLanes) +
      threadIdx.x / kLanes;
  int64_t head, row;
  const int64_t token = divide(index, problem.heads, &head);
  const int64_t b = divide(token, problem.q_len, &row);
  const bool in = b < p.batch;
  const View& view = p.result.out;
  const int lane = threadIdx.x % kLanes;
  const int columns = static_cast<int>(problem.value_dim);
  float sum = 0.f;
  if (in) {
    const T* dout = static_cast<const T*>(p.dout.data) + b * p.dout.batch + row * p.dout.row +
                    head * p.dout.head;
    const T* out =
        static_cast<const T*>(view.data) + b * view.batch + row * view.row + head * view.head;
    if (p.vectors) {
      constexpr int kWidth = kVecWidth<T>;
      constexpr int kRounds = 128 / (kLanes * kWidth);  // of a usual head
#pragma unroll kRounds
      for (int c = lane * kWidth; c < columns; c += kLanes * kWidth) {
        float x[kWidth], y[kWidth];
        unpack(load<kWidth>(dout + c), x);
        unpack(load<kWidth>(out + c), y);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) sum = fmaf(x[e], y[e], sum);
      }
    } else {
#pragma unroll 4
      for (int c = lane; c < columns; c += kLanes) {
        sum = fmaf(to_float(dout[c * p.dout.column]), to_float(out[c * view.column]), sum);
      }
    }
  }
  sum = warp_sum<kLanes>(sum);
  if (!in || lane != 0) return;
  const float delta = p.result.store(problem, b, row, head, sum);
  if (p.result.maxima != nullptr && isfinite(delta)) {
    // The bits of magnitudes are in the same order as their values. Most are smaller than what is
    // there.
    uint32_t* maximum = &p.result.maxima[b * problem.kv_heads + head / problem.group()];
    const uint32_t bits = __float_as_uint(fabsf(delta));
    if (bits > *const_cast<volatile uint32_t*>(maximum)) atomicMax(maximum, bits);
  }
}

struct Sinks {
  const void* sinks;
  DType dtype;
  int64_t stride;
  Result dsinks;
  const float *exponents, *delta;
  int64_t batch, heads, queries;
};

// A block sums up one head.
__global__ void __launch_bounds__(kRowThreads) sum_sinks(const __grid_constant__ Sinks p) {
  __shared__ float parts[kRowThreads / kWarpSize];
  const int64_t head = blockIdx.x;
  const float sink = load_as(p.dtype, p.sinks, head * p.stride) * kLog2e;
  float sum = 0.f;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t at = (b * p.heads + head) * p.queries;
    float part = 0.f;
    for (int64_t i = threadIdx.x; i < p.queries; i += kRowThreads) {
      part -= exp2f(sink - p.exponents[at + i]) * p.delta[at + i];
    }
    sum += part;
  }
  sum = block_sum<kRowThreads>(sum, parts);
  if (threadIdx.x == 0) p.dsinks.store_one(head * p.dsinks.column, sum);
}

struct BackwardPlan {
  Problem problem;
  Form form;
  Maxima maxima;
  Prepared q, k, v, dout;
  int64_t batch;  // of the tensors
  RowStatistics statistics;
  float *dq_sums = nullptr, *dk_sums = nullptr;
  int64_t dq_elements = 0;

  BackwardPlan(const AttentionBwd& a, int code, WorkspaceParts* parts)
      : problem(fk::attention::problem_of(a)),
        form(form_of(a.q.dtype, code)),
        maxima(problem, form, 5, parts),  // the last: of delta
        q(a.q, true, rotation_of(a), form, maxima.of(0), parts),
        k(a.k, false, rotation_of(a), form, maxima.of(1), parts),
        v(a.v, false, Rotation(), form, maxima.of(2), parts),
        dout(a.dout, true, Rotation(), form, maxima.of(3), parts),
        batch(problem.packed ? 1 : problem.batch) {
    const int64_t rows = batch * problem.heads * problem.q_len;
    statistics.out = fk::attention::view(a.out);
    statistics.lse = fk::attention::row_view(a.lse);
    statistics.dlse = fk::attention::row_view(a.dlse);
    statistics.exponents = parts->take<float>(rows);
    statistics.delta = parts->take<float>(rows);
    statistics.maxima = maxima.of(4);
    const bool rotated = q.rotation.pairs > 0;
    if (a.dq && (rotated || (!a.deterministic && (a.dk || a.dv)))) {
      dq_elements =
          batch * problem.heads * patch_rows(problem, problem.q_len) * prepared_columns(a.q);
      dq_sums = parts->take<float>(dq_elements);
    }
    if (a.dk && rotated) dk_sums = parts->take<float>(prepared_elements(a.k));
  }
};

bool vector_rows(const Tensor& t) {
  bool vectors = reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride(-1) == 1 &&
                 t.size(-1) * size_of(t.dtype) % 16 == 0;
  for (int i = 0; i + 1 < t.ndim; ++i) {
    vectors = vectors && (t.shape[i] == 1 || t.strides[i] * size_of(t.dtype) % 16 == 0);
  }
  return vectors;
}

Status find_statistics(const AttentionBwd& a, const BackwardPlan& plan, cudaStream_t stream) {
  if (plan.maxima.data != nullptr) {
    FK_RETURN_IF_ERROR(check(
        cudaMemsetAsync(plan.maxima.of(4), 0, plan.maxima.elements * sizeof(uint32_t), stream),
        "attention delta maxima"));
  }
  Statistics p = {};
  p.problem = plan.problem;
  p.dout = fk::attention::view(a.dout);
  p.batch = plan.batch;
  p.vectors = vector_rows(a.dout) && vector_rows(a.out);
  p.result = plan.statistics;
  const int64_t rows = p.batch * p.problem.q_len * p.problem.heads;
  if (rows == 0) return {};
  const auto kernel = a.q.dtype == DType::kFloat32   ? row_statistics<float>
                      : a.q.dtype == DType::kFloat16 ? row_statistics<__half>
                                                     : row_statistics<__nv_bfloat16>;
  kernel<<<grid_of(ceil_div(rows, kRowThreads / kLanes)), kRowThreads, 0, stream>>>(p);
  return check_launch("attention row_statistics");
}

Status find_dsinks(const AttentionBwd& a, const BackwardPlan& plan, cudaStream_t stream) {
  Sinks p = {};
  p.sinks = a.sinks.data;
  p.dtype = a.sinks.dtype;
  p.stride = a.sinks.stride(0);
  p.dsinks.data = a.dsinks.data;
  p.dsinks.dtype = a.dsinks.dtype;
  p.dsinks.column = a.dsinks.stride(0);
  p.exponents = plan.statistics.exponents;
  p.delta = plan.statistics.delta;
  p.batch = plan.batch;
  p.heads = plan.problem.heads;
  p.queries = plan.problem.q_len;
  sum_sinks<<<static_cast<unsigned>(p.heads), kRowThreads, 0, stream>>>(p);
  return check_launch("attention sum_sinks");
}

// Returns sums in the workspace as a result that kernels write.
Result sums_of(const BackwardPlan& plan, const Tensor& t, float* sums) {
  Result r;
  r.data = sums;
  r.column = 1;
  r.head = prepared_columns(t);
  r.row = r.head * t.size(-2);
  r.batch = plan.problem.packed ? 0 : r.row * t.size(-3);
  r.dtype = DType::kFloat32;
  r.columns = static_cast<int>(r.head);
  r.vectors = true;
  return r;
}

void set_bias(const AttentionBwd& a, Backward* p) {
  int64_t sizes[4] = {1, 1, 1, 1};
  for (int i = 0; i < a.dbias.ndim; ++i) sizes[4 - a.dbias.ndim + i] = a.dbias.shape[i];
  const View view = fk::attention::bias_view(a.dbias);
  p->dbias.data = view.data;
  p->dbias.dtype = a.dbias.dtype;
  p->dbias.batch = view.batch;
  p->dbias.head = view.head;
  p->dbias.row = view.row;
  p->dbias.column = view.column;
  p->bias_batch = sizes[0];
  p->bias_heads = sizes[1];
  p->bias_queries = static_cast<int>(sizes[2]);
  p->bias_keys = static_cast<int>(sizes[3]);
}

}  // namespace
}  // namespace attention

size_t workspace(const AttentionBwd& a) {
  WorkspaceParts parts;
  attention::BackwardPlan(a, device_properties(a.q.device_id).code, &parts);
  return parts.bytes();
}

Status run(const AttentionBwd& a, const Exec& exec) {
  using namespace attention;  // NOLINT: this room's own
  const DeviceProperties& properties = device_properties(a.q.device_id);
  const cudaStream_t stream = stream_of(exec);
  WorkspaceParts parts(exec.workspace());
  BackwardPlan plan(a, properties.code, &parts);
  const Problem& problem = plan.problem;
  const bool any_keys = (a.dk || a.dv) && problem.batch * problem.kv_heads * problem.k_len > 0;
  const bool any_queries = a.dq && problem.batch * problem.heads * problem.q_len > 0;
  // Together with dk and dv, dq costs one product and atomics; alone, it costs three products.
  const bool atomics = any_keys && any_queries && !a.deterministic && !exec.deterministic();
  const bool rotated = plan.q.rotation.pairs > 0;
  const ScoreChange change = score_change_of(a, problem);
  const bool bias = a.dbias && a.dbias.numel() > 0;
  if (plan.form == Form::kTwoTerms) {
    // Statistics are taken on the way where operands are prepared anyway, or by the kernel itself.
    if (takes_statistics(a.dout, a.out)) plan.dout.statistics = &plan.statistics;
    plan.k.inside = plan.v.inside = properties.code >= 90 && dim_of(problem) <= 128 && !rotated &&
                                    change.plain && !bias && (atomics || !any_queries);
  }
  const int64_t zeros = atomics ? plan.dq_elements : 0;
  FK_RETURN_IF_ERROR(prepare(problem, {&plan.q, &plan.k, &plan.v, &plan.dout}, stream, plan.dq_sums,
                             plan.form == Form::kTwoTerms ? zeros : 0));
  if (plan.dout.statistics == nullptr) FK_RETURN_IF_ERROR(find_statistics(a, plan, stream));
  if (a.dsinks && problem.heads > 0) FK_RETURN_IF_ERROR(find_dsinks(a, plan, stream));

  Backward p = {};
  p.problem = problem;
  p.q = plan.q.operand(problem);
  p.k = plan.k.operand(problem);
  p.v = plan.v.operand(problem);
  p.dout = plan.dout.operand(problem);
  p.group = static_cast<int>(problem.heads / std::max<int64_t>(problem.kv_heads, 1));
  if (plan.k.inside) {
    p.k_floats = a.k.ptr<const float>();
    p.v_floats = a.v.ptr<const float>();
  }
  p.exponents = plan.statistics.exponents;
  p.delta = plan.statistics.delta;
  p.delta_maxima = plan.statistics.maxima;
  p.change = change;
  p.dk = a.dk && rotated ? sums_of(plan, a.k, plan.dk_sums) : result_of(a.dk);
  p.dv = result_of(a.dv);
  const bool features = !change.plain || !p.q.vectors || !p.dout.vectors ||
                        (!plan.k.inside && (!p.k.vectors || !p.v.vectors));
  const auto launch = [&](const Backward& parameters, BackwardPass pass) {
    const auto kernels = plan.form == Form::kTwoTerms ? launch_backward<__half, 2>
                         : plan.form == Form::kScaled || a.q.dtype == DType::kFloat16
                             ? launch_backward<__half, 1>
                             : launch_backward<__nv_bfloat16, 1>;
    return kernels(parameters, pass, dim_of(problem), features, properties, stream);
  };

  if (atomics) {
    p.dq_sums = plan.dq_sums;
    p.dq_rows = patch_rows(problem, problem.q_len);
    p.dq_columns = prepared_columns(a.q);
    if (plan.form != Form::kTwoTerms) {
      FK_RETURN_IF_ERROR(check(cudaMemsetAsync(plan.dq_sums, 0, zeros * sizeof(float), stream),
                               "attention dq_sums"));
    }
  }
  if (any_keys) FK_RETURN_IF_ERROR(launch(p, BackwardPass::kKeys));
  if (any_keys && a.dk && rotated) {
    FK_RETURN_IF_ERROR(finish_gradient(problem, plan.dk_sums, prepared_columns(a.k), false, false,
                                       plan.k.rotation, a.dk, stream));
  }
  if (any_queries && !atomics) {
    p.dq = rotated ? sums_of(plan, a.q, plan.dq_sums) : result_of(a.dq);
    FK_RETURN_IF_ERROR(launch(p, BackwardPass::kQueries));
  }
  if (any_queries && (atomics || rotated)) {
    FK_RETURN_IF_ERROR(finish_gradient(problem, plan.dq_sums, prepared_columns(a.q), true, atomics,
                                       plan.q.rotation, a.dq, stream));
  }
  if (!bias) return {};
  set_bias(a, &p);
  return launch(p, BackwardPass::kBias);
}

}  // namespace fk::cuda
