// Teams of threads on any kind of parallel_for that a caller may bring. A team's members wait for
// each other, so one that counted on a thread that never comes would never end.
#include "core/thread_team.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace fk {
namespace {

// One range after another, each of one item, on the caller's thread.
void item_by_item(void*, int64_t count, int64_t, fk_range_body body, void* context) {
  for (int64_t i = 0; i < count; ++i) body(i, i + 1, context);
}

void all_at_once(void*, int64_t count, int64_t, fk_range_body body, void* context) {
  body(0, count, context);
}

// A thread for each item; the caller only waits.
void threads_of_their_own(void*, int64_t count, int64_t, fk_range_body body, void* context) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < count; ++i) threads.emplace_back([=] { body(i, i + 1, context); });
  for (std::thread& thread : threads) thread.join();
}

// One thread, which is not the caller's, for all items in turn.
void one_other_thread(void*, int64_t count, int64_t, fk_range_body body, void* context) {
  std::thread([=] { item_by_item(nullptr, count, 1, body, context); }).join();
}

class Teams : public testing::TestWithParam<fk_parallel_for_fn> {
 protected:
  void SetUp() override { set_num_threads(3); }
  void TearDown() override { set_num_threads(before_); }

 private:
  const int before_ = num_threads();
};

TEST_P(Teams, EachMemberRunsOnceAndAllMeet) {
  fk_exec exec = FK_EXEC_DEFAULTS;
  exec.parallel_for = GetParam();
  for (int repeat = 0; repeat < 20; ++repeat) {
    constexpr int kMeetings = 50, kMost = 3;
    std::atomic<int> came[kMeetings] = {};
    std::atomic<int> members{0}, size{0};
    std::atomic<bool> together{true};
    ThreadTeam::run(Exec(exec), kMost, [&](ThreadTeam::Member& me) {
      ++members;
      size = me.size();
      for (std::atomic<int>& meeting : came) {
        ++meeting;
        me.meet([] {});
        if (meeting != me.size()) together = false;
      }
    });
    EXPECT_EQ(members, size);
    EXPECT_GE(size, 1);
    EXPECT_LE(size, kMost);
    EXPECT_TRUE(together);
  }
}

TEST_P(Teams, MembersShareOutAllItems) {
  fk_exec exec = FK_EXEC_DEFAULTS;
  exec.parallel_for = GetParam();
  for (int64_t count : {0, 1, 7, 100}) {
    std::vector<std::atomic<int>> taken(static_cast<size_t>(count));
    ThreadTeam::run(Exec(exec), 3, [&](ThreadTeam::Member& me) {
      for (int64_t i = me.begin(count); i < me.end(count); ++i) ++taken[static_cast<size_t>(i)];
    });
    for (const std::atomic<int>& times : taken) EXPECT_EQ(times, 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Callers, Teams,
                         testing::Values(pool_parallel_for, item_by_item, all_at_once,
                                         threads_of_their_own, one_other_thread));

TEST(ThreadTeam, InsideABodyThereIsOneMember) {
  fk_exec exec = FK_EXEC_DEFAULTS;
  exec.parallel_for = pool_parallel_for;
  std::atomic<int> members{0};
  Exec(exec).parallel_for(2, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      ThreadTeam::run(Exec(exec), 4, [&](ThreadTeam::Member& me) {
        members += me.size();
        me.meet([] {});
      });
    }
  });
  EXPECT_EQ(members, 2);
}

}  // namespace
}  // namespace fk
