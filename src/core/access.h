// References read and write elements through these functions: any floating dtype as double, any
// index dtype as int64. They are written to be obviously right, not fast.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/tensor.h"

namespace fk {

// Reads a 16-bit float that stores `kMantissa` bits of its mantissa: float16 has 10, bfloat16
// has 7.
template <int kMantissa>
double decode_float16(uint16_t bits) {
  constexpr int kExponent = 15 - kMantissa;
  constexpr int kMaxExponent = (1 << kExponent) - 1;
  constexpr int kBias = kMaxExponent >> 1;
  const int exponent = (bits >> kMantissa) & kMaxExponent;
  const int mantissa = bits & ((1 << kMantissa) - 1);
  double magnitude;
  if (exponent == kMaxExponent) {
    magnitude = mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                              : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {  // subnormal: no implicit leading 1
    magnitude = std::ldexp(mantissa, 1 - kBias - kMantissa);
  } else {
    magnitude = std::ldexp(mantissa + (1 << kMantissa), exponent - kBias - kMantissa);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

// Rounds to the nearest, ties to even, straight from double: rounding to float first would round
// twice.
template <int kMantissa>
uint16_t encode_float16(double value) {
  constexpr int kExponent = 15 - kMantissa;
  constexpr int kMaxExponent = (1 << kExponent) - 1;
  constexpr int kBias = kMaxExponent >> 1;
  constexpr uint16_t kInfinity = kMaxExponent << kMantissa;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | kInfinity | (1 << (kMantissa - 1));
  if (std::isinf(value)) return sign | kInfinity;
  if (value == 0) return sign;
  // Count in units of the last stored bit, which below the normal range stops getting smaller. The
  // leading 1 of a normal number then adds itself to the exponent field, as does a carry.
  const int exponent = std::max(std::ilogb(value), 1 - kBias);
  const double units = std::nearbyint(std::ldexp(std::fabs(value), kMantissa - exponent));
  const int64_t bits =
      (static_cast<int64_t>(exponent + kBias - 1) << kMantissa) + static_cast<int64_t>(units);
  return sign | static_cast<uint16_t>(std::min<int64_t>(bits, kInfinity));
}

// Reads an e4m3fn: sign, 4 bits of exponent, 3 of mantissa. All ones but the sign is NaN; where an
// infinity would be, there are numbers, up to 448.
inline double decode_float8(uint8_t bits) {
  const int exponent = (bits >> 3) & 15, mantissa = bits & 7;
  double magnitude;
  if (exponent == 15 && mantissa == 7) {
    magnitude = std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, -9);
  } else {
    magnitude = std::ldexp(8 + mantissa, exponent - 10);
  }
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

// Rounds to the nearest, ties to even. What is larger than the largest number becomes NaN, as in
// ml_dtypes and torch.
inline uint8_t encode_float8(double value) {
  constexpr uint8_t kNaN = 0x7f;
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (!std::isfinite(value)) return sign | kNaN;
  if (value == 0) return sign;
  const int exponent = std::max(std::ilogb(value), -6);
  const double units = std::nearbyint(std::ldexp(std::fabs(value), 3 - exponent));
  const int64_t bits = (static_cast<int64_t>(exponent + 6) << 3) + static_cast<int64_t>(units);
  return sign | static_cast<uint8_t>(std::min<int64_t>(bits, kNaN));
}

// Reads the element `offset` (in elements) past the start of a tensor of any floating dtype.
inline double load(const Tensor& t, int64_t offset) {
  switch (t.dtype) {
    case DType::kFloat16:
      return decode_float16<10>(t.ptr<const uint16_t>()[offset]);
    case DType::kBFloat16:
      return decode_float16<7>(t.ptr<const uint16_t>()[offset]);
    case DType::kFloat8E4M3:
      return decode_float8(t.ptr<const uint8_t>()[offset]);
    default:
      return t.ptr<const float>()[offset];
  }
}

inline void store(const Tensor& t, int64_t offset, double value) {
  switch (t.dtype) {
    case DType::kFloat16:
      t.ptr<uint16_t>()[offset] = encode_float16<10>(value);
      break;
    case DType::kBFloat16:
      t.ptr<uint16_t>()[offset] = encode_float16<7>(value);
      break;
    case DType::kFloat8E4M3:
      t.ptr<uint8_t>()[offset] = encode_float8(value);
      break;
    default:
      t.ptr<float>()[offset] = static_cast<float>(value);
      break;
  }
}

// Gives what `value` becomes when it is stored as `dtype`.
inline double round_to(DType dtype, double value) {
  switch (dtype) {
    case DType::kFloat16:
      return decode_float16<10>(encode_float16<10>(value));
    case DType::kBFloat16:
      return decode_float16<7>(encode_float16<7>(value));
    case DType::kFloat8E4M3:
      return decode_float8(encode_float8(value));
    default:
      return static_cast<float>(value);
  }
}

// Reads the element `offset` past the start of an int32 or int64 tensor.
inline int64_t load_index(const Tensor& t, int64_t offset) {
  return t.dtype == DType::kInt64 ? t.ptr<const int64_t>()[offset] : t.ptr<const int32_t>()[offset];
}

// Tells whether a tensor's values can be checked: it has data, in memory that the CPU can read. (A
// workspace query comes without data; values on a GPU are not read.)
inline bool readable(const Tensor& t) {
  return t.defined && t.device == Device::kCpu && t.data != nullptr;
}

}  // namespace fk
