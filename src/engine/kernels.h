// This file declares the CPU engine's kernels. Each runs the version for the active instruction set
// (cpu/targets.h), on the calling thread, without allocating. Each output is computed by one call
// in an order that depends on shapes alone, so that results do not depend on how the work is cut
// for threads.
#pragma once

#include <cstdint>

#include "engine/pack.h"

namespace fk::engine {

using cpu::Activations;
using cpu::multiply;

// Asks the CPU to bring `bytes` at `data` into the second-level cache; does not wait.
inline void prefetch(const void* data, int64_t bytes) {
  const char* p = static_cast<const char*>(data);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

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

// Returns whether none of the n values is an infinity or a NaN.
bool all_finite(const float* x, int64_t n);

}  // namespace fk::engine
