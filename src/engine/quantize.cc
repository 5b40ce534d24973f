// Rounds floats to the block types of GGUF files, as llama.cpp's reference code does.
#include "engine/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace fk::engine {
namespace {

using model::WeightType;

// Truncates `value` to an integer from `low` to `high`; NaN, which has no code, becomes `low`.
int clamped(float value, int low, int high) {
  if (!(value > static_cast<float>(low))) return low;
  return value < static_cast<float>(high) ? static_cast<int>(value) : high;
}

struct Range {
  float low, high, largest;  // `largest` is the value of the largest magnitude, with its sign
};

// Returns the range of a block of 32 values. If one of them is not finite, `high` and `largest` are
// NaN, so that the block's factor and every product with it are NaN too.
Range range_of(const float* x) {
  Range r{x[0], x[0], x[0]};
  float zero = x[0] * 0;
  for (int i = 1; i < 32; ++i) {
    r.low = std::min(r.low, x[i]);
    r.high = std::max(r.high, x[i]);
    if (std::fabs(x[i]) > std::fabs(r.largest)) r.largest = x[i];
    zero += x[i] * 0;
  }
  r.largest += zero;
  r.high += zero;
  return r;
}

// Returns 1 / d, or 0 where that is not a finite float: all codes then are those of 0.
float inverse(float d) { return std::fabs(d) > 1e-38f ? 1 / d : 0; }

// Packs the low four bits of 32 codes into 16 bytes; code i + 16 is in the high nibble of byte i.
void put_nibbles(const uint8_t* q, uint8_t* out) {
  for (int i = 0; i < 16; ++i) out[i] = static_cast<uint8_t>((q[i] & 15) | (q[i + 16] & 15) << 4);
}

// Packs the fifth bits of 32 codes into 4 bytes.
void put_high(const uint8_t* q, uint8_t* high) {
  std::memset(high, 0, 4);
  for (int i = 0; i < 32; ++i) high[i / 8] |= (q[i] >> 4) << (i % 8);
}

// Chooses codes q so that x is close to d * (q - 2^(bits-1)), and returns d as float16. The value
// of the largest magnitude takes code 0, the one code that has no counterpart of the other sign.
uint16_t symmetric(const float* x, int bits, uint8_t* q) {
  const int middle = 1 << (bits - 1);
  const float d = range_of(x).largest / static_cast<float>(-middle);
  const float factor = inverse(d);
  for (int i = 0; i < 32; ++i) {
    q[i] = static_cast<uint8_t>(
        clamped(x[i] * factor + static_cast<float>(middle) + 0.5f, 0, 2 * middle - 1));
  }
  return float_to_half(d);
}

// Chooses codes q so that x is close to d * q + m, and stores d and m as float16.
void with_minimum(const float* x, int bits, uint8_t* q, uint16_t* d16, uint16_t* m16) {
  const int largest = (1 << bits) - 1;
  const Range r = range_of(x);
  const float d = (r.high - r.low) / static_cast<float>(largest);
  const float factor = inverse(d);
  for (int i = 0; i < 32; ++i) {
    q[i] = static_cast<uint8_t>(clamped((x[i] - r.low) * factor + 0.5f, 0, largest));
  }
  *d16 = float_to_half(d);
  *m16 = float_to_half(r.low);
}

// Copies a block to `out`, which need not be aligned.
template <class Block>
void store(const Block& block, uint8_t* out) {
  std::memcpy(out, &block, sizeof block);
}

// Rounds 32 floats to one block of a type with blocks.
void quantize_block(WeightType type, const float* x, uint8_t* out) {
  uint8_t q[32];
  if (type == WeightType::kQ8_0) {
    model::BlockQ8_0 b;
    const float d = std::fabs(range_of(x).largest) / 127;
    const float factor = inverse(d);
    b.d = float_to_half(d);
    for (int i = 0; i < 32; ++i) {
      b.q[i] = static_cast<int8_t>(clamped(std::round(x[i] * factor), -127, 127));
    }
    store(b, out);
  } else if (type == WeightType::kQ4_0) {
    model::BlockQ4_0 b;
    b.d = symmetric(x, 4, q);
    put_nibbles(q, b.q);
    store(b, out);
  } else if (type == WeightType::kQ5_0) {
    model::BlockQ5_0 b;
    b.d = symmetric(x, 5, q);
    put_nibbles(q, b.q);
    put_high(q, b.high);
    store(b, out);
  } else if (type == WeightType::kQ4_1) {
    model::BlockQ4_1 b;
    with_minimum(x, 4, q, &b.d, &b.m);
    put_nibbles(q, b.q);
    store(b, out);
  } else {
    model::BlockQ5_1 b;
    with_minimum(x, 5, q, &b.d, &b.m);
    put_nibbles(q, b.q);
    put_high(q, b.high);
    store(b, out);
  }
}

}  // namespace

bool can_quantize(WeightType type) { return type >= WeightType::kF16 && type <= WeightType::kQ5_1; }

uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x38800000) {  // a subnormal: the last place of 0.5 is the smallest half
    const float shifted = std::fabs(value) + 0.5f;
    uint32_t result;
    std::memcpy(&result, &shifted, 4);
    return static_cast<uint16_t>(sign | (result - 0x3f000000));
  }
  const uint32_t odd = magnitude >> 13 & 1;
  return static_cast<uint16_t>(sign | (magnitude + odd + 0xfff - 0x38000000) >> 13);
}

void narrow(WeightType type, const float* x, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    if (type == WeightType::kF16) {
      out[i] = float_to_half(x[i]);
      continue;
    }
    uint32_t bits;
    std::memcpy(&bits, &x[i], 4);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    out[i] =
        static_cast<uint16_t>(nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

void quantize(WeightType type, const float* x, int64_t count, uint8_t* out) {
  const int bytes = model::type_info(type).bytes;
  for (int64_t i = 0; i < count; i += 32, out += bytes) quantize_block(type, x + i, out);
}

}  // namespace fk::engine
