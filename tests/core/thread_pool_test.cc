#include "core/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

namespace fk {
namespace {

using Clock = std::chrono::steady_clock;

template <class Body>
void run(int64_t count, int64_t grain, const Body& body) {
  pool_parallel_for(
      nullptr, count, grain,
      [](int64_t begin, int64_t end, void* context) {
        (*static_cast<const Body*>(context))(begin, end);
      },
      const_cast<Body*>(&body));
}

// Gives the pool a known size and puts back the old one.
class Threads {
 public:
  explicit Threads(int threads) : before_(num_threads()) { set_num_threads(threads); }
  ~Threads() { set_num_threads(before_); }

 private:
  int before_;
};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_utime.tv_sec + usage.ru_stime.tv_sec +
         1e-6 * (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

// Waits until all expected threads have come here, or two seconds have passed.
class Meeting {
 public:
  explicit Meeting(int expected) : expected_(expected) {}
  bool join() {
    ++arrived_;
    const Clock::time_point start = Clock::now();
    while (arrived_ < expected_) {
      if (seconds_since(start) > 2) return false;
      std::this_thread::yield();
    }
    return true;
  }

 private:
  const int expected_;
  std::atomic<int> arrived_{0};
};

// Runs `child` in a forked process and says whether it returned 0 within ten seconds.
template <class Child>
testing::AssertionResult in_child(const Child& child) {
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(10);
    _exit(child());
  }
  int status = 0;
  waitpid(pid, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return testing::AssertionSuccess();
  if (WIFSIGNALED(status)) {
    return testing::AssertionFailure() << "child ended by signal " << WTERMSIG(status);
  }
  return testing::AssertionFailure() << "child returned " << WEXITSTATUS(status);
}

TEST(ThreadPool, VisitsEveryIndexOnce) {
  for (int threads : {1, 2, 5}) {
    Threads scope(threads);
    for (int64_t count : {1, 2, 3, 7, 64, 1000, 4097}) {
      for (int64_t grain : {1, 3, 64, 5000}) {
        std::vector<std::atomic<int>> visits(count);
        run(count, grain, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++visits[i];
        });
        for (int64_t i = 0; i < count; ++i) {
          ASSERT_EQ(visits[i], 1) << "index " << i << " of " << count << ", grain " << grain;
        }
      }
    }
  }
}

TEST(ThreadPool, RangesHaveAtLeastGrainItems) {
  Threads scope(3);
  for (int64_t grain : {1, 7, 100}) {
    std::mutex mutex;
    std::vector<std::pair<int64_t, int64_t>> ranges;
    run(1003, grain, [&](int64_t begin, int64_t end) {
      std::lock_guard<std::mutex> lock(mutex);
      ranges.emplace_back(begin, end);
    });
    for (const auto& [begin, end] : ranges) {
      EXPECT_LT(begin, end);
      EXPECT_TRUE(end - begin >= grain || end == 1003) << begin << " to " << end;
    }
  }
}

TEST(ThreadPool, NothingToDo) {
  const auto fails = [](int64_t, int64_t) { ADD_FAILURE(); };
  run(0, 1, fails);
  run(-5, 1, fails);
}

TEST(ThreadPool, GrainBelowOneIsOne) {
  Threads scope(2);
  std::atomic<int64_t> items{0};
  run(10, 0, [&](int64_t begin, int64_t end) { items += end - begin; });
  run(10, -3, [&](int64_t begin, int64_t end) { items += end - begin; });
  EXPECT_EQ(items, 20);
}

TEST(ThreadPool, CountsPastTwoToThe31) {
  Threads scope(2);
  const int64_t count = (int64_t{1} << 62) + 12345;
  std::atomic<int64_t> items{0};
  run(count, 1, [&](int64_t begin, int64_t end) { items += end - begin; });
  EXPECT_EQ(items, count);
}

TEST(ThreadPool, ThreadsRunTogether) {
  for (int threads : {2, 4}) {
    Threads scope(threads);
    Meeting meeting(threads);
    std::atomic<bool> met{true};
    run(threads, 1, [&](int64_t, int64_t) {
      if (!meeting.join()) met = false;
    });
    EXPECT_TRUE(met) << threads << " threads";
  }
}

TEST(ThreadPool, NeverMoreThreadsThanAsked) {
  for (int threads : {4, 2, 3, 1}) {
    Threads scope(threads);
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::mutex mutex;
      std::set<std::thread::id> seen;
      run(64, 1, [&](int64_t, int64_t) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
        std::lock_guard<std::mutex> lock(mutex);
        seen.insert(std::this_thread::get_id());
      });
      EXPECT_LE(static_cast<int>(seen.size()), threads);
    }
  }
}

