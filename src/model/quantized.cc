// Expands each block type to floats, with the same arithmetic as ggml's.
#include "model/quantized.h"

#include <strings.h>

namespace fk::model {
namespace {

constexpr WeightTypeInfo kInfo[kWeightTypes] = {
    {"F32", 1, 4},      {"F16", 1, 2},      {"BF16", 1, 2},     {"Q8_0", 32, 34},
    {"Q4_0", 32, 18},   {"Q4_1", 32, 20},   {"Q5_0", 32, 22},   {"Q5_1", 32, 24},
    {"Q4_K", 256, 144}, {"Q5_K", 256, 176}, {"Q6_K", 256, 210}, {"I8_GROUPED", 1, 1},
};

// These convert one block to floats; there is an `expand` for each block type.
void expand(const BlockQ8_0& b, float* out) {
  const float d = half_to_float(b.d);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(b.q[i]);
}

void expand(const BlockQ4_0& b, float* out) {
  const float d = half_to_float(b.d);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * static_cast<float>((b.q[i] & 15) - 8);
    out[i + 16] = d * static_cast<float>((b.q[i] >> 4) - 8);
  }
}

void expand(const BlockQ4_1& b, float* out) {
  const float d = half_to_float(b.d), m = half_to_float(b.m);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * static_cast<float>(b.q[i] & 15) + m;
    out[i + 16] = d * static_cast<float>(b.q[i] >> 4) + m;
  }
}

// Returns bit 4 of weight i, as 0 or 16.
int fifth_bit(const uint8_t high[4], int i) { return (high[i / 8] >> (i % 8) & 1) << 4; }

void expand(const BlockQ5_0& b, float* out) {
  const float d = half_to_float(b.d);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * static_cast<float>(((b.q[i] & 15) | fifth_bit(b.high, i)) - 16);
    out[i + 16] = d * static_cast<float>(((b.q[i] >> 4) | fifth_bit(b.high, i + 16)) - 16);
  }
}

void expand(const BlockQ5_1& b, float* out) {
  const float d = half_to_float(b.d), m = half_to_float(b.m);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * static_cast<float>((b.q[i] & 15) | fifth_bit(b.high, i)) + m;
    out[i + 16] = d * static_cast<float>((b.q[i] >> 4) | fifth_bit(b.high, i + 16)) + m;
  }
}

// Expands eight groups of 32 codes, each with a scale and a minimum. high(group, i) returns the
// bits of code i above its four low ones.
template <class Block, class High>
void expand_groups(const Block& b, float* out, const High& high) {
  uint8_t scale[8], minimum[8];
  unpack_scales_k(b.scales, scale, minimum);
  const float d = half_to_float(b.d), dmin = half_to_float(b.dmin);
  for (int group = 0; group < 8; ++group) {
    const float s = d * scale[group], m = dmin * minimum[group];
    for (int i = 0; i < 32; ++i) {
      const int low = b.q[group / 2 * 32 + i] >> (group % 2 * 4) & 15;
      *out++ = s * static_cast<float>(low | high(group, i)) - m;
    }
  }
}

void expand(const BlockQ4_K& b, float* out) {
  expand_groups(b, out, [](int, int) { return 0; });
}

void expand(const BlockQ5_K& b, float* out) {
  expand_groups(b, out, [&](int group, int i) { return (b.high[i] >> group & 1) << 4; });
}

void expand(const BlockQ6_K& b, float* out) {
  const float d = half_to_float(b.d);
  for (int i = 0; i < 256; ++i) {
    // The block has two halves of 128. The four runs of 32 in a half share 64 bytes of low bits and
    // 32 bytes of high bits.
    const int half = i / 128, run = i % 128 / 32, j = i % 32;
    const int low = b.low[half * 64 + run % 2 * 32 + j] >> (run / 2 * 4) & 15;
    const int high = b.high[half * 32 + j] >> (run * 2) & 3;
    const float scale = d * static_cast<float>(b.scales[i / 16]);
    out[i] = scale * static_cast<float>((low | high << 4) - 32);
  }
}

// Expands `count` weights in blocks of `block`.
template <class Block>
void expand_all(const void* data, int64_t count, int block, float* out) {
  for (int64_t i = 0; i < count / block; ++i) expand(read_block<Block>(data, i), out + i * block);
}

}  // namespace

const WeightTypeInfo& type_info(WeightType type) { return kInfo[static_cast<int>(type)]; }

bool find_type(const char* name, WeightType* type) {
  for (int i = 0; i < kWeightTypes; ++i) {
    if (strcasecmp(name, kInfo[i].name) == 0) {
      *type = static_cast<WeightType>(i);
      return true;
    }
  }
  return false;
}

void dequantize(WeightType type, const void* data, int64_t count, float* out) {
  switch (type) {
    case WeightType::kF32:
      std::memcpy(out, data, static_cast<size_t>(count) * 4);
      return;
    case WeightType::kF16:
      for (int64_t i = 0; i < count; ++i) out[i] = half_to_float(read_block<uint16_t>(data, i));
      return;
    case WeightType::kBF16:
      for (int64_t i = 0; i < count; ++i) out[i] = bfloat16_to_float(read_block<uint16_t>(data, i));
      return;
    case WeightType::kQ8_0:
      return expand_all<BlockQ8_0>(data, count, 32, out);
    case WeightType::kQ4_0:
      return expand_all<BlockQ4_0>(data, count, 32, out);
    case WeightType::kQ4_1:
      return expand_all<BlockQ4_1>(data, count, 32, out);
    case WeightType::kQ5_0:
      return expand_all<BlockQ5_0>(data, count, 32, out);
    case WeightType::kQ5_1:
      return expand_all<BlockQ5_1>(data, count, 32, out);
    case WeightType::kQ4_K:
      return expand_all<BlockQ4_K>(data, count, 256, out);
    case WeightType::kQ5_K:
      return expand_all<BlockQ5_K>(data, count, 256, out);
    case WeightType::kQ6_K:
      return expand_all<BlockQ6_K>(data, count, 256, out);
    case WeightType::kInt8Grouped:
      return;
  }
}

}  // namespace fk::model
