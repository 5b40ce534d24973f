// This file converts float formats of 8 and 16 bits to and from float. Loops over these become
// vector code.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace fk::softgpu {

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The GPU gives this for every operation whose result is no number.
constexpr uint32_t kNan = 0x7fffffff;
inline float canonical(float x) { return x != x ? float_of(kNan) : x; }

inline float bfloat16_to_float(uint32_t low) { return float_of(low << 16); }
// Rounds to nearest even.
inline uint32_t float_to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return x != x ? 0x7fff : rounded;
}

inline float half_to_float(uint32_t low) {
#if defined(__F16C__)
  return _cvtsh_ss(static_cast<uint16_t>(low));
#else
  const uint32_t sign = (low & 0x8000) << 16, magnitude = low & 0x7fff;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | ((magnitude & 0x3ff) << 13));
  return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
#endif
}
inline uint32_t float_to_half(float x) {
  if (x != x) return 0x7fff;
#if defined(__F16C__)
  return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  const uint32_t sign = (bits_of(x) >> 16) & 0x8000, magnitude = bits_of(x) & 0x7fffffff;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;
  if (magnitude < 0x38800000) {  // the sum rounds at the place of the smallest half
    return sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f));
  }
  return sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13);
#endif
}

inline float e4m3_to_float(uint32_t low) {
  const uint32_t sign = (low & 0x80) << 24, magnitude = low & 0x7f;
  if (magnitude == 0x7f) return float_of(kNan);
  const float value = magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f
                                    : float_of((magnitude << 20) + ((127u - 7u) << 23));
  return float_of(bits_of(value) | sign);
}
// Rounds to nearest even; beyond the largest number, that one.
inline uint32_t float_to_e4m3(float x) {
  if (x != x) return 0x7f;
  const uint32_t sign = (bits_of(x) >> 24) & 0x80;
  const float magnitude = std::fabs(x);
  if (magnitude >= 448) return sign | 0x7e;
  if (magnitude < 0x1p-6f) {
    return sign | static_cast<uint32_t>(std::nearbyint(magnitude * 0x1p9f));
  }
  const uint32_t bits = bits_of(magnitude);
  const uint32_t rounded = (bits + 0x7ffff + ((bits >> 20) & 1)) >> 20;
  return sign | (rounded - ((127u - 7u) << 3));
}

// These convert arrays of any multiple of 8 elements.
inline void halves_to_floats(const uint16_t* from, float* to, int count) {
#if defined(__F16C__)
  for (int i = 0; i < count; i += 8) {
    _mm256_storeu_ps(to + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#else
  for (int i = 0; i < count; ++i) to[i] = half_to_float(from[i]);
#endif
}
inline void bfloat16s_to_floats(const uint16_t* from, float* to, int count) {
  for (int i = 0; i < count; ++i) to[i] = bfloat16_to_float(from[i]);
}

struct HalfElements {
  static void expand(const uint16_t* from, float* to, int count) {
    halves_to_floats(from, to, count);
  }
};
struct Bfloat16Elements {
  static void expand(const uint16_t* from, float* to, int count) {
    bfloat16s_to_floats(from, to, count);
  }
};

}  // namespace fk::softgpu
