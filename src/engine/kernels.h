// The CPU engine's kernels. Each runs the version for the active instruction set (cpu/targets.h),
// on the calling thread, without allocating. Each output is computed by one call in an order that
// depends on shapes alone, so that results do not depend on how the work is cut for threads.
#pragma once

#include <cstdint>

#include "engine/packed_matrix.h"

namespace fk::engine {

// The inputs of a matrix product, one row per token: float weights read `x`, integer weights the
// same values as int8 in blocks of 32 (`quantize` makes them). Token t's values begin at t *
// columns, its blocks at t * columns / 32. The struct does not own the memory.
struct Activations {
  int64_t columns = 0;
  float* x = nullptr;
  int8_t* q = nullptr;         // x is close to scale * q, |q| <= 127
  float* scale = nullptr;      // one per block
  float* sum = nullptr;        // one per block: scale times the sum of its q
  int32_t* minus32 = nullptr;  // one per block: minus the sum of its q
  int32_t* minus16 = nullptr;  // one per half block: minus the sum of its q
};

// Whether integer products use VNNI where the CPU has it. FK_CPU_VNNI=0 and set_vnni(false) switch
// it off, so that tests can run both ways.
bool vnni_wanted();
void set_vnni(bool wanted);

// Computes out[t * stride + r] = bias[r] + W[r] . x[t] for tokens t < `tokens` and for the rows r
// of w's groups [begin, end), including the padding rows of the last group: `out` has room for
// them.
void multiply(const PackedMatrix& w, int64_t begin, int64_t end, const Activations& x,
              int64_t tokens, float* out, int64_t stride);

// Asks the CPU to bring `bytes` at `data` into the second-level cache; does not wait.
void prefetch(const void* data, int64_t bytes);

// Computes q, scale and the sums from x, for blocks [begin, end) of 32 values of one token.
void quantize(const Activations& a, int64_t token, int64_t begin, int64_t end);

// Adds `add` to x in place (nothing if `add` is null), then writes norm(x) * weight + bias to
// `out`, which may be x. With `rms` the norm does not subtract the mean. `bias` may be null. All
// have n values.
void add_and_norm(float* x, const float* add, const float* weight, const float* bias, float eps,
                  bool rms, int64_t n, float* out);

// Writes activation(gate) * up to `out`, or activation(gate) where `up` is null, for n values. The
// activation is silu, or else gelu by its tanh formula. `out` may be `gate` or `up`.
void activate(const float* gate, const float* up, bool silu, int64_t n, float* out);

// Whether none of the n values is an infinity or a NaN.
bool all_finite(const float* x, int64_t n);

}  // namespace fk::engine
