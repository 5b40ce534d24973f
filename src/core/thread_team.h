// A team of threads that stays together through all stages of a job (of one token's decoding, of
// one sequence of a recurrent net), so that going from stage to stage costs one meeting (a barrier)
// and not the closing and opening of a job of the thread pool.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "core/exec.h"
#include "core/thread_pool.h"

namespace fk {

class ThreadTeam {
 public:
  // One thread's view of the team; each thread has its own and shares it with nobody.
  class Member {
   public:
    int index() const { return index_; }
    int size() const { return size_; }

    // Of `count` items, those in [begin(count), end(count)) are this member's. The split depends on
    // `count` alone, so a member gets the same items every time.
    int64_t begin(int64_t count) const { return count * index_ / size_; }
    int64_t end(int64_t count) const { return count * (index_ + 1) / size_; }

    // A barrier: returns when every member of the team has called it. Calls meanwhile() after it
    // has let the others know and before it waits for them.
    template <class Meanwhile>
    void meet(const Meanwhile& meanwhile) {
      if (size_ == 1) return;
      wanted_ += static_cast<uint32_t>(size_);
      team_.arrived_.fetch_add(1, std::memory_order_acq_rel);
      meanwhile();
      for (int looks = 0;; ++looks) {
        const uint32_t arrived = team_.arrived_.load(std::memory_order_acquire);
        if (static_cast<int32_t>(arrived - wanted_) >= 0) return;
        looks < kLooks ? relax() : static_cast<void>(sched_yield());
      }
    }

   private:
    friend class ThreadTeam;
    Member(ThreadTeam& team, int index, int size) : team_(team), index_(index), size_(size) {}

    ThreadTeam& team_;
    const int index_, size_;
    uint32_t wanted_ = 0;
  };

  // Calls body(Member&) once on each thread of a new team and returns when all are done. The team
  // is at most `most` of the threads that a call runs on, and no more than FlashKernel's own pool
  // would have. It is those that come within kPatience: a team does not wait for a thread that the
  // system is not running, nor for one that the caller's parallel_for would only start when another
  // is done.
  template <class Body>
  static void run(const Exec& exec, int64_t most, const Body& body) {
    const int64_t count = std::max<int64_t>(1, std::min<int64_t>(most, num_threads()));
    ThreadTeam team;
    exec.parallel_for(count, 1, [&](int64_t begin, int64_t end) {
      int size = 0;
      const int64_t ranges = (count - 1) / (end - begin) + 1;
      const int index = team.join(ranges, &size);
      if (index < 0) return;
      Member member(team, index, size);
      body(member);
    });
  }

  // Does so on the process's own threads.
  template <class Body>
  static void run(const Body& body) {
    fk_exec own = FK_EXEC_DEFAULTS;
    own.parallel_for = pool_parallel_for;
    run(Exec(own), num_threads(), body);
  }

 private:
  static constexpr int kLooks = 2000;  // at a counter, before a waiting thread yields its core
  static constexpr auto kPatience = std::chrono::microseconds(250);
  static constexpr uint32_t kClosed = 1u << 31;  // set in joined_ once nobody may join any more

  // Tells the core that this is a waiting loop.
  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  // Makes the calling thread a member: returns its number and sets *size to the size of the team,
  // or returns -1 where the team is already closed. The first to come waits for the others, one for
  // each of the job's ranges, and then closes the team.
  int join(int64_t ranges, int* size) {
    uint32_t before = joined_.load(std::memory_order_relaxed);
    do {
      if ((before & kClosed) != 0) return -1;
    } while (!joined_.compare_exchange_weak(before, before + 1, std::memory_order_relaxed));
    if (before == 0) {
      if (ranges > 1) {
        const auto start = std::chrono::steady_clock::now();
        while (static_cast<int64_t>(joined_.load(std::memory_order_relaxed)) < ranges &&
               std::chrono::steady_clock::now() - start < kPatience) {
          relax();
        }
      }
      *size = static_cast<int>(joined_.fetch_or(kClosed, std::memory_order_acq_rel));
      return 0;
    }
    uint32_t now;
    while (((now = joined_.load(std::memory_order_acquire)) & kClosed) == 0) relax();
    *size = static_cast<int>(now & ~kClosed);
    return static_cast<int>(before);
  }

  alignas(64) std::atomic<uint32_t> joined_{0};   // members so far
  alignas(64) std::atomic<uint32_t> arrived_{0};  // how many times members have come to a meeting
};

}  // namespace fk
