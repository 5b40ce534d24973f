// Activations as int8, also of values that have none: codes stay in range, sums are those of the
// codes, and what is not finite leaves a scale that says so.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "cpu/targets.h"
#include "engine/kernels.h"

namespace fk::engine {
namespace {

// One block of 32 values: 0.5, and one of another size.
struct Block {
  float x[32];
  int8_t q[32];
  float scale, sum;
  int32_t minus32, minus16[2];

  explicit Block(float value) {
    for (float& each : x) each = 0.5f;
    x[20] = value;
    Activations a;
    a.columns = 32;
    a.x = x;
    a.q = q;
    a.scale = &scale;
    a.sum = &sum;
    a.minus32 = &minus32;
    a.minus16 = minus16;
    quantize(a, 0, 0, 1);
  }

  void expect_sums() const {
    int32_t sums[2] = {};
    for (int i = 0; i < 32; ++i) {
      EXPECT_GE(q[i], -127);
      sums[i / 16] += q[i];
    }
    EXPECT_EQ(minus16[0], -sums[0]);
    EXPECT_EQ(minus16[1], -sums[1]);
    EXPECT_EQ(minus32, -sums[0] - sums[1]);
  }
};

class QuantizeBlocks : public testing::Test {
 protected:
  template <class Body>
  void on_every_target(const Body& body) {
    for (const std::string& target : cpu::supported_targets()) {
      SCOPED_TRACE(target);
      ASSERT_TRUE(cpu::set_target(target.c_str()));
      body();
    }
    cpu::set_target(nullptr);
  }
};

TEST_F(QuantizeBlocks, OrdinaryValues) {
  on_every_target([] {
    for (const float value : {-1.0f, 1.0f, 0.0f, 1e30f, 1e38f}) {
      const Block block(value);
      block.expect_sums();
      EXPECT_TRUE(std::isfinite(block.scale));
      EXPECT_NEAR(block.scale * block.q[20], value, std::fabs(value) * 0.01f + 0.01f);
    }
  });
}

TEST_F(QuantizeBlocks, ValuesThatAreNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  on_every_target([] {
    for (const float value : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
      const Block block(value);
      block.expect_sums();
      EXPECT_TRUE(std::isnan(block.scale)) << value;
    }
  });
}

// The largest of these values is so small that 127 over it is infinite.
TEST_F(QuantizeBlocks, ValuesTooSmallForAFactor) {
  on_every_target([] {
    Block block(0);
    for (float& each : block.x) each = 1e-40f;
    Activations a;
    a.columns = 32;
    a.x = block.x;
    a.q = block.q;
    a.scale = &block.scale;
    a.sum = &block.sum;
    a.minus32 = &block.minus32;
    a.minus16 = block.minus16;
    quantize(a, 0, 0, 1);
    block.expect_sums();
    EXPECT_NEAR(block.scale * block.q[3], 0, 1e-36);
    EXPECT_FALSE(std::isnan(block.scale));
  });
}

}  // namespace
}  // namespace fk::engine
