// How the CPU kernels round to 16-bit floats, on every instruction set, bit by bit. Rope stands for
// all of them, which share cpu/simd.h: a pair (1, 0) turns into the very cosine and sine.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "core/access.h"
#include "cpu/targets.h"
#include "ops/rope/rope.h"

namespace fk {
namespace {

Tensor contiguous(void* data, DType dtype, std::vector<int64_t> shape) {
  Tensor t;
  t.data = data;
  t.dtype = dtype;
  t.defined = true;
  t.ndim = static_cast<int32_t>(shape.size());
  int64_t stride = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.strides[i] = stride;
    stride *= shape[i];
  }
  return t;
}

// Every sign, exponent and leading 7 bits of the mantissa, each followed by what lies on, and just
// beside, the middle between two bfloat16 or two float16. Neighbours differ, so that no lane can
// stand for another; not a multiple of a vector in all.
std::vector<float> hard_to_round() {
  std::vector<float> values;
  for (uint32_t lower :
       {0u, 1u, 0xFFFu, 0x1000u, 0x1001u, 0x3000u, 0x7FFFu, 0x8000u, 0x8001u, 0xF000u, 0xFFFFu}) {
    for (uint32_t upper = 0; upper < 0x10000; ++upper) {
      const uint32_t bits = upper << 16 | lower;
      float value;
      std::memcpy(&value, &bits, sizeof(value));
      values.push_back(value);
    }
  }
  values.push_back(1.5f);
  return values;
}

template <int kMantissa>
void expect_nearest_even(DType dtype) {
  std::vector<float> cos = hard_to_round(), sin(cos.size(), 0.0f);
  const auto n = static_cast<int64_t>(cos.size());
  std::vector<uint16_t> expected, x(2 * cos.size(), 0), y(x.size());
  for (float value : cos) expected.push_back(encode_float16<kMantissa>(value));
  std::fill_n(x.begin(), n, encode_float16<kMantissa>(1));
  RopeFwd rope;
  rope.x = contiguous(x.data(), dtype, {1, 1, 1, 2 * n});
  rope.y = contiguous(y.data(), dtype, {1, 1, 1, 2 * n});
  rope.cos = contiguous(cos.data(), DType::kFloat32, {1, n});
  rope.sin = contiguous(sin.data(), DType::kFloat32, {1, n});
  for (const std::string& target : cpu::supported_targets()) {
    SCOPED_TRACE(target);
    ASSERT_TRUE(cpu::set_target(target.c_str()));
    std::fill(y.begin(), y.end(), 0xABCD);
    ASSERT_TRUE(cpu::run(rope, Exec(fk_exec{})).ok());
    for (int64_t i = 0; i < n && !testing::Test::HasFailure(); ++i) {
      if (std::isnan(cos[i])) {
        EXPECT_TRUE(std::isnan(decode_float16<kMantissa>(y[i]))) << "NaN became " << y[i];
      } else {
        EXPECT_EQ(y[i], expected[i]) << cos[i];
      }
    }
  }
  cpu::set_target(nullptr);
}

TEST(Rounding, BFloat16) { expect_nearest_even<7>(DType::kBFloat16); }
TEST(Rounding, Float16) { expect_nearest_even<10>(DType::kFloat16); }

}  // namespace
}  // namespace fk
