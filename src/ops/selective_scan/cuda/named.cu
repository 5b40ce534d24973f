// The scans over (a, b) pairs that are asked for by name: Blelloch's, Hillis and Steele's, and
// cumulative sums in log space. Here for comparison; "auto" never takes them.
//
// A block takes a channel of a sequence, a thread a step of a tile of kSteps, one state after
// another. Work per tile and state: kSteps for Blelloch (2 log2 kSteps barriers), kSteps log2
// kSteps for the others. In log space h_t = P_t (h_in + sum of b_i / P_i) with P_t = exp(A sum of
// dt): right as long as P_t stays within exp(+-kRange); a tile in which it does not takes Hillis
// and Steele's scan instead.
#include "cuda/row_partition.cuh"
#include "cuda/scan_step.cuh"
#include "ops/selective_scan/cuda/stage.cuh"

namespace fk::cuda {
namespace {

constexpr int kSteps = 128;
constexpr float kRange = 10;

struct Affine {
  float a, b;  // h -> a h + b
};
// Returns the map that applies `first`, then `second`.
__device__ __forceinline__ Affine then(const Affine& first, const Affine& second) {
  return {first.a * second.a, fmaf(second.a, first.b, second.b)};
}

// Computes inclusive scans over the block's threads. Every one of them ends with a barrier.
__device__ __forceinline__ Affine hillis_steele(Affine x, Affine* scratch) {
#pragma unroll 1
  for (int distance = 1; distance < kSteps; distance *= 2) {
    scratch[threadIdx.x] = x;
    __syncthreads();
    if (static_cast<int>(threadIdx.x) >= distance) x = then(scratch[threadIdx.x - distance], x);
    __syncthreads();
  }
  return x;
}

__device__ __forceinline__ Affine blelloch(const Affine& x, Affine* scratch) {
  const int t = threadIdx.x;
  scratch[t] = x;
  __syncthreads();
#pragma unroll 1
  for (int width = 2; width <= kSteps; width *= 2) {
    if (t % width == width - 1) scratch[t] = then(scratch[t - width / 2], scratch[t]);
    __syncthreads();
  }
  if (t == kSteps - 1) scratch[t] = {1, 0};
  __syncthreads();
#pragma unroll 1
  for (int width = kSteps; width >= 2; width /= 2) {
    if (t % width == width - 1) {
      const Affine left = scratch[t - width / 2];
      scratch[t - width / 2] = scratch[t];
      scratch[t] = then(scratch[t], left);
    }
    __syncthreads();
  }
  const Affine result = then(scratch[t], x);
  __syncthreads();
  return result;
}

__device__ __forceinline__ float running_sum(float x, Affine* scratch) {
  return hillis_steele({1, x}, scratch).b;
}

// T is float, or __half for all dtypes of two bytes, which take the same arithmetic.
template <class T>
__global__ void __launch_bounds__(kSteps)
    scan_by_name(const __grid_constant__ ScanArgs a, int64_t algorithm) {
  __shared__ Affine scratch[kSteps];
  __shared__ float carried[kMaxScanStates];
  __shared__ float last_sum;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t index = block_index();
  if (index >= a.channels * a.segments.sequences.count) return;
  const int64_t s = index / a.channels, c = index % a.channels;
  const SequenceSteps q = a.segments.sequences[s];
  const int64_t group = c / (a.channels / a.groups);
  const int t = threadIdx.x;
  const DType dtype = std::is_same_v<T, float> ? DType::kFloat32 : a.u.dtype;
  const auto load = [&](const auto& view, int64_t at) { return load_as(dtype, view.data, at); };
  const auto load_parameter = [&](const auto& view, int64_t at) {
    if (view.data == nullptr) return 0.f;
    return load_as(view.is_float ? DType::kFloat32 : dtype, view.data, at);
  };
  for (int n = t; n < a.states; n += kSteps) {
    const StateView& v = a.initial_state;
    carried[n] = load_parameter(v, s * v.sequence + c * v.channel + n * v.state);
  }
  const float bias = load_parameter(a.bias, c * a.bias.stride);
  const float D = load_parameter(a.D, c * a.D.stride);
  const auto at = [&](const StepView& v, int64_t l) {
    return q.batch * v.batch + l * v.step + c * v.channel;
  };
  const auto state_at = [&](const scan::GroupView& v, int64_t l, int n) {
    return load(v, q.batch * v.batch + l * v.step + group * v.group + n * v.state);
  };
  __syncthreads();
  for (int64_t first = q.begin; first < q.end; first += kSteps) {
    const int64_t l = first + t;
    const bool exists = l < q.end;
    float dt = 0, log2_e_dt = 0, u = 0, y = 0, sum = 0;
    if (exists) {
      u = load(a.u, at(a.u, l));
      const float2 times = time_step<T>(load(a.delta, at(a.delta, l)), bias, a.softplus);
      log2_e_dt = times.x;
      dt = times.y;
      y = D * u;
    }
    if (algorithm == kCumsumScan) {
      sum = running_sum(dt, scratch);
      if (t == kSteps - 1) last_sum = sum;
      __syncthreads();
    }
    for (int n = 0; n < a.states; ++n) {
      const float A = a.A[c * a.A_channel + n * a.A_state];
      const Affine step = {power<T>(log2_e_dt, A), exists ? dt * u * state_at(a.B, l, n) : 0.f};
      Affine whole;
      // Negative steps could leave the range in between: dt is tested where it is summed.
      if (algorithm == kCumsumScan && __syncthreads_and(dt >= 0) && fabsf(A * last_sum) < kRange) {
        const float log2_e_sum = kLog2E * sum;
        whole.a = power<T>(log2_e_sum, A);
        whole.b = whole.a * running_sum(step.b * power<T>(-log2_e_sum, A), scratch);
      } else if (algorithm == kBlellochScan) {
        whole = blelloch(step, scratch);
      } else {
        whole = hillis_steele(step, scratch);
      }
      const float h = fmaf(whole.a, carried[n], whole.b);
      __syncthreads();
      if (t == kSteps - 1) carried[n] = h;
      if (exists) {
        y = fmaf(h, state_at(a.C, l, n), y);
        if (a.kept.data != nullptr && (l + 1) % a.kept.spacing == 0) {
          const int64_t row = (l + 1) / a.kept.spacing - 1;
          const int64_t* strides = a.kept.strides;
          a.kept.data[q.batch * strides[0] + row * strides[1] + n * strides[2] + c * strides[3]] =
              h;
        }
      }
      __syncthreads();
    }
    if (!exists || a.y.data == nullptr) continue;
    if (a.z.data != nullptr) y = gated<T>(y, load(a.z, at(a.z, l)));
    store_as(dtype, a.y.data, at(a.y, l), y);
  }
  __syncthreads();
  if (a.last_state.data == nullptr) return;
  for (int n = t; n < a.states; n += kSteps) {
    static_cast<float*>(a.last_state.data)[s * a.last_state.sequence + c * a.last_state.channel +
                                           n * a.last_state.state] = carried[n];
  }
}

}  // namespace

Status launch_named(int64_t algorithm, const ScanArgs& a, void* stream) {
  const int64_t blocks = a.channels * a.segments.sequences.count;
  if (blocks == 0) return {};
  return launch_early(a.u.dtype == DType::kFloat32 ? scan_by_name<float> : scan_by_name<__half>,
                      "scan_by_name", {grid_of(blocks), kSteps}, static_cast<cudaStream_t>(stream),
                      a, algorithm);
}

}  // namespace fk::cuda
