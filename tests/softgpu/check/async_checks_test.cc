// This file tests the checks of what is asynchronous to the threads, each with a faulty kernel that
// it catches.
#include "softgpu/check/small_kernel.h"

namespace fk::softgpu {
namespace {

class AsyncChecks : public SmallKernel {};

TEST_F(AsyncChecks, CopiesThatNobodyWaitedFor) {
  shared_bytes_ = 256;
  auto* data = put<uint32_t>(std::vector<uint32_t>(32, 7));
  auto* out = space<uint32_t>(32);
  const std::string copy = kOwnShared + std::string(kOwnWord) +
                           "cp.async.ca.shared.global [%r20], [%rd9], 4;\n"
                           "cp.async.commit_group;\n";
  const std::string rest =
      "ld.shared.u32 %r5, [%r20];\nadd.s64 %rd10, %rd1, %rd8;\nst.global.u32 [%rd10], %r5;";
  for (const uint64_t seed : {0, 1, 2, 3}) {
    options_.seed = seed;
    expect_problem(run(text(2, copy + rest), {data, out}), Problem::kPending);
    expect_problem(run(text(2, copy + "cp.async.wait_group 1;\n" + rest), {data, out}),
                   Problem::kPending);
    EXPECT_TRUE(run(text(2, copy + "cp.async.wait_group 0;\n" + rest), {data, out}).ok());
    EXPECT_EQ(out[31], 7u);
  }
}

TEST_F(AsyncChecks, CopiesOfAPart) {
  shared_bytes_ = 512;
  auto* data = put<uint32_t>(std::vector<uint32_t>(5, 7));
  auto* out = space<uint32_t>(8);
  // Thread 0 copies 16 bytes, thread 1 only 4 of the 16 that would reach out of the allocation.
  const std::string copy =
      "mov.u32 %r10, dynamic;\nshl.b32 %r11, %r0, 4;\nadd.s32 %r12, %r10, %r11;\n"
      "mul.wide.u32 %rd8, %r0, 16;\nadd.s64 %rd9, %rd0, %rd8;\nsetp.eq.u32 %p1, %r0, 0;\n"
      "selp.b32 %r13, 16, SIZE, %p1;\n"
      "cp.async.cg.shared.global [%r12], [%rd9], 16, %r13;\ncp.async.wait_all;\n"
      "ld.shared.v4.u32 {%r14, %r15, %r16, %r17}, [%r12];\nadd.s64 %rd10, %rd1, %rd8;\n"
      "st.global.v4.u32 [%rd10], {%r14, %r15, %r16, %r17};";
  const auto sized = [&](const std::string& size) {
    return std::string(copy).replace(copy.find("SIZE"), 4, size);
  };
  const LaunchResult result = run(text(2, sized("4")), {data, out}, 2);
  EXPECT_TRUE(result.ok()) << all(result);
  const uint32_t expected[8] = {7, 7, 7, 7, 7, 0, 0, 0};
  EXPECT_EQ(std::memcmp(out, expected, sizeof expected), 0);
  expect_problem(run(text(2, sized("8")), {data, out}, 2), Problem::kOutOfBounds);
}

TEST_F(AsyncChecks, MemoryBarrierPhases) {
  shared_bytes_ = 64;
  const std::string made = "mov.u32 %r10, dynamic;\nmbarrier.init.shared::cta.b64 [%r10], 1;\n";
  expect_problem(run(text(0, made + "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 16;\n"
                                    "mbarrier.arrive.shared::cta.b64 _, [%r10];"),
                     {}, 1),
                 Problem::kBarrier, "more arrivals");
  expect_problem(run(text(0,
                          "mov.u32 %r10, dynamic;\n"
                          "mbarrier.arrive.shared::cta.b64 _, [%r10];"),
                     {}, 1),
                 Problem::kBarrier, "no initialised mbarrier");
  expect_problem(run(text(0, made + "$loop:\nmbarrier.try_wait.parity.shared::cta.b64 %p1, [%r10], "
                                    "0;\n@!%p1 bra $loop;"),
                     {}, 1),
                 Problem::kDeadlock);
  EXPECT_TRUE(run(text(0, made + "mbarrier.arrive.shared::cta.b64 _, [%r10];\n$loop:\n"
                                 "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r10], 0;\n"
                                 "@!%p1 bra $loop;"),
                  {}, 1)
                  .ok());
}

TEST_F(AsyncChecks, MemoryBarriersAskedWrongly) {
  shared_bytes_ = 512;
  const std::string made = "mov.u32 %r10, dynamic;\nmbarrier.init.shared::cta.b64 [%r10], 1;\n";
  expect_problem(
      run(text(0, made + "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r10], 2;"), {}, 1),
      Problem::kBarrier, "parity");
  // A copy completes there, but nobody made the barrier.
  auto* data = put<uint32_t>(std::vector<uint32_t>(64));
  expect_problem(
      run(text(1,
               "mov.u32 %r10, dynamic;\nadd.s32 %r11, %r10, 256;\nmov.u32 %r12, 256;\n"
               "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r10], "
               "[%rd0], %r12, [%r11];"),
          {data}, 1),
      Problem::kBarrier, "no initialised mbarrier");
}

// Loads 256 bytes by the copy engine and reads them.
std::string bulk_load(const std::string& wait) {
  return "mov.u32 %r10, dynamic;\nadd.s32 %r11, %r10, 256;\nsetp.ne.u32 %p3, %r0, 0;\n"
         "@%p3 bra $made;\nmbarrier.init.shared::cta.b64 [%r11], 1;\n"
         "fence.proxy.async.shared::cta;\n$made:\nbar.sync 0;\n@%p3 bra $issued;\n"
         "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r11], 256;\nmov.u32 %r12, 256;\n"
         "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r10], [%rd0], %r12, "
         "[%r11];\n$issued:\n" +
         wait +
         "shl.b32 %r13, %r0, 2;\nadd.s32 %r13, %r13, %r10;\nld.shared.u32 %r5, [%r13];\n"
         "mul.wide.u32 %rd8, %r0, 4;\nadd.s64 %rd9, %rd1, %rd8;\nst.global.u32 [%rd9], %r5;";
}
const char* kWait =
    "$loop:\nmbarrier.try_wait.parity.shared::cta.b64 %p1, [%r11], 0;\n@!%p1 bra $loop;\n";

bool has_problem(const LaunchResult& result, Problem problem) {
  for (const Report& report : result.reports) {
    if (report.problem == problem) return true;
  }
  return false;
}

TEST_F(AsyncChecks, BulkCopies) {
  shared_bytes_ = 272;
  options_.check_races = true;
  std::vector<uint32_t> values(64);
  for (uint32_t i = 0; i < 64; ++i) values[i] = 3 * i;
  auto* data = put(values);
  auto* out = space<uint32_t>(64);
  for (const uint64_t seed : {0, 1, 2, 3, 4}) {
    options_.seed = seed;
    const LaunchResult right = run(text(2, bulk_load(kWait)), {data, out}, 64);
    EXPECT_TRUE(right.ok()) << all(right);
    EXPECT_EQ(std::memcmp(out, values.data(), 256), 0);
    // The other warp may come before the copy began.
    EXPECT_TRUE(has_problem(run(text(2, bulk_load("")), {data, out}, 64), Problem::kPending));
    // Only one warp waits: the other one cannot know that the data has come.
    EXPECT_FALSE(run(text(2, bulk_load("setp.ge.u32 %p4, %r0, 32;\n@%p4 bra $on;\n" +
                                       std::string(kWait) + "$on:\n")),
                     {data, out}, 64)
                     .ok());
  }
}

TEST_F(AsyncChecks, BulkCopiesOfWhatIsNotThere) {
  shared_bytes_ = 272;
  auto* out = space<uint32_t>(64);
  auto* data = put<uint32_t>(std::vector<uint32_t>(65));
  const std::string whole = bulk_load(kWait);
  const auto with = [&](const std::string& old, const std::string& now) {
    std::string changed = whole;
    return changed.replace(changed.find(old), old.size(), now);
  };
  expect_problem(run(text(2, whole), {data + 2, out}, 64), Problem::kMisaligned, "multiples of 16");
  expect_problem(run(text(2, whole), {data + 8, out}, 64), Problem::kOutOfBounds, "a bulk copy");
  expect_problem(run(text(2, with("mov.u32 %r12, 256", "mov.u32 %r12, 288")), {data, out}, 64),
                 Problem::kOutOfBounds, "out of shared memory");
  // The barrier waits for more bytes than come.
  expect_problem(run(text(2, with("[%r11], 256", "[%r11], 512")), {data, out}, 64),
                 Problem::kDeadlock);
  gpu_->memory().free(data);
  expect_problem(run(text(2, whole), {data, out}, 64), Problem::kFreed);
}

TEST_F(AsyncChecks, ABlockEndsWhileItsCopyIsUnderWay) {
  shared_bytes_ = 272;
  auto* data = put<uint32_t>(std::vector<uint32_t>(64));
  std::string kernel = bulk_load("");
  kernel.resize(kernel.find("shl.b32 %r13"));  // nobody looks at the data
  expect_problem(run(text(2, kernel), {data, data}, 64), Problem::kUnfinished, "the block ends");
}

TEST_F(AsyncChecks, CopiesOverWhatThreadsStored) {
  shared_bytes_ = 272;
  options_.check_races = true;
  auto* data = put<uint32_t>(std::vector<uint32_t>(64));
  auto* out = space<uint32_t>(64);
  const std::string store = "st.shared.u32 [%r20], %r0;\n",
                    fence = "fence.proxy.async.shared::cta;\n";
  // Every thread stores where the copy will write, before the barrier ahead of the copy.
  const auto kernel = [&](const std::string& before) {
    std::string changed = bulk_load(kWait);
    const std::string barrier = "bar.sync 0;\n";
    return text(2, kOwnShared + changed.insert(changed.find(barrier), before));
  };
  const LaunchResult right = run(kernel(store + fence), {data, out}, 64);
  EXPECT_TRUE(right.ok()) << all(right);
  expect_problem(run(kernel(store), {data, out}, 64), Problem::kMissingFence, "a copy writes");
}

// Stores to shared memory, which the copy engine stores to global memory.
std::string bulk_store(const std::string& fence, const std::string& wait) {
  return kOwnShared + std::string("st.shared.u32 [%r20], %r0;\n") + fence +
         "bar.sync 0;\nsetp.ne.u32 %p3, %r0, 0;\n@%p3 bra $done;\nmov.u32 %r12, 256;\n"
         "cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r19], %r12;\n"
         "cp.async.bulk.commit_group;\n" +
         wait + "$done:\n";
}

TEST_F(AsyncChecks, ProxyFences) {
  shared_bytes_ = 256;
  options_.check_races = true;
  auto* out = space<uint32_t>(64);
  const std::string fence = "fence.proxy.async.shared::cta;\n";
  const std::string wait = "cp.async.bulk.wait_group 0;\n";
  const LaunchResult right = run(text(1, bulk_store(fence, wait)), {out}, 64);
  EXPECT_TRUE(right.ok()) << all(right);
  EXPECT_EQ(out[63], 63u);
  expect_problem(run(text(1, bulk_store("", wait)), {out}, 64), Problem::kMissingFence);
  expect_problem(run(text(1, bulk_store(fence, "")), {out}, 64), Problem::kUnfinished);
  expect_problem(run(text(1, bulk_store(fence, "st.shared.u32 [%r19], 99;\n" + wait)), {out}, 64),
                 Problem::kPending, "changed while a copy");
  std::vector<uint32_t> input(64);
  gpu_->memory().add_external(input.data(), 256, "input", false);
  expect_problem(run(text(1, bulk_store(fence, wait)), {input.data()}, 64), Problem::kReadOnly);
  gpu_->memory().remove_external(input.data(), 256);
}

}  // namespace
}  // namespace fk::softgpu