TEST(ThreadPool, NestedCallsRunInline) {
  Threads scope(3);
  std::vector<std::atomic<int>> visits(40 * 50);
  run(40, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const std::thread::id self = std::this_thread::get_id();
      run(50, 1, [&](int64_t inner_begin, int64_t inner_end) {
        EXPECT_EQ(std::this_thread::get_id(), self);
        for (int64_t j = inner_begin; j < inner_end; ++j) ++visits[i * 50 + j];
      });
    }
  });
  for (const auto& v : visits) EXPECT_EQ(v, 1);
}

TEST(ThreadPool, CallersFromManyThreads) {
  Threads scope(2);
  std::vector<std::thread> callers;
  std::atomic<int64_t> total{0};
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 500; ++repeat) {
        int64_t expected = 0;
        std::atomic<int64_t> sum{0};
        for (int64_t i = 0; i < 100; ++i) expected += i;
        run(100, 4, [&](int64_t begin, int64_t end) {
          int64_t part = 0;
          for (int64_t i = begin; i < end; ++i) part += i;
          sum += part;
        });
        if (sum == expected) ++total;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total, 4 * 500);
}

// What a body throws comes out of the call, whichever thread ran it, and the pool goes on.
TEST(ThreadPool, BodiesThatThrow) {
  for (const int threads : {1, 2, 4}) {
    Threads scope(threads);
    for (int64_t place = 0; place < 64; place += 7) {
      std::atomic<int64_t> items{0};
      const auto body = [&](int64_t begin, int64_t end) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));  // all threads get some
        if (begin <= place && place < end) throw std::runtime_error("thrown");
        items += end - begin;
      };
      EXPECT_THROW(run(64, 1, body), std::runtime_error) << threads << " " << place;
      EXPECT_LT(items, 64);
      items = 0;
      run(64, 1, [&](int64_t begin, int64_t end) { items += end - begin; });
      EXPECT_EQ(items, 64);
    }
  }
}

TEST(ThreadPool, BusyPoolDoesNotBlockOtherCallers) {
  Threads scope(2);
  std::atomic<bool> started{false}, release{false};
  std::thread holder([&] {
    run(2, 1, [&](int64_t, int64_t) {
      started = true;
      while (!release) std::this_thread::yield();
    });
  });
  while (!started) std::this_thread::yield();
  std::vector<int> values(100);
  run(100, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) values[i] = 1;  // inline: no other thread writes
  });
  EXPECT_EQ(std::count(values.begin(), values.end(), 1), 100);
  release = true;
  holder.join();
}

// Plain writes by workers must be visible to the caller: a race here is for TSan to find.
TEST(ThreadPool, ManySmallJobs) {
  Threads scope(3);
  std::vector<int64_t> values(64);
  for (int64_t job = 1; job <= 5000; ++job) {
    run(64, 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) values[i] += i * job;
    });
  }
  const int64_t jobs = 5000 * 5001 / 2;
  for (int64_t i = 0; i < 64; ++i) ASSERT_EQ(values[i], i * jobs);
}

TEST(ThreadPool, SetNumThreadsWhileJobsRun) {
  Threads scope(2);
  std::atomic<bool> stop{false};
  std::thread changer([&] {
    for (int threads = 1; !stop; threads = threads % 6 + 1) {
      set_num_threads(threads);
      std::this_thread::sleep_for(std::chrono::microseconds(30));
    }
  });
  const Clock::time_point start = Clock::now();
  while (seconds_since(start) < 0.3) {
    std::atomic<int64_t> items{0};
    run(1000, 10, [&](int64_t begin, int64_t end) { items += end - begin; });
    EXPECT_EQ(items, 1000);
  }
  stop = true;
  changer.join();
}

