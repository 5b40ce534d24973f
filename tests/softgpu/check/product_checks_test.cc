// This file tests the checks of wgmma, tensor copies and what blocks of a cluster send each other,
// each with a faulty kernel that it catches.
#include <cmath>

#include "softgpu/check/small_tiles.h"

namespace fk::softgpu {
namespace {

constexpr size_t kTileBytes = 32768 + 16;  // of two tiles, with an mbarrier behind
const char* const kFence = "wgmma.fence.sync.aligned;\n";
// This makes a second mbarrier, at %r13.
const char* const kSecond =
    "add.s32 %r13, %r11, 8;\n@%p3 bra $second;\nmbarrier.init.shared::cta.b64 [%r13], 1;\n"
    "fence.proxy.async.shared::cta;\n$second:\nbar.sync 0;\n";
const char* const kWait = "wgmma.wait_group.sync.aligned 0;\n";

class ProductChecks : public Tiles {
 protected:
  void SetUp() override {
    shared_bytes_ = kTileBytes;
    const std::vector<uint16_t> ones(64 * 64, 0x3f80);
    map_ = map_of(put(ones), 64, 64, 64);
    out_ = space<float>(64 * 64);
  }
  // Multiplies 64 x 64 x 64 ones; `behind` stands between the commit and the loads of the result.
  LaunchResult product(const std::string& behind, uint32_t threads = 128) {
    return run(text(3, multiply(64, "0", kSecond + std::string(kFence), behind)),
               {map_, map_, out_}, threads);
  }
  // Returns one more product, into registers from `first` on, of the tile at descriptor %rd25.
  static std::string one_more(int first) {
    std::string d;
    for (int i = 0; i < 32; ++i) d += (i == 0 ? "%f" : ", %f") + std::to_string(first + i);
    return "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" + d +
           "}, %rd25, %rd22, %p5, 1, 1, 0, 0;\nwgmma.commit_group.sync.aligned;\n";
  }

