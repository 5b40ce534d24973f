// rms_norm with a gate or with groups of columns. With g = silu(gate) and r = rsqrt(mean(v^2) +
// eps) over a group,
//   y = v r weight, v = s g        or, the norm before the gate,   y = v r weight g, v = s
//   dv = (dn weight - v mean(dn weight v) r^2) r, where dn is the gradient behind the weight: dy,
//   or dy g; dweight = sum over rows of dn v r
//
// Floor: x, residual and gate read once, y and sum written once; backward dy, x and gate read, dx
// and dgate written. A block takes a group of a row and passes over it twice: the second time it
// comes from L1. Blocks of the backward walk rows and keep sums of dweight, as without a gate.
#pragma once

#include "cuda/activations.cuh"
#include "cuda/norm/rows.cuh"

namespace fk::cuda::norm {

struct Gated {
  UntypedRows x, gate, rstd;
  UntypedRows residual, y, sum;     // forward
  UntypedRows dy, dsum, dx, dgate;  // backward
  Parameter weight;
  float* dweight = nullptr;  // partial sums, [blocks, columns]; NULL: not wanted
  int64_t rows = 0, columns = 0, group = 0;
  float eps = 0;
  bool norm_before_gate = false;
};

// The gate's silu has float's accuracy where the outputs can show it.
template <class T>
constexpr bool kExact = std::is_same_v<T, float>;

template <int kWidth, class T>
__device__ __forceinline__ void load_columns(const UntypedRows& rows, const T* row, int64_t column,
                                             float (&out)[kWidth]) {
  unpack(load<kWidth>(row + column * rows.column_stride), out);
}

// A block for each group of each row. kWidth 1: any strides. Wider: unit column stride, 16-byte
// aligned rows, and groups of whole vectors.
template <class T, int kWidth, int kThreads>
__global__ void __launch_bounds__(kThreads) gated_forward(const __grid_constant__ Gated p) {
  __shared__ float scratch[kThreads / kWarpSize];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t groups = p.columns / p.group;
  for (int64_t item = blockIdx.x; item < p.rows * groups; item += gridDim.x) {
    const int64_t row = item / groups, first = item % groups * p.group;
    const T* x = p.x.row<T>(row);
    const T* residual = p.residual ? p.residual.row<T>(row) : nullptr;
    const T* gate = p.gate ? p.gate.row<T>(row) : nullptr;
    const auto load_s = [&](int64_t c, float(&s)[kWidth]) {
      load_columns(p.x, x, c, s);
      if (residual == nullptr) return;
      float r[kWidth];
      load_columns(p.residual, residual, c, r);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) s[j] += r[j];
      unpack(pack<T>(s), s);
    };
    const auto multiply_gate = [&](int64_t c, float(&v)[kWidth]) {
      float z[kWidth];
      load_columns(p.gate, gate, c, z);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v[j] *= activate<Activation::kSilu, kExact<T>>(z[j]);
    };
    const auto each = [&](auto&& body) {
      for (int64_t c = threadIdx.x * kWidth; c < p.group; c += kThreads * kWidth) body(first + c);
    };
    float square = 0, v[kWidth];
    each([&](int64_t c) {
      load_s(c, v);
      if (gate != nullptr && !p.norm_before_gate) multiply_gate(c, v);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) square += v[j] * v[j];
    });
    const float mean = block_sum<kThreads>(square, scratch) / static_cast<float>(p.group);
    const float rstd = 1.f / sqrtf(mean + p.eps);
    if (threadIdx.x == 0 && first == 0 && p.rstd) *p.rstd.row<float>(row) = rstd;
    T* y = p.y ? p.y.row<T>(row) : nullptr;
    T* sum = p.sum ? p.sum.row<T>(row) : nullptr;
    each([&](int64_t c) {
      load_s(c, v);
      if (sum != nullptr) store(sum + c * p.sum.column_stride, pack<T>(v));
      if (y == nullptr) return;
      float w[kWidth];
      load_parameter<T>(p.weight, c, w);
      if (gate != nullptr) multiply_gate(c, v);  // the same product, before the norm or after it
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v[j] *= rstd * w[j];
      store(y + c * p.y.column_stride, pack<T>(v));
    });
    __syncthreads();  // before the next item writes scratch
  }
}

