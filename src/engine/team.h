// Threads that stay together through the stages of one token, so that a stage costs one meeting and
// not the opening and closing of a job.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "core/thread_pool.h"

namespace fk::engine {

class Team {
 public:
  // What one thread knows of the team.
  class Member {
   public:
    int index() const { return index_; }
    int size() const { return size_; }

    // This member's part of `count` items.
    int64_t begin(int64_t count) const { return count * index_ / size_; }
    int64_t end(int64_t count) const { return count * (index_ + 1) / size_; }

    // Returns when every member is here, and has done `meanwhile` before it waits.
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
    friend class Team;
    Member(Team& team, int index, int size) : team_(team), index_(index), size_(size) {}

    Team& team_;
    const int index_, size_;
    uint32_t wanted_ = 0;
  };

  // body(Member&) on as many threads as the process uses and as come in time: one that the system
  // does not run now is not waited for.
  template <class Body>
  static void run(const Body& body) {
    Team team;
    struct Context {
      Team& team;
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
  static constexpr int kLooks = 2000;
  static constexpr auto kPatience = std::chrono::microseconds(250);
  static constexpr uint32_t kClosed = 1u << 31;

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  // This thread's number, or -1 where the team is complete without it. The thread that opened the
  // team waits for the others and then closes it; alone where it was given all `ranges`.
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
  alignas(64) std::atomic<uint32_t> joined_{1};  // the opener is there from the start
  alignas(64) std::atomic<uint32_t> arrived_{0};
};

}  // namespace fk::engine
