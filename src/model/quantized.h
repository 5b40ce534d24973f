// This file declares the types in which model files keep weights, and the conversion of each to
// float.
//
// A row is a whole number of blocks. The bytes and the arithmetic are those of GGUF (ggml), so
// dequantised values equal its reference bit for bit. Blocks in a file have no alignment beyond
// that of their type's first member: 2 bytes for every block type, 4 for F32.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/status.h"

namespace fk::model {

enum class WeightType : uint8_t {
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
  kInt8Grouped,  // llama2.c version 2: int8, with float scales per group in an array of their own
};
constexpr int kWeightTypes = 12;

struct WeightTypeInfo {
  const char* name;  // as GGUF spells it, such as "Q4_1"
  int block;         // weights in a block
  int bytes;         // bytes of a block
};
const WeightTypeInfo& type_info(WeightType type);
// Finds a type by GGUF's name in upper or lower case, such as "q4_1"; returns false if there is
// none.
bool find_type(const char* name, WeightType* type);

// These are the blocks, as they lie in files. d, m and dmin are the bits of float16 numbers, and x
// is the weight that code q stands for. Low nibbles hold the first half of a block of 32, high
// nibbles the second.
struct BlockQ8_0 {  // x = d * q
  uint16_t d;
  int8_t q[32];
};
struct BlockQ4_0 {  // x = d * (q - 8)
  uint16_t d;
  uint8_t q[16];
};
struct BlockQ4_1 {  // x = d * q + m
  uint16_t d;
  uint16_t m;
  uint8_t q[16];
};
struct BlockQ5_0 {  // x = d * (q - 16), bit 4 of weight i is bit i of `high` (little endian)
  uint16_t d;
  uint8_t high[4];
  uint8_t q[16];
};
struct BlockQ5_1 {  // x = d * q + m
  uint16_t d;
  uint16_t m;
  uint8_t high[4];
  uint8_t q[16];
};
// The K types have blocks of 256 weights. In Q4_K and Q5_K these are 8 groups of 32, each with a
// 6-bit scale and minimum (see `unpack_scales_k`): x = d * scale * q - dmin * minimum.
struct BlockQ4_K {
  uint16_t d;
  uint16_t dmin;
  uint8_t scales[12];
  uint8_t q[128];  // 32 bytes hold groups 2i (low nibbles) and 2i + 1 (high nibbles)
};
struct BlockQ5_K {
  uint16_t d;
  uint16_t dmin;
  uint8_t scales[12];
  uint8_t high[32];  // bit g of byte i is bit 4 of weight i of group g
  uint8_t q[128];
};
struct BlockQ6_K {  // 16 groups of 16: x = d * scale * (q - 32)
  uint8_t low[128];
  uint8_t high[64];
  int8_t scales[16];
  uint16_t d;
};
static_assert(sizeof(BlockQ8_0) == 34 && sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20);
static_assert(sizeof(BlockQ5_0) == 22 && sizeof(BlockQ5_1) == 24 && sizeof(BlockQ4_K) == 144);
static_assert(sizeof(BlockQ5_K) == 176 && sizeof(BlockQ6_K) == 210);

// Copies block number `index` out of data of any alignment.
template <class Block>
Block read_block(const void* data, int64_t index = 0) {
  Block block;
  std::memcpy(&block, static_cast<const char*>(data) + index * sizeof(Block), sizeof(Block));
  return block;
}

// Unpacks the 8 scales and 8 minima of a Q4_K or Q5_K block, of 6 bits each.
inline void unpack_scales_k(const uint8_t packed[12], uint8_t scale[8], uint8_t minimum[8]) {
  for (int i = 0; i < 4; ++i) {
    scale[i] = packed[i] & 63;
    minimum[i] = packed[i + 4] & 63;
    scale[i + 4] = static_cast<uint8_t>((packed[i + 8] & 15) | (packed[i] >> 6 << 4));
    minimum[i + 4] = static_cast<uint8_t>((packed[i + 8] >> 4) | (packed[i + 4] >> 6 << 4));
  }
}

// Converts float16, given as its bits, to float, which is exact.
inline float half_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t magnitude = bits & 0x7fff;
  uint32_t result;
  if (magnitude >= 0x7c00) {  // infinity, NaN
    result = sign | 0x7f800000 | (magnitude & 0x3ff) << 13;
  } else if (magnitude >= 0x400) {
    result = sign | ((magnitude << 13) + 0x38000000);
  } else {  // zero, subnormal: exact in float
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    std::memcpy(&result, &value, 4);
    result |= sign;
  }
  float value;
  std::memcpy(&value, &result, 4);
  return value;
}

// Converts bfloat16, given as its bits, to float, which is exact.
inline float bfloat16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Converts `count` weights, a multiple of the type's block, from `data` of any alignment to floats
// at `out`. It does nothing for kInt8Grouped, whose scales lie elsewhere: see `read_row` in
// decoder.h.
void dequantize(WeightType type, const void* data, int64_t count, float* out);

}  // namespace fk::model
