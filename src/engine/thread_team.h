// A team of threads that stays together through all stages of one token, so that going from stage
// to stage costs one meeting (a barrier) and not the closing and opening of a job of the thread
// pool.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "core/thread_pool.h"

namespace fk::engine {

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
  // is those of the process's threads that come within kPatience: it does not wait for a thread
  // that the system is not running.
  template <class Body>
  static void run(const Body& body) {
    ThreadTeam team;
    struct Context {
      ThreadTeam& team;
      const Body& body;
    } context{team, body};
    const auto enter = [](int64_t begin, int64_t end, void* p) {
      auto& [team, body] = *static_cast<Context*>(p);
      int size = 0;
      const int index = team.join(end - begin, &size);
      if (index < 0) return;
      Member member(team, index, size);
      body(member);
    };
    pool_parallel_for(nullptr, num_threads(), 1, enter, &context);
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
  // or returns -1 where the team is already closed. The thread that opened the team waits for the
  // others and then closes it; if it was given all `ranges` of the job itself, there are no others
  // to wait for.
  int join(int64_t ranges, int* size) {
    if (pthread_equal(pthread_self(), opener_)) {
      if ((joined_.load(std::memory_order_relaxed) & kClosed) != 0) return -1;
      if (ranges < num_threads()) {
        const auto start = std::chrono::steady_clock::now();
        while (static_cast<int>(joined_.load(std::memory_order_relaxed)) < num_threads() &&
               std::chrono::steady_clock::now() - start < kPatience) {
          relax();
        }
      }
      *size = static_cast<int>(joined_.fetch_or(kClosed, std::memory_order_acq_rel));
      return 0;
    }
    uint32_t before = joined_.load(std::memory_order_relaxed);
    do {
      if ((before & kClosed) != 0) return -1;
    } while (!joined_.compare_exchange_weak(before, before + 1, std::memory_order_relaxed));
    uint32_t now;
    while (((now = joined_.load(std::memory_order_acquire)) & kClosed) == 0) relax();
    *size = static_cast<int>(now & ~kClosed);
    return static_cast<int>(before);
  }

  const pthread_t opener_ = pthread_self();
  alignas(64) std::atomic<uint32_t> joined_{1};  // members so far; the opener is one from the start
  alignas(64) std::atomic<uint32_t> arrived_{0};  // how many times members have come to a meeting
};

}  // namespace fk::engine
