#include "core/kept_memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "core/heap_workspace.h"

namespace fk {
namespace {

TEST(KeptMemory, GivesBackWhatItWasGiven) {
  KeptMemory kept;
  const KeptMemory::Block a = kept.take(1000);
  ASSERT_NE(a.memory, nullptr);
  EXPECT_GE(a.bytes, 1000u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.memory) % WorkspaceParts::kAlignment, 0u);
  const void* const address = a.memory;
  kept.give(a);
  const KeptMemory::Block again = kept.take(500);
  EXPECT_EQ(again.memory, address);
  EXPECT_EQ(again.bytes, a.bytes);
  // It was the only one.
  const KeptMemory::Block other = kept.take(500);
  EXPECT_NE(other.memory, address);
  kept.give(again);
  kept.give(other);
}

TEST(KeptMemory, TheSmallestThatIsLargeEnough) {
  KeptMemory kept;
  const KeptMemory::Block small = kept.take(1 << 10), large = kept.take(1 << 20);
  const void *const of_small = small.memory, *const of_large = large.memory;
  kept.give(large);
  kept.give(small);
  const KeptMemory::Block first = kept.take(1 << 9), second = kept.take(1 << 11);
  EXPECT_EQ(first.memory, of_small);
  EXPECT_EQ(second.memory, of_large);
  kept.give(first);
  kept.give(second);
}

TEST(KeptMemory, LargerOnesStay) {
  KeptMemory kept;
  std::vector<KeptMemory::Block> blocks;
  for (size_t bytes : {4096u, 8192u, 16384u}) blocks.push_back(kept.take(bytes));
  for (const KeptMemory::Block& b : blocks) kept.give(b);
  const KeptMemory::Block first = kept.take(1), second = kept.take(1), third = kept.take(1);
  EXPECT_EQ(first.bytes, 8192u);
  EXPECT_EQ(second.bytes, 16384u);
  EXPECT_EQ(third.bytes, WorkspaceParts::kAlignment);
  for (const KeptMemory::Block& b : {first, second, third}) kept.give(b);
}

TEST(KeptMemory, WhatFewCallsNeedIsNotKept) {
  KeptMemory kept;
  kept.give(kept.take(size_t{33} << 20));
  const KeptMemory::Block next = kept.take(1);
  EXPECT_EQ(next.bytes, WorkspaceParts::kAlignment);
  kept.give(next);
}

// As the process's own is where AddressSanitizer watches: each block is fresh, and no byte longer.
TEST(KeptMemory, ThatKeepsNothing) {
  KeptMemory kept(0);
  for (const size_t bytes : {1u, 255u, 256u, 1000u}) {
    KeptMemory::Block first = kept.take(bytes);
    EXPECT_EQ(first.bytes, bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(first.memory) % WorkspaceParts::kAlignment, 0u);
    std::memset(first.memory, 1, bytes);
    const KeptMemory::Block second = kept.take(bytes);
    EXPECT_NE(second.memory, first.memory);
    kept.give(first);
    kept.give(second);
  }
}

#if defined(__SANITIZE_ADDRESS__)
TEST(KeptMemory, PastTheEndIsSeen) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  HeapWorkspace workspace;
  fk_exec exec = FK_EXEC_DEFAULTS;
  workspace.serve(&exec);
  // A larger block before it, which would be taken again if it were kept.
  ASSERT_NE(exec.allocate(exec.allocator, 4096), nullptr);
  auto* memory = static_cast<volatile char*>(exec.allocate(exec.allocator, 1000));
  memory[999] = 1;
  EXPECT_DEATH(memory[1000] = 1, "heap-buffer-overflow");
}
#endif

TEST(KeptMemory, NoneWhereThereIsNone) {
  KeptMemory kept;
  EXPECT_EQ(kept.take(std::numeric_limits<size_t>::max()).memory, nullptr);
  kept.give({});
}

TEST(KeptMemory, NoTwoHaveTheSameAtATime) {
  KeptMemory kept;
  std::vector<std::thread> threads;
  std::vector<int> wrong(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&kept, &wrong, t] {
      for (int i = 0; i < 2000; ++i) {
        const KeptMemory::Block b = kept.take(256 + 256 * (i % 3));
        std::memset(b.memory, t, b.bytes);
        std::this_thread::yield();
        for (size_t j = 0; j < b.bytes; ++j) wrong[t] += static_cast<char*>(b.memory)[j] != t;
        kept.give(b);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (int w : wrong) EXPECT_EQ(w, 0);
}

}  // namespace
}  // namespace fk
