// Shares out items of work among workers, each of which has scratch memory of its own.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "core/exec.h"

namespace fk::cpu {

constexpr int64_t kMostWorkers = 256;

// Returns the most workers that a call may plan for. The number never changes while the process
// runs, because the workspace that a query asks for must still be enough at the call.
inline int64_t worker_limit() {
  static const int64_t limit = std::clamp<int64_t>(
      static_cast<int64_t>(std::thread::hardware_concurrency()), 1, kMostWorkers);
  return limit;
}

// Calls body(worker, item) once for each of `items` items, on the threads of `exec`. Each of at
// most `workers` workers takes the next item when it is done with its last, so which worker gets an
// item is up to chance: results must not depend on it. No two calls with the same worker run at
// once, so `worker` can select scratch memory.
template <class Body>
void run_on_workers(const Exec& exec, int64_t workers, int64_t items, const Body& body) {
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
