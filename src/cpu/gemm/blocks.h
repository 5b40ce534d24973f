// This file declares products of matrices in the types that model files have, whose weights are
// codes in blocks of 32 columns with a scale for each block, and the layout they are packed in:
// sixteen rows side by side, so that a vector lane is a row and a product needs no sum across
// lanes.
//
// A matrix is cut into groups of 16 rows (the last one padded with zero rows), a group into blocks
// of columns, in the order in which they are read: the whole matrix is one stream. The bytes of a
// weight stay what they are in the file, but for Q4_K and Q5_K, whose 6-bit scales become bytes
// (2.8% and 2.3% more).
//
// With integer types, a block of 32 columns of 16 rows consists of:
//   parameters   per row: half d [, half m]; K types: byte scale, byte minimum; or two int8 scales
//   high bits    64 bytes (5-bit types) or 128 (Q6_K)
//   codes        256 bytes of nibbles, or 512 bytes
// A quad is four neighbouring columns. Byte 4 * row + column % 4 of a 64-byte line belongs to one
// row; of nibble line i the low nibbles are quad i, the high nibbles quad i + 4. Bit j of a high
// byte is bit 4 of quad j; of Q6_K's two high lines, line i has quads 4i to 4i + 3, two bits each.
// K types have per-row halves (d, dmin; Q6_K: d) in front of every eight blocks.
// Float types have no blocks: the 16 values of column 0 are followed by those of column 1, and so
// on.
#pragma once

#include <cstdint>

namespace fk::cpu {

constexpr int64_t kGroupRows = 16;
// Returns the number of rows of a matrix once its last group is filled up with zero rows.
constexpr int64_t padded(int64_t rows) { return (rows + kGroupRows - 1) / kGroupRows * kGroupRows; }

// Lists the packed types. Types that files have too have the same numbers as in model::WeightType.
enum class Packing : uint8_t {
  kF32,
  kF16,
  kBF16,
  kQ8_0,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kQ8_Float,  // Q8_0 with float scales: llama2.c's int8
};

constexpr bool is_float(Packing p) { return p <= Packing::kBF16; }

// Returns the size in bytes of one block: 32 columns, or one column of a float type, of 16 rows.
constexpr int64_t block_bytes(Packing p) {
  switch (p) {
    case Packing::kF32:
      return 64;
    case Packing::kF16:
    case Packing::kBF16:
      return 32;
    case Packing::kQ8_0:
      return 32 + 512;
    case Packing::kQ8_Float:
      return 64 + 512;
    case Packing::kQ4_0:
      return 32 + 256;
    case Packing::kQ4_1:
      return 64 + 256;
    case Packing::kQ5_0:
      return 32 + 64 + 256;
    case Packing::kQ5_1:
      return 64 + 64 + 256;
    case Packing::kQ4_K:
      return 32 + 256;
    case Packing::kQ5_K:
      return 32 + 64 + 256;
    case Packing::kQ6_K:
      return 32 + 128 + 256;
  }
  return 0;
}

// Returns the size in bytes of the parameters in front of every eight blocks; 0 except for K types.
constexpr int64_t super_bytes(Packing p) {
  return p == Packing::kQ4_K || p == Packing::kQ5_K ? 64 : p == Packing::kQ6_K ? 32 : 0;
}

// Returns the size in bytes of a group of 16 rows.
constexpr int64_t group_bytes(Packing p, int64_t columns) {
  if (is_float(p)) return columns * block_bytes(p);
  return columns / 32 * block_bytes(p) + columns / 256 * super_bytes(p);
}

// Describes a packed matrix. It does not own its memory.
struct PackedMatrix {
  Packing packing = Packing::kF32;
  int64_t rows = 0;
  int64_t columns = 0;
  const uint8_t* data = nullptr;  // null where the model has no such matrix
  const float* bias = nullptr;    // padded(rows) values; null where there is none

  int64_t groups() const { return (rows + kGroupRows - 1) / kGroupRows; }
  int64_t bytes() const { return groups() * group_bytes(packing, columns); }
  const uint8_t* group(int64_t g) const { return data + g * group_bytes(packing, columns); }
  explicit operator bool() const { return data != nullptr; }
};

// Holds the inputs of a product, one row per token: float weights read `x`, integer weights the
// same values as int8 in blocks of 32. Token t's values begin at t * columns, its blocks at t *
// columns / 32. The struct does not own the memory.
struct Activations {
  int64_t columns = 0;
  float* x = nullptr;
  int8_t* q = nullptr;         // x is close to scale * q, |q| <= 127
  float* scale = nullptr;      // one per block
  float* sum = nullptr;        // one per block: scale times the sum of its q
  int32_t* minus32 = nullptr;  // one per block: minus the sum of its q
  int32_t* minus16 = nullptr;  // one per half block: minus the sum of its q
};

// Computes out[t * stride + r] = bias[r] + W[r] . x[t] for tokens t < `tokens` and for the rows r
// of w's groups [begin, end), including the padding rows of the last group: `out` has room for
// them. It runs on the calling thread, and what it computes for a row and a token does not depend
// on how the work is cut.
void multiply(const PackedMatrix& w, int64_t begin, int64_t end, const Activations& x,
              int64_t tokens, float* out, int64_t stride);

}  // namespace fk::cpu
