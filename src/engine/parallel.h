// Work of the engine's stages on the process's threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "core/thread_pool.h"

namespace fk::engine {

// body(begin, end) over ranges of at least `grain` items that cover [0, count). Ranges are taken in
// order, large ones first: long runs of memory at the start, an even finish at the end. A thread
// that is late finds less to do and holds up nobody.
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
