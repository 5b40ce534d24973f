// Shares out the work of one stage of a prompt among the process's threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "core/thread_pool.h"

namespace fk::engine {

// Calls body(begin, end) for ranges that cover [0, count), each of at least `grain` items except
// the last, and returns when all are done. The threads claim ranges in order from one counter,
// large ones first: each reads long runs of memory at the start, and all finish evenly at the end.
// A thread that is late finds less to do and holds up nobody.
template <class Body>
void parallel(int64_t count, int64_t grain, const Body& body) {
  const int64_t threads = num_threads();
  if (threads == 1 || count <= grain) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
  struct Work {
    const Body& body;
    int64_t count, grain, threads;
    std::atomic<int64_t> next{0};
  } work{body, count, grain, threads};
  const auto run = [](int64_t, int64_t, void* context) {
    Work& w = *static_cast<Work*>(context);
    int64_t begin = w.next.load(std::memory_order_relaxed);
    while (begin < w.count) {
      const int64_t left = w.count - begin;
      const int64_t take = std::min(left, std::max(w.grain, left / (2 * w.threads)));
      if (!w.next.compare_exchange_weak(begin, begin + take, std::memory_order_relaxed)) continue;
      w.body(begin, begin + take);
      begin = w.next.load(std::memory_order_relaxed);
    }
  };
  pool_parallel_for(nullptr, threads, 1, run, &work);
}

}  // namespace fk::engine
