// This file compares the counters of small kernels with what is counted by hand.
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
  // Does the same with shared memory, where a vector of `words` is stored.
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

// Lanes that ask for the same words as their neighbours are served together, as an H200 counts.
TEST_F(CountersTest, NeighboursWithTheSameWordsShareAPass) {
  shared_bytes_ = 1024;
  options_.report_uninitialised = false;
  // Lane l loads `words` words from the place of lane (l >> shift).
  const auto of_load = [&](int words, int shift) {
    const std::string load = words == 1   ? "ld.shared.u32 %r5, [%r21];"
                             : words == 2 ? "ld.shared.v2.u32 {%r5, %r6}, [%r21];"
                                          : "ld.shared.v4.u32 {%r5, %r6, %r7, %r8}, [%r21];";
    return run(text(0, "mov.u32 %r20, dynamic;\nshr.u32 %r22, %r0, " + std::to_string(shift) +
                           ";\nmad.lo.s32 %r21, %r22, " + std::to_string(4 * words) + ", %r20;\n" +
                           load),
               {})
        .counters.shared_load_wavefronts;
  };
  EXPECT_EQ(of_load(1, 5), 1u);
  EXPECT_EQ(of_load(2, 0), 2u);
  EXPECT_EQ(of_load(2, 1), 1u);
  EXPECT_EQ(of_load(2, 5), 1u);
  EXPECT_EQ(of_load(4, 0), 4u);
  EXPECT_EQ(of_load(4, 1), 2u);
  EXPECT_EQ(of_load(4, 5), 2u);
}

TEST_F(CountersTest, Instructions) {
  const LaunchResult result =
      run(text(0,
               "mov.u32 %r10, 0;\n$loop:\nadd.s32 %r10, %r10, 1;\nsetp.lt.u32 %p1, %r10, 5;\n"
               "@%p1 bra $loop;\nfma.rn.f32 %f1, %f2, %f3, %f4;"),
          {}, 80, 3);
  const Counters& c = result.counters;
  // Each of 3 blocks of 3 warps runs two moves ahead of the text, one in it, 5 times the loop, fma
  // and ret.
  EXPECT_EQ(c.warp_instructions, 9u * (2 + 1 + 15 + 1 + 1));
  EXPECT_EQ(c.lane_instructions, 3u * 80 * (2 + 1 + 15 + 1 + 1) - 3 * 80);  // the last bra has none
  EXPECT_EQ(c.by_class.at("fma"), 9u);
  EXPECT_EQ(c.by_class.at("branch"), 9u * 6);
  EXPECT_EQ(c.blocks, 3u);
  EXPECT_EQ(c.warps, 9u);
  EXPECT_NE(c.to_json().find("\"warp_instructions\":180"), std::string::npos);
}

TEST_F(CountersTest, BytesOfEverySpace) {
  auto* data = put<uint32_t>(std::vector<uint32_t>(64));
  shared_bytes_ = 1024;
  // There are 40 threads: a whole warp, and 8 lanes of another. Each loads 8 bytes of global
  // memory, stores 16 in shared memory, loads 4 of these, adds 4 to global memory and stores 4
  // there.
  const LaunchResult result =
      run(text(1,
               "mov.u32 %r20, dynamic;\nmad.lo.s32 %r21, %r0, 16, %r20;\n"
               "mul.wide.u32 %rd10, %r0, 4;\nadd.s64 %rd11, %rd0, %rd10;\n"
               "ld.global.v2.u32 {%r5, %r6}, [%rd0];\n"
               "st.shared.v4.u32 [%r21], {%r5, %r6, %r5, %r6};\nld.shared.u32 %r7, [%r21+4];\n"
               "red.global.add.u32 [%rd11], %r7;\nst.global.u32 [%rd11], %r7;"),
          {data}, 40);
  ASSERT_TRUE(result.ok()) << all(result);
  const Counters& c = result.counters;
  EXPECT_EQ(c.global_load_bytes, 40u * 8);
  EXPECT_EQ(c.global_load_requests, 2u);
  EXPECT_EQ(c.global_load_sectors, 2u);  // all lanes ask for the same 8 bytes
  EXPECT_EQ(c.global_atomic_bytes, 40u * 4);
  EXPECT_EQ(c.global_store_bytes, 40u * 4);
  EXPECT_EQ(c.global_store_requests, 2u);
  EXPECT_EQ(c.global_store_sectors, 4u + 1);
  EXPECT_EQ(c.global_unique_bytes, 160u);
  EXPECT_EQ(c.shared_store_bytes, 40u * 16);
  EXPECT_EQ(c.shared_load_bytes, 40u * 4);
  // Eight lanes of 16 bytes are 128: four passes for a whole warp, one for eight lanes. Words that
  // are 16 bytes apart share a bank with every eighth.
  EXPECT_EQ(c.shared_store_wavefronts, 4u + 1);
  EXPECT_EQ(c.shared_store_conflicts, 0u);
  EXPECT_EQ(c.shared_load_wavefronts, 4u + 1);
  EXPECT_EQ(c.shared_load_conflicts, 3u);
}