  void* map_ = nullptr;
  float* out_ = nullptr;
};

// The copy engine writes over the first tile, with zeros, before anybody waited for the product.
std::string overwrite() {
  std::string load = load_tile("%r10", 0, 0, 64);
  load.replace(load.find("[%r11]"), 6, "[%r13]");
  return "@%p3 bra $again;\nmbarrier.arrive.expect_tx.shared::cta.b64 _, [%r13], 8192;\n" + load +
         "$again:\n$loop2:\nmbarrier.try_wait.parity.shared::cta.b64 %p1, [%r13], 0;\n"
         "@!%p1 bra $loop2;\n";
}

TEST_F(ProductChecks, CopiesOverWhatIsMultiplied) {
  options_.check_races = true;
  LaunchResult result = product(kWait);
  EXPECT_TRUE(result.ok()) << all(result);
  EXPECT_EQ(out_[0], 64.0f);
  expect_problem(product(overwrite() + kWait), Problem::kRace, "a copy to a place");
  // Behind the wait and a barrier nobody reads it any more.
  result = product(kWait + std::string("bar.sync 0;\n") + overwrite());
  EXPECT_TRUE(result.ok()) << all(result);
  EXPECT_EQ(out_[0], 64.0f);
  // A kernel that may read what is written meanwhile shows a mistake in its result alone.
  options_.report_overwritten_products = false;
  result = product(overwrite() + kWait);
  EXPECT_TRUE(result.ok()) << all(result);
  EXPECT_TRUE(std::isnan(out_[0]));
}

TEST_F(ProductChecks, RegistersOfAProductUnderWay) {
  const std::string same = "mov.b64 %rd25, %rd21;\n";
  EXPECT_TRUE(product(same + one_more(10) + kWait).ok());
  expect_problem(product(same + one_more(11) + kWait), Problem::kPending, "in another place");
}

TEST_F(ProductChecks, MatricesThatAreNotThere) {
  expect_problem(product("add.s64 %rd25, %rd21, 3072;\n" + one_more(10) + kWait),
                 Problem::kOutOfBounds, "a matrix that reaches out");
  expect_problem(product(kWait, 96), Problem::kBarrier, "without whole warpgroups");
}

TEST_F(ProductChecks, TensorCopiesOfWhatIsNotThere) {
  const auto load = [](const std::string& more, int map) {
    return "mov.u32 %r10, dynamic;\nadd.s32 %r11, %r10, 32768;\n"
           "mbarrier.init.shared::cta.b64 [%r11], 1;\nfence.proxy.async.shared::cta;\n"
           "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r11], 8192;\nadd.s32 %r12, %r10, " +
           more + ";\n" + load_tile("%r12", map, 0, 0) +
           "$loop:\nmbarrier.try_wait.parity.shared::cta.b64 %p1, [%r11], 0;\n@!%p1 bra $loop;\n";
  };
  EXPECT_TRUE(run(text(2, load("8192", 0)), {map_, out_}, 1).ok());
  expect_problem(run(text(2, load("8192", 1)), {map_, out_}, 1), Problem::kOther, "no tensor map");
  expect_problem(run(text(2, load("64", 0)), {map_, out_}, 1), Problem::kMisaligned, "multiple of");
  expect_problem(run(text(2, load("28672", 0)), {map_, out_}, 1), Problem::kOutOfBounds,
                 "out of shared memory");
  std::string flat = load("8192", 0);
  flat.replace(flat.find("{%r40, %r41}"), 12, "{%r40}")
      .replace(flat.find("tensor.2d"), 9, "tensor.1d");
  expect_problem(run(text(2, flat), {map_, out_}, 1), Problem::kOther, "rank");
}

// Each block of a pair sends its threads' numbers to the other one, which waits for them.
std::string send(const std::string& barrier, const std::string& wait) {
  return kOwnShared +
         std::string(
             "add.s32 %r11, %r19, 256;\nsetp.ne.u32 %p3, %r0, 0;\n@%p3 bra $made;\n"
             "mbarrier.init.shared::cta.b64 [%r11], 1;\n"
             "fence.mbarrier_init.release.cluster;\n"
             "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r11], 256;\n$made:\n"
             "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
             "mov.u32 %r30, %cluster_ctarank;\nxor.b32 %r30, %r30, 1;\n"
             "mapa.shared::cluster.u32 %r31, %r20, %r30;\n"
             "mapa.shared::cluster.u32 %r32, %r11, %r30;\n"
             "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r31], %r0, "
             "[") +
         barrier + "];\n" + wait +
         "ld.shared.u32 %r5, [%r21];\nmad.lo.s32 %r6, %r1, 64, %r0;\nmul.wide.u32 %rd8, %r6, 4;\n"
         "add.s64 %rd9, %rd0, %rd8;\nst.global.u32 [%rd9], %r5;\n"
         "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n";
}

TEST_F(ProductChecks, WhatAnotherBlockSends) {
  options_.check_races = true;
  shared_bytes_ = 264;
  cluster_ = 2;
  auto* out = space<uint32_t>(128);
  const std::string wait =
      "$loop:\nmbarrier.try_wait.parity.shared::cta.b64 %p1, [%r11], 0;\n@!%p1 bra $loop;\n";
  for (const uint64_t seed : {0, 1, 2}) {
    options_.seed = seed;
    const LaunchResult right = run(text(1, send("%r32", wait)), {out}, 64, 2);
    EXPECT_TRUE(right.ok()) << all(right);
    EXPECT_EQ(out[0], 32u);
    EXPECT_EQ(out[127], 31u);
    EXPECT_FALSE(run(text(1, send("%r32", "")), {out}, 64, 2).ok());
  }
  options_.seed = 0;
  expect_problem(run(text(1, send("%r11", wait)), {out}, 64, 2), Problem::kBarrier,
                 "another block than the data");
}

TEST_F(ProductChecks, ClustersUsedWrongly) {
  cluster_ = 2;
  expect_problem(
      run(text(0, "mov.u32 %r2, 5;\nmov.u32 %r3, 1024;\nmapa.shared::cluster.u32 %r4, %r3, %r2;"),
          {}, 32, 2),
      Problem::kOutOfBounds, "block 5 of a cluster of 2");
  expect_problem(run(text(0, "barrier.cluster.wait.aligned;"), {}, 32, 2), Problem::kBarrier,
                 "without an arrival");
  expect_problem(run(text(0, "setmaxnreg.dec.sync.aligned.u32 25;"), {}, 128, 2), Problem::kOther,
                 "a multiple of 8");
}

}  // namespace
}  // namespace fk::softgpu