// A block walks its share of the rows, in the groups that blockIdx.y has.
template <class T, int kWidth, int kThreads>
__global__ void __launch_bounds__(kThreads) gated_backward(const __grid_constant__ Gated p) {
  __shared__ Pair scratch[kThreads / kWarpSize];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const float scale = 1.f / static_cast<float>(p.group);
  float* dweight = p.dweight != nullptr ? p.dweight + blockIdx.x * p.columns : nullptr;
  const int64_t stride = gridDim.y * p.group;
  for (int64_t first = blockIdx.y * p.group; first < p.columns; first += stride) {
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
      const T *x_row = p.x.row<T>(row), *dy_row = p.dy.row<T>(row);
      const T* gate_row = p.gate ? p.gate.row<T>(row) : nullptr;
      const bool gates_x = gate_row != nullptr && !p.norm_before_gate;
      const bool gates_y = gate_row != nullptr && p.norm_before_gate;
      // v, and the gradient behind the weight; the gate and its slope in g and slope.
      const auto load_pair = [&](int64_t c, float(&v)[kWidth], float(&dn)[kWidth],
                                 float(&g)[kWidth], float(&slope)[kWidth]) {
        load_columns(p.x, x_row, c, v);
        load_columns(p.dy, dy_row, c, dn);
        if (gate_row == nullptr) return;
        float z[kWidth];
        load_columns(p.gate, gate_row, c, z);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          g[j] = activate<Activation::kSilu, kExact<T>>(z[j]);
          slope[j] = activation_slope<Activation::kSilu, kExact<T>>(z[j]);
          if (gates_x) v[j] *= g[j];
          if (gates_y) dn[j] *= g[j];
        }
      };
      const auto each = [&](auto&& body) {
        for (int64_t c = threadIdx.x * kWidth; c < p.group; c += kThreads * kWidth) body(first + c);
      };
      Pair sums = {0, 0};  // of v^2, of dn weight v
      float v[kWidth], dn[kWidth], g[kWidth] = {}, slope[kWidth] = {}, w[kWidth];
      each([&](int64_t c) {
        load_pair(c, v, dn, g, slope);
        load_parameter<T>(p.weight, c, w);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          sums.first += v[j] * v[j];
          sums.second += dn[j] * w[j] * v[j];
        }
      });
      sums = block_reduce<kThreads>(sums, SumPair(), scratch);
      const float rstd = 1.f / sqrtf(sums.first * scale + p.eps);
      const float along = sums.second * scale * rstd * rstd;
      T* dx = p.dx ? p.dx.row<T>(row) : nullptr;
      T* dgate = p.dgate ? p.dgate.row<T>(row) : nullptr;
      const T* dsum = p.dsum ? p.dsum.row<T>(row) : nullptr;
      each([&](int64_t c) {
        load_pair(c, v, dn, g, slope);
        load_parameter<T>(p.weight, c, w);
        float dv[kWidth], outer[kWidth];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const float xhat = v[j] * rstd;
          dv[j] = (dn[j] * w[j] - v[j] * along) * rstd;
          outer[j] = xhat * w[j];
          if (dweight != nullptr) {
            const float more = dn[j] * xhat;
            dweight[c + j] = row == blockIdx.x ? more : dweight[c + j] + more;
          }
        }
        if (dgate != nullptr) {
          float other[kWidth];
          load_columns(gates_x ? p.x : p.dy, gates_x ? x_row : dy_row, c, other);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) other[j] *= slope[j] * (gates_x ? dv[j] : outer[j]);
          store(dgate + c * p.dgate.column_stride, pack<T>(other));
        }
        if (dx == nullptr) return;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) dv[j] *= gates_x ? g[j] : 1.f;
        if (dsum != nullptr) {
          load_columns(p.dsum, dsum, c, v);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) dv[j] += v[j];
        }
        store(dx + c * p.dx.column_stride, pack<T>(dv));
      });
      __syncthreads();  // before the next row writes scratch
    }
  }
}

}  // namespace fk::cuda::norm
