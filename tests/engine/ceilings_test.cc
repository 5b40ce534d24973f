// The loops behind the ceilings do what they are counted for, by every instruction set.
#include "engine/ceilings.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "cpu/gemm/bfloat16.h"
#include "cpu/targets.h"
#include "engine/probes.h"

namespace fk::engine {
namespace {

constexpr int64_t kFloats = 3 * cpu::kProbeStep / 4;
constexpr int64_t kBytes = kFloats * 4;

struct alignas(64) Buffer {
  float values[kFloats];

  explicit Buffer(float scale) {
    for (int64_t i = 0; i < kFloats; ++i) values[i] = scale * static_cast<float>(i + 1);
  }
  uint8_t* bytes() { return reinterpret_cast<uint8_t*>(values); }
};

template <class Test>
void on_every_target(const Test& test) {
  for (const std::string& target : cpu::supported_targets()) {
    SCOPED_TRACE(target);
    ASSERT_TRUE(cpu::set_target(target.c_str()));
    test();
  }
  cpu::set_target(nullptr);
}

TEST(Ceilings, LoopsMoveEveryByteThatIsCounted) {
  on_every_target([] {
    for (const cpu::Way way : cpu::kWays) {
      Buffer a(1), b(10), to(0);
      cpu::probe_copy(to.bytes(), a.bytes(), kBytes, way);
      EXPECT_EQ(std::memcmp(to.values, a.values, kBytes), 0);
      cpu::probe_add(to.bytes(), a.bytes(), b.bytes(), kBytes, way);
      for (int64_t i = 0; i < kFloats; ++i) EXPECT_EQ(to.values[i], a.values[i] + b.values[i]);
      cpu::probe_write(to.bytes(), kBytes, way);
      for (const float value : to.values) EXPECT_EQ(value, 1.0f);
    }
    Buffer a(1);
    cpu::probe_update(a.bytes(), kBytes);
    for (int64_t i = 0; i < kFloats; ++i) EXPECT_EQ(a.values[i], 0.5f * static_cast<float>(i + 1));
  });
}

TEST(Ceilings, ReadsSeeEveryByte) {
  on_every_target([] {
    alignas(64) uint8_t bytes[cpu::kProbeStep + 8192] = {};  // prefetches may reach beyond
    for (const cpu::Way way : cpu::kWays) {
      EXPECT_EQ(cpu::probe_read(bytes, cpu::kProbeStep, way), 0u);
      // What it returns is the first of the lanes, all of which it went through.
      for (int64_t i = 0; i < cpu::kProbeStep; i += 64) {
        bytes[i] = 1;
        EXPECT_EQ(cpu::probe_read(bytes, cpu::kProbeStep, way), 1u) << i;
        bytes[i] = 0;
      }
    }
  });
}

TEST(Ceilings, OperationsThatAreCountedAreDone) {
  on_every_target([] {
    // Each sum takes 2^-20 a step, and one of pairs twice that; the first lanes are added up.
    float sink = 0;
    const int64_t flops = cpu::probe_float32(1024, &sink);
    const auto sums = static_cast<int64_t>(sink / (1024 * 0x1p-20f) + 0.5f);
    EXPECT_GT(sums, 0);
    const int64_t lanes = flops / (1024 * sums * 2);
    EXPECT_TRUE(lanes == 4 || lanes == 8 || lanes == 16) << lanes;
    EXPECT_EQ(flops, 1024 * sums * 2 * lanes);
    sink = 0;
    const int64_t products = cpu::probe_bfloat16(1024, &sink);
    EXPECT_EQ(products > 0, cpu::multiplies_bfloat16());
    if (products > 0) {
      const auto sums_of_pairs = static_cast<int64_t>(sink / (1024 * 0x1p-19f) + 0.5f);
      EXPECT_EQ(products, 1024 * sums_of_pairs * 16 * 4);
    }
  });
}

TEST(Ceilings, ByteProductsThatAreCountedAreDone) {
  for (const bool vnni : {true, false}) {
    cpu::set_vnni(vnni);
    on_every_target([] {
      // Each lane of a sum takes 4 a step; the first lanes are added up.
      float sink = 0, more = 0;
      const int64_t operations = cpu::probe_int8(1024, &sink);
      const auto sums = static_cast<int64_t>(sink / (1024 * 4) + 0.5f);
      EXPECT_GT(sums, 0);
      const int64_t lanes = operations / (1024 * sums * 8);
      EXPECT_TRUE(lanes == 4 || lanes == 8 || lanes == 16) << lanes;
      EXPECT_EQ(operations, 1024 * sums * 8 * lanes);
      EXPECT_EQ(cpu::probe_int8(2048, &more), 2 * operations);
      EXPECT_EQ(more, 2 * sink);
    });
  }
  cpu::set_vnni(true);
}

TEST(Ceilings, AreFoundForAnySizeAndThreads) {
  for (const Traffic traffic :
       {Traffic::kRead, Traffic::kWrite, Traffic::kCopy, Traffic::kAdd, Traffic::kUpdate}) {
    for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{100001}, (int64_t{25} << 20) + 3}) {
      for (const int threads : {0, 1, 2, 5}) {
        EXPECT_GT(bytes_per_second(traffic, bytes, threads, 1e-4), 0) << bytes << " " << threads;
      }
    }
  }
  for (const int threads : {0, 1, 5}) {
    EXPECT_GT(flops_per_second(Arithmetic::kFloat32, threads, 1e-4), 0);
    EXPECT_EQ(flops_per_second(Arithmetic::kBfloat16, threads, 1e-4) > 0,
              cpu::multiplies_bfloat16());
    EXPECT_GT(flops_per_second(Arithmetic::kInt8, threads, 1e-4), 0);
  }
  EXPECT_EQ(bytes_per_second(Traffic::kRead, int64_t{1} << 60, 1, 1e-4), 0);
}

}  // namespace
}  // namespace fk::engine
