// Counters of small kernels, against what is counted by hand.
#include "softgpu/check/small_kernel.h"

namespace fk::softgpu {
namespace {

class CountersTest : public SmallKernel {
 protected:
  // Every lane loads a word, `stride` words from its neighbour's.
  Counters of_stride(int stride) {
    auto* data = put<uint32_t>(std::vector<uint32_t>(2048));
    const LaunchResult result =
        run(text(1, "mul.wide.u32 %rd8, %r0, " + std::to_string(4 * stride) +
                        ";\nadd.s64 %rd9, %rd0, %rd8;\nld.global.u32 %r5, [%rd9];"),
            {data});
    EXPECT_TRUE(result.ok()) << all(result);
    return result.counters;
  }
  // The same of shared memory, where a vector of `words` is stored.
  Counters of_shared(int stride, int words) {
    shared_bytes_ = 16384;
    const std::string vector = words == 1   ? "st.shared.u32 [%r21], %r0;"
                               : words == 2 ? "st.shared.v2.u32 [%r21], {%r0, %r0};"
                                            : "st.shared.v4.u32 [%r21], {%r0, %r0, %r0, %r0};";
    const LaunchResult result = run(text(0, "mov.u32 %r20, dynamic;\nmad.lo.s32 %r21, %r0, " +
                                                std::to_string(4 * stride) + ", %r20;\n" + vector),
                                    {});
    EXPECT_TRUE(result.ok()) << all(result);
    return result.counters;
  }
};

TEST_F(CountersTest, Sectors) {
  EXPECT_EQ(of_stride(1).global_load_sectors, 4u);
  EXPECT_EQ(of_stride(2).global_load_sectors, 8u);
  EXPECT_EQ(of_stride(8).global_load_sectors, 32u);
  EXPECT_EQ(of_stride(0).global_load_sectors, 1u);
  EXPECT_EQ(of_stride(1).global_load_bytes, 128u);
  EXPECT_EQ(of_stride(1).global_load_requests, 1u);
  EXPECT_EQ(of_stride(8).global_unique_bytes, 1024u);
}

TEST_F(CountersTest, BankConflicts) {
  EXPECT_EQ(of_shared(1, 1).shared_store_wavefronts, 1u);
  EXPECT_EQ(of_shared(2, 1).shared_store_wavefronts, 2u);
  EXPECT_EQ(of_shared(32, 1).shared_store_wavefronts, 32u);
  EXPECT_EQ(of_shared(33, 1).shared_store_conflicts, 0u);
  EXPECT_EQ(of_shared(4, 4).shared_store_wavefronts, 4u);
  EXPECT_EQ(of_shared(4, 4).shared_store_conflicts, 0u);
  EXPECT_EQ(of_shared(32, 4).shared_store_wavefronts, 32u);
  EXPECT_EQ(of_shared(2, 2).shared_store_conflicts, 0u);
}

TEST_F(CountersTest, Instructions) {
  const LaunchResult result =
      run(text(0,
               "mov.u32 %r10, 0;\n$loop:\nadd.s32 %r10, %r10, 1;\nsetp.lt.u32 %p1, %r10, 5;\n"
               "@%p1 bra $loop;\nfma.rn.f32 %f1, %f2, %f3, %f4;"),
          {}, 80, 3);
  const Counters& c = result.counters;
  // For each of 3 blocks of 3 warps: two moves ahead of the text, one in it, 5 times the loop, fma
  // and ret.
  EXPECT_EQ(c.warp_instructions, 9u * (2 + 1 + 15 + 1 + 1));
  EXPECT_EQ(c.lane_instructions, 3u * 80 * (2 + 1 + 15 + 1 + 1) - 3 * 80);  // the last bra has none
  EXPECT_EQ(c.by_class.at("fma"), 9u);
  EXPECT_EQ(c.by_class.at("branch"), 9u * 6);
  EXPECT_EQ(c.blocks, 3u);
  EXPECT_EQ(c.warps, 9u);
  EXPECT_NE(c.to_json().find("\"warp_instructions\":180"), std::string::npos);
}

TEST_F(CountersTest, TheSameOnEveryRun) {
  options_.seed = 5;
  auto* data = put<uint32_t>(std::vector<uint32_t>(32));
  const std::string kernel = text(1,
                                  "mul.wide.u32 %rd8, %r0, 4;\nadd.s64 %rd9, %rd0, %rd8;\n"
                                  "red.global.add.u32 [%rd9], %r0;\nbar.sync 0;");
  const std::string first = run(kernel, {data}, 32, 20).counters.to_json();
  EXPECT_EQ(run(kernel, {data}, 32, 20).counters.to_json(), first);
}

}  // namespace
}  // namespace fk::softgpu