TEST_F(CountersTest, MisalignedRowsTouchMoreSectors) {
  auto* data = put<uint32_t>(std::vector<uint32_t>(64));
  const LaunchResult result = run(text(1,
                                       "mul.wide.u32 %rd8, %r0, 4;\nadd.s64 %rd9, %rd0, %rd8;\n"
                                       "ld.global.u32 %r5, [%rd9+4];"),
                                  {data});
  EXPECT_EQ(result.counters.global_load_sectors, 5u);
  EXPECT_EQ(result.counters.global_unique_bytes, 160u);
  EXPECT_EQ(result.counters.global_load_bytes, 128u);
}

TEST_F(CountersTest, TensorFlopsOfARepeatedProduct) {
  // Two warps of two blocks multiply five times: 2 m n k each.
  const LaunchResult result =
      run(text(0,
               "mov.u32 %r10, 0;\n$loop:\n"
               "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, "
               "{%r20, %r21, %r22, %r23}, {%r24, %r25}, {%f0, %f1, %f2, %f3};\n"
               "add.s32 %r10, %r10, 1;\nsetp.lt.u32 %p1, %r10, 5;\n@%p1 bra $loop;"),
          {}, 64, 2);
  ASSERT_TRUE(result.ok()) << all(result);
  EXPECT_EQ(result.counters.by_class.at("tensor"), 2u * 2 * 5);
  EXPECT_EQ(result.counters.tensor_flops, 2u * 2 * 5 * (2 * 16 * 8 * 16));
}

TEST_F(CountersTest, BarriersAreCountedByWarp) {
  const LaunchResult result = run(text(0, "bar.sync 0;\nbar.sync 1, 96;\nbar.sync 0;"), {}, 96, 4);
  ASSERT_TRUE(result.ok()) << all(result);
  EXPECT_EQ(result.counters.barriers, 4u * 3 * 3);
  EXPECT_EQ(result.counters.by_class.at("barrier"), 4u * 3 * 3);
}

TEST_F(CountersTest, MatricesOfSharedMemoryTakeAPassEach) {
  // ldmatrix loads four matrices of eight rows of 16 bytes, one behind the other, then all on the
  // same banks.
  shared_bytes_ = 16384;
  const auto of_rows = [&](int bytes_apart) {
    options_.report_uninitialised = false;
    return run(text(0, "mov.u32 %r20, dynamic;\nmad.lo.s32 %r21, %r0, " +
                           std::to_string(bytes_apart) +
                           ", %r20;\nldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, "
                           "%r8}, [%r21];"),
               {})
        .counters;
  };
  EXPECT_EQ(of_rows(16).shared_load_wavefronts, 4u);
  EXPECT_EQ(of_rows(16).shared_load_conflicts, 0u);
  EXPECT_EQ(of_rows(128).shared_load_wavefronts, 32u);
  EXPECT_EQ(of_rows(128).shared_load_conflicts, 28u);
  EXPECT_EQ(of_rows(144).shared_load_conflicts, 0u);  // 16 bytes of padding behind each row
}

TEST_F(CountersTest, ASampleIsSpreadOverTheGrid) {
  constexpr uint32_t kBlocks = 64;
  auto* data = put<uint32_t>(std::vector<uint32_t>(kBlocks * 32));
  const std::string kernel =
      text(1,
           "mad.lo.s32 %r2, %r1, 32, %r0;\nmul.wide.u32 %rd8, %r2, 4;\nadd.s64 %rd9, %rd0, %rd8;\n"
           "mov.u32 %r3, 1;\nst.global.u32 [%rd9], %r3;");
  const Counters whole = run(kernel, {data}, 32, kBlocks).counters;
  EXPECT_EQ(whole.blocks_run, kBlocks);
  std::memset(data, 0, kBlocks * 128);
  options_.sample = 7;
  const Counters part = run(kernel, {data}, 32, kBlocks).counters;
  EXPECT_EQ(part.blocks, kBlocks);
  EXPECT_EQ(part.blocks_run, 7u);
  EXPECT_EQ(part.warp_instructions * kBlocks, whole.warp_instructions * 7);
  uint32_t last = 0, widest = 0;
  for (uint32_t b = 0; b < kBlocks; ++b) {
    if (data[b * 32] == 0) continue;
    widest = std::max(widest, b - last);
    last = b;
  }
  EXPECT_LE(widest, 10u);
  EXPECT_GE(last, 56u);
  ASSERT_EQ(part.touched.size(), 1u);
  EXPECT_EQ(part.touched[0].bytes, 7u * 128);
  EXPECT_EQ(part.touched[0].of, kBlocks * 128u);
  options_.sample = 0;
  EXPECT_EQ(run(kernel, {data}, 32, kBlocks).counters.warp_instructions, 0u);
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