TEST(ThreadPool, NumThreadsIsClamped) {
  Threads scope(2);
  set_num_threads(0);
  EXPECT_EQ(num_threads(), 1);
  set_num_threads(-7);
  EXPECT_EQ(num_threads(), 1);
  set_num_threads(1 << 30);
  EXPECT_GE(num_threads(), 64);
}

TEST(ThreadPool, SleepsWhenIdle) {
  Threads scope(4);
  run(64, 1, [](int64_t, int64_t) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::seconds(1));
  EXPECT_LT(cpu_seconds() - before, 0.05);
}

TEST(ThreadPool, WakesAfterSleep) {
  Threads scope(2);
  for (int repeat = 0; repeat < 5; ++repeat) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    Meeting meeting(2);
    std::atomic<bool> met{true};
    run(2, 1, [&](int64_t, int64_t) {
      if (!meeting.join()) met = false;
    });
    EXPECT_TRUE(met);
  }
}

#if defined(__SANITIZE_THREAD__)
#define SKIP_UNDER_TSAN() GTEST_SKIP() << "TSan does not let a forked child start threads"
#else
#define SKIP_UNDER_TSAN() static_cast<void>(0)
#endif

int child_uses_pool() {
  Meeting meeting(2);
  std::atomic<int> failures{0};
  run(2, 1, [&](int64_t, int64_t) {
    if (!meeting.join()) ++failures;
  });
  return failures;
}

TEST(ThreadPool, ForkedChildStartsItsOwnWorkers) {
  SKIP_UNDER_TSAN();
  Threads scope(2);
  EXPECT_EQ(child_uses_pool(), 0);
  EXPECT_TRUE(in_child(child_uses_pool));
  EXPECT_EQ(child_uses_pool(), 0);
}

TEST(ThreadPool, ChildOfAChild) {
  SKIP_UNDER_TSAN();
  Threads scope(2);
  EXPECT_EQ(child_uses_pool(), 0);
  EXPECT_TRUE(in_child([] {
    if (child_uses_pool() != 0) return 1;
    return in_child(child_uses_pool) ? 0 : 2;
  }));
}

TEST(ThreadPool, ForkWhileAnotherThreadHoldsThePool) {
  SKIP_UNDER_TSAN();
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "a lock of ASan's that another thread held at the fork stays locked in the child";
#endif
  Threads scope(2);
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) run(64, 1, [](int64_t, int64_t) {});
  });
  for (int repeat = 0; repeat < 20; ++repeat) {
    EXPECT_TRUE(in_child(child_uses_pool)) << "fork " << repeat;
  }
  stop = true;
  busy.join();
}

// Static destructors run while workers are awake. The child is a new process, not a fork of this
// one.
TEST(ThreadPool, ExitWithAwakeWorkers) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        set_num_threads(4);
        run(64, 1, [](int64_t, int64_t) {});
        std::exit(0);
      },
      testing::ExitedWithCode(0), "");
}

// The environment is read once, so each value needs a new process.
TEST(ThreadPool, NumThreadsFromEnvironment) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto starts_with = [](const char* value, int least, int most) {
    setenv("FK_NUM_THREADS", value, 1);
    const int threads = num_threads();
    std::exit(threads >= least && threads <= most ? 0 : 1);
  };
  EXPECT_EXIT(starts_with("3", 3, 3), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(starts_with("1000000", 64, 999999), testing::ExitedWithCode(0), "");
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  EXPECT_EXIT(starts_with("two", 1, cores), testing::ExitedWithCode(0),
              "FK_NUM_THREADS: expected a number from 1, got \"two\"");
  EXPECT_EXIT(starts_with("0", 1, cores), testing::ExitedWithCode(0), "got \"0\"");
}

}  // namespace
}  // namespace fk
