// The CPU engine's kernels, each for the active instruction set. None allocates or starts threads;
// each output is computed by one call in an order that depends on shapes alone, so that results do
// not depend on how work is cut for threads.
#pragma once

#include <cstdint>

#include "engine/packed_matrix.h"

namespace fk::engine {

// Inputs of matrix products: `x` for float weights; for integer weights the same values as int8 in
// blocks of 32. Token t's values begin at t * columns, its blocks at t * columns / 32.
struct Activations {
  int64_t columns = 0;
  float* x = nullptr;
  int8_t* q = nullptr;         // x is near scale * q, |q| <= 127
  float* scale = nullptr;      // per block
  float* sum = nullptr;        // per block: scale times the sum of its q
  int32_t* minus32 = nullptr;  // per block: minus the sum of its q
  int32_t* minus16 = nullptr;  // per half block: the same
};

// Whether integer products may use VNNI where the CPU has it: not with FK_CPU_VNNI=0, nor after
// set_vnni(false), so that tests can run both ways.
bool vnni_wanted();
void set_vnni(bool wanted);

// out[t * stride + r] = bias[r] + W[r] x[t] for the rows r of groups [begin, end), padded rows too.
void multiply(const PackedMatrix& w, int64_t begin, int64_t end, const Activations& x,
              int64_t tokens, float* out, int64_t stride);

// Brings memory into the second-level cache.
void prefetch(const void* data, int64_t bytes);

// Blocks [begin, end) of 32 values of token t: from x to q, scale and sums.
void quantize(const Activations& a, int64_t token, int64_t begin, int64_t end);

// x += add (where not null), then out = norm(x) * weight + bias. `rms`: without the mean.
void add_and_norm(float* x, const float* add, const float* weight, const float* bias, float eps,
                  bool rms, int64_t n, float* out);

// out = activation(gate) * up, or activation(gate) where up is null. May be in place.
void activate(const float* gate, const float* up, bool silu, int64_t n, float* out);

// Whether there is neither an infinity nor a NaN among n values.
bool all_finite(const float* x, int64_t n);

}  // namespace fk::engine
