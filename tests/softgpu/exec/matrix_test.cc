// This file compares matrix instructions with sums in plain loops.
#include <cmath>
#include <functional>

#include "softgpu/check/small_tiles.h"

namespace fk::softgpu {
namespace {

uint16_t bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>(bits >> 16);  // of small integers: exact
}
float small_number(int i) { return static_cast<float>((i * 37 + 11) % 17 - 8); }

class Matrices : public SmallKernel {};

TEST_F(Matrices, MultiplyOfAWarp) {
  // a is 16 x 16 and b is 16 x 8, both by fragments; every lane loads its own words.
  std::vector<float> a(256), b(128);
  for (int i = 0; i < 256; ++i) a[i] = small_number(i);
  for (int i = 0; i < 128; ++i) b[i] = small_number(3 * i + 1);
  std::vector<uint16_t> words;
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int part = 0; part < 4; ++part) {
      for (int e = 0; e < 2; ++e) {
        words.push_back(bfloat16(a[(g + 8 * (part % 2)) * 16 + 2 * t + e + 8 * (part / 2)]));
      }
    }
    for (int part = 0; part < 2; ++part) {
      for (int e = 0; e < 2; ++e) words.push_back(bfloat16(b[(2 * t + e + 8 * part) * 8 + g]));
    }
    for (int pad = 0; pad < 4; ++pad) words.push_back(0);
  }
  auto* in = put(words);
  auto* out = space<float>(128);
  const LaunchResult result =
      run(text(2,
               "mul.wide.u32 %rd8, %r0, 32;\nadd.s64 %rd9, %rd0, %rd8;\n"
               "ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd9];\n"
               "ld.global.v2.u32 {%r14, %r15}, [%rd9+16];\n"
               "mov.f32 %f1, 0f3f800000;\nmov.f32 %f2, 0f3f800000;\nmov.f32 %f3, 0f3f800000;\n"
               "mov.f32 %f4, 0f3f800000;\n"
               "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4}, "
               "{%r10, %r11, %r12, %r13}, {%r14, %r15}, {%f1, %f2, %f3, %f4};\n"
               "mul.wide.u32 %rd10, %r0, 16;\nadd.s64 %rd11, %rd1, %rd10;\n"
               "st.global.v4.f32 [%rd11], {%f1, %f2, %f3, %f4};"),
          {in, out});
  ASSERT_TRUE(result.ok()) << all(result);
  EXPECT_EQ(result.counters.tensor_flops, 2u * 16 * 8 * 16);
  for (int lane = 0; lane < 32; ++lane) {
    for (int part = 0; part < 4; ++part) {
      const int row = lane / 4 + 8 * (part / 2), column = 2 * (lane % 4) + part % 2;
      float sum = 1;
      for (int k = 0; k < 16; ++k) sum += a[row * 16 + k] * b[k * 8 + column];
      EXPECT_EQ(out[4 * lane + part], sum);
    }
  }
}

TEST_F(Tiles, MultiplyOfAWarpgroup) {
  shared_bytes_ = 32768 + 16;
  options_.check_races = true;
  const std::string fence = "wgmma.fence.sync.aligned;\n";
  const std::string wait = "wgmma.wait_group.sync.aligned 0;\n";
  for (const int n : {64, 128}) {
    for (const std::string major : {"0", "1"}) {
      if (major == "1" && n != 64) continue;
      // There are only 60 rows: the rest of the box is zero.
      std::vector<uint16_t> a(60 * 64), b(static_cast<size_t>(n) * 64);
      std::vector<float> fa(64 * 64), fb(static_cast<size_t>(n) * 64);
      for (size_t i = 0; i < a.size(); ++i)
        a[i] = bfloat16(fa[i] = small_number(static_cast<int>(i)));
      for (size_t i = 0; i < b.size(); ++i) {
        b[i] = bfloat16(fb[i] = small_number(static_cast<int>(5 * i + 2)));
      }
      void* map_a = map_of(put(a), 60, 64, 64);
      void* map_b = map_of(put(b), static_cast<uint64_t>(n), 64, static_cast<uint32_t>(n));
      auto* out = space<float>(static_cast<size_t>(64 * n));
      const LaunchResult result =
          run(text(3, multiply(n, major, fence, wait)), {map_a, map_b, out}, 128);
      ASSERT_TRUE(result.ok()) << all(result);
      EXPECT_EQ(result.counters.tensor_flops, 2u * 64 * static_cast<unsigned>(n) * 64);
      for (int thread = 0; thread < 128; ++thread) {
        for (int i = 0; i < n / 2; ++i) {
          const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * (i / 2 % 2);
          const int column = 8 * (i / 4) + 2 * (thread % 4) + i % 2;
          float sum = 0;
          for (int k = 0; k < 64; ++k) {
            sum += fa[row * 64 + k] * (major == "1" ? fb[k * 64 + column] : fb[column * 64 + k]);
          }
          ASSERT_EQ(out[thread * n / 2 + i], sum)
              << n << " " << major << " " << row << " " << column;
        }
      }
      const LaunchResult unfenced =
          run(text(3, multiply(n, major, "", wait)), {map_a, map_b, out}, 128);
      expect_problem(unfenced, Problem::kMissingFence);
      // What is read too soon is poison, and the warp ends with work under way.
      const LaunchResult unwaited =
          run(text(3, multiply(n, major, fence, "")), {map_a, map_b, out}, 128);
      expect_problem(unwaited, Problem::kUnfinished);
      EXPECT_TRUE(std::isnan(out[0]));
    }
  }
}

TEST(TensorMaps, AreRefusedAsByTheDriver) {
  uint8_t bytes[128];
  TensorMap map;
  map.rank = 2;
  map.element_bytes = 2;
  map.address = 4096;
  map.sizes[0] = map.sizes[1] = 100;
  map.strides[1] = 208;
  map.box[0] = map.box[1] = 64;
  map.swizzle = Swizzle::k128;
  EXPECT_EQ(encode_tensor_map(bytes, map), "");
  TensorMap back;
  ASSERT_TRUE(decode_tensor_map(bytes, &back));
  EXPECT_EQ(back.strides[1], 208u);
  EXPECT_EQ(back.box[1], 64u);
  map.strides[1] = 200;
  EXPECT_NE(encode_tensor_map(bytes, map), "");
  map.strides[1] = 208;
  map.box[0] = 128;
  EXPECT_NE(encode_tensor_map(bytes, map), "");
  map.box[0] = 64;
  map.address = 4104;
  EXPECT_NE(encode_tensor_map(bytes, map), "");
  std::memset(bytes, 0, sizeof bytes);
  EXPECT_FALSE(decode_tensor_map(bytes, &back));
}

}  // namespace
}  // namespace fk::softgpu
