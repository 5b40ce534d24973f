// Items of work for threads that each have scratch memory of their own.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "core/exec.h"

namespace fk::cpu {

// Threads that can have scratch memory. Fixed for the life of the process, because a call must find
// the workspace it was told to bring.
inline int64_t worker_limit() {
  static const int64_t limit =
      std::clamp<int64_t>(static_cast<int64_t>(std::thread::hardware_concurrency()), 1, 256);
  return limit;
}

// body(worker, item) for all items, each worker taking the next one when it is done with the last.
// Which worker gets an item is up to chance; what is computed must not depend on it.
template <class Body>
void share_out(const Exec& exec, int64_t workers, int64_t items, const Body& body) {
  std::atomic<int64_t> taken{0};
  exec.parallel_for(std::min(workers, items), 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (;;) {
        const int64_t item = taken.fetch_add(1, std::memory_order_relaxed);
        if (item >= items) return;
        body(worker, item);
      }
    }
  });
}

}  // namespace fk::cpu
