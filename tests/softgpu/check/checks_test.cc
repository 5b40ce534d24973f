// This file tests every check, with a kernel that does wrong what it looks for, and mostly the same
// one put right.
#include "softgpu/check/small_kernel.h"

namespace fk::softgpu {
namespace {

class Checks : public SmallKernel {};

TEST_F(Checks, OutOfBounds) {
  auto* data = space<uint32_t>(31);
  const std::string store = kOwnWord + std::string("st.global.u32 [%rd9], %r0;");
  LaunchResult result = run(text(1, store), {data});
  expect_problem(result, Problem::kOutOfBounds, "byte 124 of 'space' of 124 bytes");
  EXPECT_EQ(result.reports[0].thread[0], 31);
  EXPECT_TRUE(run(text(1, store), {data}, 31).ok());
}

TEST_F(Checks, Freed) {
  auto* data = space<uint32_t>(32);
  gpu_->memory().free(data);
  expect_problem(run(text(1, kOwnWord + std::string("ld.global.u32 %r5, [%rd9];")), {data}),
                 Problem::kFreed, "freed");
}

TEST_F(Checks, Misaligned) {
  auto* data = space<uint32_t>(64);
  expect_problem(
      run(text(1, kOwnWord + std::string("ld.global.v2.u32 {%r5, %r6}, [%rd9];")), {data}),
      Problem::kMisaligned);
  shared_bytes_ = 256;
  expect_problem(run(text(0, kOwnShared + std::string("st.shared.v2.u32 [%r20], {%r0, %r0};")), {}),
                 Problem::kMisaligned, "shared memory");
}

TEST_F(Checks, ReadOnly) {
  std::vector<uint32_t> host(32);
  gpu_->memory().add_external(host.data(), 128, "host", false);
  expect_problem(run(text(1, kOwnWord + std::string("st.global.u32 [%rd9], %r0;")), {host.data()}),
                 Problem::kReadOnly);
  gpu_->memory().remove_external(host.data(), 128);
  expect_problem(run(text(0, "mov.u64 %rd5, table;\nst.global.u32 [%rd5], %r0;",
                          ".const .align 4 .b8 table[4] = {1, 2, 3, 4};\n"),
                     {}),
                 Problem::kReadOnly, "table");
}

TEST_F(Checks, UninitialisedShared) {
  shared_bytes_ = 256;
  expect_problem(run(text(0, kOwnShared + std::string("ld.shared.u32 %r5, [%r20];")), {}),
                 Problem::kUninitialised);
  expect_problem(run(text(0, kOwnShared + std::string("ld.shared.u32 %r5, [%r20+256];")), {}),
                 Problem::kOutOfBounds);
}

TEST_F(Checks, SharedRaceWithinABlock) {
  shared_bytes_ = 256;
  options_.check_races = true;
  const std::string store = kOwnShared + std::string("st.shared.u32 [%r20], %r0;\n");
  const std::string load = "ld.shared.u32 %r5, [%r21];";
  expect_problem(
      run(text(0, store + "bar.sync 0;\n" + load + "\nst.shared.u32 [%r20], %r5;"), {}, 64),
      Problem::kRace, "that nothing orders with the");
  EXPECT_TRUE(run(text(0, store + "bar.sync 0;\n" + load), {}, 64).ok());
  // Without the barrier whoever comes first is wrong.
  const LaunchResult result = run(text(0, store + load), {}, 64);
  ASSERT_FALSE(result.ok());
}

// Both warps store the same, each for itself, and load it.
TEST_F(Checks, StoresOfTheSame) {
  options_.check_races = true;
  shared_bytes_ = 256;
  auto* out = space<uint32_t>(64);
  const auto kernel = [&](const std::string& value, const std::string& loaded) {
    return text(1, std::string(kOwnShared) + kOwnWord +
                       ("and.b32 %r22, %r0, 31;\nshl.b32 %r23, %r22, 2;\nadd.s32 %r23, %r23, "
                        "%r19;\nst.shared.u32 [%r23], " +
                        value + ";\nbar.warp.sync -1;\nld.shared.u32 %r5, [" + loaded +
                        "];\nst.global.u32 [%rd9], %r5;"));
  };
  expect_problem(run(kernel("%r22", "%r23"), {out}, 64), Problem::kRace, "a store");
  options_.report_equal_stores = false;
  const LaunchResult right = run(kernel("%r22", "%r23"), {out}, 64);
  EXPECT_TRUE(right.ok()) << all(right);
  EXPECT_EQ(out[40], 8u);
  expect_problem(run(kernel("%r0", "%r23"), {out}, 64), Problem::kRace, "a store");
}

TEST_F(Checks, SharedRaceWithinAWarp) {
  shared_bytes_ = 256;
  options_.check_races = true;
  const std::string store =
      kOwnShared + std::string(
                       "st.shared.u32 [%r20], %r0;\nxor.b32 %r22, %r0, 1;\nshl.b32 %r22, %r22, 2;\n"
                       "add.s32 %r22, %r22, %r19;\n");
  expect_problem(run(text(0, store + "ld.shared.u32 %r5, [%r22];"), {}), Problem::kRace, "lane");
  EXPECT_TRUE(run(text(0, store + "bar.warp.sync -1;\nld.shared.u32 %r5, [%r22];"), {}).ok());
}

TEST_F(Checks, OnlyAStrongLoadMayMeetAnAtomic) {
  shared_bytes_ = 256;
  options_.check_races = true;
  const auto kernel = [&](const std::string& load) {
    return text(0,
                "mov.u32 %r10, dynamic;\nsetp.eq.u32 %p1, %r0, 0;\n@%p1 st.shared.u32 [%r10], "
                "0;\nbar.sync 0;\n" +
                    load + ".u32 %r5, [%r10];\natom.shared.max.u32 %r6, [%r10], %r0;");
  };
  const LaunchResult right = run(kernel("ld.volatile.shared"), {}, 64);
  EXPECT_TRUE(right.ok()) << all(right);
  expect_problem(run(kernel("ld.shared"), {}, 64), Problem::kRace);
}

TEST_F(Checks, GlobalRaceBetweenBlocks) {
  options_.check_races = true;
  auto* data = put<uint32_t>(std::vector<uint32_t>(32));
  const std::string all_write = kOwnWord + std::string("st.global.u32 [%rd9], %r0;");
  expect_problem(run(text(1, all_write), {data}, 32, 2), Problem::kRace, "by block");
  EXPECT_TRUE(run(text(1, all_write), {data}, 32, 1).ok());
  EXPECT_TRUE(
      run(text(1, kOwnWord + std::string("red.global.add.u32 [%rd9], %r0;")), {data}, 32, 2).ok());
}

TEST_F(Checks, LastBlockReadsWhatTheOthersReleased) {
  options_.check_races = true;
  auto* data = put<uint32_t>(std::vector<uint32_t>(8));
  auto* counter = put<uint32_t>({0});
  const std::string part =
      "mul.wide.u32 %rd8, %r1, 4;\nadd.s64 %rd9, %rd0, %rd8;\nst.global.u32 [%rd9], %r1;\n";
  const std::string order = "membar.gl;\natom.global.add.u32 %r5, [%rd1], 1;\n";
  const std::string last =
      "setp.ne.u32 %p1, %r5, 7;\n@%p1 ret;\nld.global.u32 %r6, [%rd0];\n"
      "ld.global.u32 %r7, [%rd0+28];";
  EXPECT_TRUE(run(text(2, part + order + last), {data, counter}, 1, 8).ok());
  const std::string unordered = "mov.u32 %r5, %ctaid.x;\n";
  expect_problem(run(text(2, part + unordered + last), {data, counter}, 1, 8), Problem::kRace);
}

TEST_F(Checks, GlobalRaceWithinABlock) {
  options_.check_races = true;
  auto* data = put<uint32_t>(std::vector<uint32_t>(64));
  const std::string store = kOwnWord + std::string("st.global.u32 [%rd9], %r0;\n");
  // The load reads what the thread 32 further stored.
  const std::string load =
      "add.s32 %r5, %r0, 32;\nand.b32 %r5, %r5, 63;\nmul.wide.u32 %rd10, %r5, 4;\n"
      "add.s64 %rd11, %rd0, %rd10;\nld.global.u32 %r6, [%rd11];\n";
  const std::string barrier = "bar.sync 0;\n";
  expect_problem(run(text(1, store + load), {data}, 64), Problem::kRace, "warp 0");
  const LaunchResult right = run(text(1, store + barrier + load), {data}, 64);
  EXPECT_TRUE(right.ok()) << all(right);
  expect_problem(run(text(1, store + barrier + load + "st.global.u32 [%rd9], %r6;"), {data}, 64),
                 Problem::kRace);
  // This load reads what another lane of the same warp stored.
  const std::string other =
      "xor.b32 %r5, %r0, 1;\nmul.wide.u32 %rd10, %r5, 4;\n"
      "add.s64 %rd11, %rd0, %rd10;\nld.global.u32 %r6, [%rd11];\n";
  expect_problem(run(text(1, store + other), {data}), Problem::kRace, "lane");
  EXPECT_TRUE(run(text(1, store + "bar.warp.sync -1;\n" + other), {data}).ok());
}

// A block's threads store; one of them counts the block for all; the last one reads everything.
TEST_F(Checks, WhoCountsABlockHasSeenItsThreads) {
  options_.check_races = true;
  auto* data = put<uint32_t>(std::vector<uint32_t>(256));
  auto* counter = put<uint32_t>({0});
  const std::string store =
      "shl.b32 %r5, %r1, 6;\nadd.s32 %r5, %r5, %r0;\nmul.wide.u32 %rd8, %r5, 4;\n"
      "add.s64 %rd9, %rd0, %rd8;\nst.global.u32 [%rd9], %r5;\nmembar.gl;\n";
  const std::string count =
      "setp.ne.u32 %p1, %r0, 0;\n@%p1 ret;\natom.global.add.u32 %r6, [%rd1], 1;\n"
      "setp.ne.u32 %p1, %r6, 3;\n@%p1 ret;\nld.global.u32 %r7, [%rd0+252];\n"
      "ld.global.u32 %r7, [%rd0+508];";
  const LaunchResult right = run(text(2, store + "bar.sync 0;\n" + count), {data, counter}, 64, 4);
  EXPECT_TRUE(right.ok()) << all(right);
  *counter = 0;
  expect_problem(run(text(2, store + count), {data, counter}, 64, 4), Problem::kRace);
}

// Each block of a pair stores into the other's shared memory.
TEST_F(Checks, ClustersWaitForEachOther) {
  options_.check_races = true;
  shared_bytes_ = 256;
  cluster_ = 2;
  const std::string meet = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n";
  const std::string store =
      kOwnShared + std::string(
                       "mov.u32 %r30, %cluster_ctarank;\nxor.b32 %r30, %r30, 1;\n"
                       "mapa.shared::cluster.u32 %r31, %r20, %r30;\n"
                       "st.shared::cluster.u32 [%r31], %r0;\n");
  const std::string load = "ld.shared.u32 %r5, [%r21];\n";
  const LaunchResult right = run(text(0, meet + store + meet + load), {}, 64, 2);
  EXPECT_TRUE(right.ok()) << all(right);
  EXPECT_FALSE(run(text(0, meet + store + load), {}, 64, 2).ok());
  // The first block may be gone when the other one stores there.
  EXPECT_FALSE(run(text(0, store), {}, 64, 2).ok());
}

TEST_F(Checks, BarriersThatDoNotFit) {
  expect_problem(run(text(0,
                          "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra $other;\nbar.sync 1, 96;\nret;\n"
                          "$other:\nbar.sync 1, 64;"),
                     {}, 64),
                 Problem::kBarrier, "where others are at it");
  expect_problem(run(text(0, "bar.sync 1, 48;"), {}, 64), Problem::kBarrier, "multiple of 32");
  expect_problem(run(text(0,
                          "setp.lt.u32 %p1, %r0, 16;\n@%p1 bra $other;\nbar.sync 0;\nret;\n"
                          "$other:\nbar.sync 0;"),
                     {}, 32),
                 Problem::kBarrier, "some lanes");
  expect_problem(run(text(0,
                          "setp.lt.u32 %p1, %r0, 16;\n@%p1 bra $other;\n"
                          "shfl.sync.idx.b32 %r5|%p2, %r0, 0, 31, -1;\nret;\n$other:\n"
                          "bar.sync 0;"),
                     {}, 32),
                 Problem::kBarrier);
}

TEST_F(Checks, Deadlock) {
  expect_problem(run(text(0,
                          "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra $other;\nbar.sync 1, 64;\nret;\n"
                          "$other:\nbar.sync 2, 64;"),
                     {}, 64),
                 Problem::kDeadlock, "waits at barrier 2");
  auto* flag = put<uint32_t>({0});
  expect_problem(run(text(1,
                          "$loop:\nld.volatile.global.u32 %r5, [%rd0];\n"
                          "setp.eq.u32 %p1, %r5, 0;\n@%p1 bra $loop;"),
                     {flag}),
                 Problem::kDeadlock);
}

TEST_F(Checks, BlocksThatWaitForEachOtherRunAtOnce) {
  auto* flags = put<uint32_t>(std::vector<uint32_t>(8));
  // Each block raises its flag and waits for that of the next one.
  const LaunchResult result =
      run(text(1,
               "mul.wide.u32 %rd8, %r1, 4;\nadd.s64 %rd9, %rd0, %rd8;\nadd.s32 %r5, %r1, 1;\n"
               "and.b32 %r5, %r5, 7;\nmul.wide.u32 %rd10, %r5, 4;\nadd.s64 %rd11, %rd0, %rd10;\n"
               "st.volatile.global.u32 [%rd9], 1;\n$loop:\nld.volatile.global.u32 %r6, [%rd11];\n"
               "setp.eq.u32 %p1, %r6, 0;\n@%p1 bra $loop;"),
          {flags}, 1, 8);
  EXPECT_TRUE(result.ok()) << all(result);
}

// One warpgroup gives registers back, which the two others take.
TEST_F(Checks, RegistersAreGivenBackBeforeTheyAreTaken) {
  const auto take = [](int registers) {
    return "setp.lt.u32 %p1, %r0, 128;\n@%p1 bra $gives;\nsetmaxnreg.inc.sync.aligned.u32 " +
           std::to_string(registers) + ";\nret;\n$gives:\nsetmaxnreg.dec.sync.aligned.u32 24;";
  };
  const LaunchResult right = run(text(0, take(240)), {}, 384);
  EXPECT_TRUE(right.ok()) << all(right);
  expect_problem(run(text(0, take(248)), {}, 384), Problem::kDeadlock, "2048 registers more");
  expect_problem(run(text(0, take(100)), {}, 384), Problem::kOther, "multiple of 8");
}

TEST_F(Checks, LaunchLimits) {
  expect_problem(run(text(0, ""), {}, 2048), Problem::kLaunch);
  shared_bytes_ = 228 << 10;
  expect_problem(run(text(0, ""), {}), Problem::kLaunch, "bytes of shared memory");
  shared_bytes_ = 0;
  cluster_ = 3;
  expect_problem(run(text(0, ""), {}, 32, 4), Problem::kLaunch, "clusters");
}

TEST_F(Checks, EarlyKernelsWait) {
  early_ = true;
  auto* data = space<uint32_t>(32);
  const std::string store = kOwnWord + std::string("st.global.u32 [%rd9], %r0;");
  expect_problem(run(text(1, store), {data}), Problem::kRace, "griddepcontrol.wait");
  EXPECT_TRUE(run(text(1, "griddepcontrol.wait;\n" + store), {data}).ok());
}

TEST_F(Checks, AKernelThatTurnsForEver) {
  options_.max_warp_instructions = 100000;
  expect_problem(run(text(0, "$loop:\nadd.s32 %r5, %r5, 1;\nbra $loop;"), {}), Problem::kTimeout,
                 "more than 100000 warp instructions");
}

TEST_F(Checks, ReportsEndTheLaunchWhereThereAreEnough) {
  auto* data = space<uint32_t>(1);
  std::string stores = kOwnWord;
  for (int i = 0; i < 30; ++i) stores += "st.global.u32 [%rd9+128], %r0;\n";
  const LaunchResult all_of_them = run(text(1, stores), {data});
  EXPECT_GE(all_of_them.reports.size(), 20u);  // one for each statement, and no more than are asked
  EXPECT_LE(all_of_them.reports.size(), 21u);
  options_.stop_at_first = true;
  EXPECT_EQ(run(text(1, stores), {data}).reports.size(), 1u);
}

TEST_F(Checks, UnknownInstructionsAreNamed) {
  try {
    run(text(0, "frobnicate.b32 %r5, %r6;"), {});
    FAIL();
  } catch (const ParseError& error) {
    EXPECT_NE(std::string(error.what()).find("frobnicate.b32"), std::string::npos);
  }
}

}  // namespace
}  // namespace fk::softgpu
