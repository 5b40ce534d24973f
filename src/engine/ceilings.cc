#include "engine/ceilings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <iterator>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/integers.h"
#include "engine/arena.h"
#include "engine/probes.h"
#include "flashkernel/abi.h"

namespace fk::engine {
namespace {

using Clock = std::chrono::steady_clock;
using cpu::kProbeStep;
using cpu::Way;

// Starts threads of its own for a measurement rather than borrow a pool's: callers measure beside
// our pool, torch's or XLA's, whichever is in use.
class Crew {
 public:
  // Runs body(crew, thread) on `threads` threads, or on as many as the system will start, and
  // returns when all are done.
  template <class Body>
  static void run(int threads, const Body& body) {
    Crew crew;
    std::vector<std::thread> others;
    try {
      for (int i = 1; i < threads; ++i) {
        others.emplace_back([&crew, &body, i] {
          while (crew.size_.load(std::memory_order_acquire) == 0) std::this_thread::yield();
          body(crew, i);
        });
      }
    } catch (const std::system_error&) {  // the crew then is the threads started so far
    }
    crew.size_.store(static_cast<int>(others.size()) + 1, std::memory_order_release);
    body(crew, 0);
    for (std::thread& other : others) other.join();
  }

  int size() const { return size_.load(std::memory_order_relaxed); }

  // A barrier: returns when all threads of the crew have called it.
  void meet() {
    const int meeting = meeting_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
      arrived_.store(0, std::memory_order_relaxed);
      meeting_.store(meeting + 1, std::memory_order_release);
      return;
    }
    constexpr int kSpins = 1000;  // after so many looks, a missing thread may need this very core
    for (int i = 0; meeting_.load(std::memory_order_acquire) == meeting; ++i) {
      if (i > kSpins) std::this_thread::yield();
    }
  }

 private:
  std::atomic<int> size_{0};  // 0 until all threads have been started
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> meeting_{0};
};

// What one thread did: the time at which it began, and the time at which each of its equal steps
// ended.
struct alignas(64) Log {
  std::vector<Clock::time_point> times;
  double work = 0;  // done by one step: bytes or operations

  // Returns the work this thread had done at `time`, as if each step had progressed evenly. `step`
  // is where the search begins and is moved on: ask for ascending times.
  double until(Clock::time_point time, size_t* step) const {
    while (*step + 1 < times.size() && times[*step + 1] <= time) ++*step;
    if (*step + 1 >= times.size() || time <= times[*step]) return work * static_cast<double>(*step);
    const std::chrono::duration<double> in = time - times[*step],
                                        all = times[*step + 1] - times[*step];
    return work * (static_cast<double>(*step) + in / all);
  }
};

// Returns the highest rate, in work per second of all threads together, over any stretch of time in
// which some thread made `window` steps.
double best_window(const std::vector<Log>& logs, size_t window) {
  double best = 0;
  for (const Log& one : logs) {
    std::vector<size_t> begins(logs.size()), ends(logs.size());
    for (size_t i = 0; i + window < one.times.size(); ++i) {
      const Clock::time_point begin = one.times[i], end = one.times[i + window];
      double work = 0;
      for (size_t t = 0; t < logs.size(); ++t) {
        work += logs[t].until(end, &ends[t]) - logs[t].until(begin, &begins[t]);
      }
      best = std::max(best, work / std::chrono::duration<double>(end - begin).count());
    }
  }
  return best;
}

// Runs step(thread, i) for i = 0, 1, 2, ... on `threads` threads at once and returns the best rate
// over any `window` steps; `step` returns the work it did. prepare(thread, threads) runs once on
// each thread before. No thread waits for another between steps: where other programs want the
// cores too, all threads run at once only by chance, and that moment is the one to find.
template <class Prepare, class Step>
double best_rate(int threads, double seconds, int64_t window, const Prepare& prepare,
                 const Step& step) {
  constexpr int64_t kLeastWindows = 3;
  std::vector<Log> logs(static_cast<size_t>(threads));
  Crew::run(threads, [&](Crew& crew, int thread) {
    Log& log = logs[static_cast<size_t>(thread)];
    log.times.reserve(4096);
    prepare(thread, crew.size());
    step(thread, 0);  // warms up: brings code and memory into the caches
    crew.meet();
    const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
    log.times.push_back(Clock::now());
    for (int64_t i = 0; i < kLeastWindows * window || log.times.back() < deadline; ++i) {
      log.work = step(thread, i);
      log.times.push_back(Clock::now());
    }
  });
  return best_window(logs, static_cast<size_t>(window));
}

// Memory to go through: one to three streams of `bytes` each, whose starts lie `apart` bytes apart.
struct Piece {
  uint8_t* data;
  int64_t bytes, apart;
};

// How many arrays a kind of traffic goes through at once.
int streams_of(Traffic traffic) {
  return traffic == Traffic::kAdd ? 3 : traffic == Traffic::kCopy ? 2 : 1;
}

// Goes through the piece once and returns the bytes it read and wrote. What was read goes into
// `sink`, so that the compiler cannot leave the reading out.
int64_t go_through(Traffic traffic, Way way, const Piece& piece, uint64_t* sink) {
  uint8_t *const first = piece.data, *const second = first + piece.apart;
  const int64_t bytes = piece.bytes;
  switch (traffic) {
    case Traffic::kRead:
      *sink |= cpu::probe_read(first, bytes, way);
      return bytes;
    case Traffic::kWrite:
      cpu::probe_write(first, bytes, way);
      return bytes;
    case Traffic::kCopy:
      cpu::probe_copy(second, first, bytes, way);
      return 2 * bytes;
    case Traffic::kAdd:
      cpu::probe_add(second + piece.apart, first, second, bytes, way);
      return 3 * bytes;
    case Traffic::kUpdate:
      cpu::probe_update(first, bytes);
      return 2 * bytes;
  }
  return 0;
}

// `bytes` rounded down to whole steps of a probe, but at least one step.
int64_t whole_steps(int64_t bytes) { return std::max<int64_t>(1, bytes / kProbeStep) * kProbeStep; }

// Measures small working sets: each thread goes through a part of its own, which its caches may
// hold.
double rate_of_parts(Traffic traffic, Way way, int64_t bytes, int threads, double seconds) {
  constexpr int64_t kStep = int64_t{4} << 20;  // long enough that reading the clock costs nothing
  const int streams = streams_of(traffic);
  const int64_t each = whole_steps(bytes / threads / streams), part = streams * each;
  Arena memory;
  if (!memory.reserve(part * threads)) return 0;
  std::atomic<uint64_t> sink{0};
  const auto prepare = [&](int thread, int) {
    std::memset(memory.data() + thread * part, 0, static_cast<size_t>(part));
  };
  return best_rate(threads, seconds, 1, prepare, [&](int thread, int64_t) {
    const Piece mine{memory.data() + thread * part, each, each};
    uint64_t result = 0;
    int64_t moved = 0;
    while (moved < kStep) moved += go_through(traffic, way, mine, &result);
    sink.fetch_or(result, std::memory_order_relaxed);
    return static_cast<double>(moved);
  });
}

// Measures large working sets: all threads go through the same memory, each taking the next piece,
// so that the cache of one core never holds what its thread reads next. If one thread is held up,
// the others still go through all of the memory.
double rate_of_all(Traffic traffic, Way way, int64_t bytes, int threads, double seconds) {
  constexpr int64_t kPiece = int64_t{1} << 20;
  const int streams = streams_of(traffic);
  const int64_t stream = bytes / streams / kPiece * kPiece, pieces = stream / kPiece;
  Arena memory;
  if (!memory.reserve(streams * stream)) return 0;
  std::atomic<uint64_t> sink{0};
  std::atomic<int64_t> next{0};
  const auto prepare = [&](int thread, int count) {
    for (int64_t i = thread; i < streams * pieces; i += count) {
      std::memset(memory.data() + i * kPiece, 0, static_cast<size_t>(kPiece));
    }
  };
  const int64_t window = ceil_div(pieces, threads);
  return best_rate(threads, seconds, window, prepare, [&](int, int64_t) {
    const int64_t i = next.fetch_add(1, std::memory_order_relaxed) % pieces;
    uint64_t result = 0;
    const int64_t moved =
        go_through(traffic, way, {memory.data() + i * kPiece, kPiece, stream}, &result);
    sink.fetch_or(result, std::memory_order_relaxed);
    return static_cast<double>(moved);
  });
}

}  // namespace

double bytes_per_second(Traffic traffic, int64_t bytes, int threads, double seconds) {
  constexpr int64_t kOwnCaches = int64_t{4} << 20;  // no core has larger caches of its own
  threads = std::max(threads, 1);
  const auto rate = bytes / threads <= kOwnCaches ? rate_of_parts : rate_of_all;
  if (traffic == Traffic::kUpdate) return rate(traffic, Way::kPlain, bytes, threads, seconds);
  double best = 0;
  for (const Way way : cpu::kWays) {
    best = std::max(best, rate(traffic, way, bytes, threads, seconds / std::size(cpu::kWays)));
  }
  return best;
}

double flops_per_second(Arithmetic arithmetic, int threads, double seconds) {
  constexpr int64_t kSteps = 4096;
  const auto probe = arithmetic == Arithmetic::kFloat32    ? cpu::probe_float32
                     : arithmetic == Arithmetic::kBfloat16 ? cpu::probe_bfloat16
                                                           : cpu::probe_int8;
  return best_rate(
      std::max(threads, 1), seconds, 1, [](int, int) {},
      [&](int, int64_t) {
        float sink = 0;
        const int64_t flops = probe(kSteps, &sink);
        volatile float kept = sink;
        (void)kept;
        return static_cast<double>(flops);
      });
}

}  // namespace fk::engine

// The Python benchmarks call these two; ceilings.h says what they measure. They return 0 if the
// name in the first argument is unknown or the rate cannot be measured.
extern "C" {

FK_API double fk_measure_bandwidth(const char* traffic, int64_t bytes, int32_t threads,
                                   double seconds) {
  using fk::engine::Traffic;
  constexpr std::pair<const char*, Traffic> kNames[] = {{"read", Traffic::kRead},
                                                        {"write", Traffic::kWrite},
                                                        {"copy", Traffic::kCopy},
                                                        {"add", Traffic::kAdd},
                                                        {"update", Traffic::kUpdate}};
  try {
    for (const auto& [name, value] : kNames) {
      if (std::strcmp(name, traffic) != 0) continue;
      return fk::engine::bytes_per_second(value, bytes, threads, seconds);
    }
  } catch (const std::bad_alloc&) {
  }
  return 0;
}

FK_API double fk_measure_flops(const char* arithmetic, int32_t threads, double seconds) {
  using fk::engine::Arithmetic;
  constexpr std::pair<const char*, Arithmetic> kNames[] = {{"float32", Arithmetic::kFloat32},
                                                           {"bfloat16", Arithmetic::kBfloat16},
                                                           {"int8", Arithmetic::kInt8}};
  try {
    for (const auto& [name, value] : kNames) {
      if (std::strcmp(name, arithmetic) != 0) continue;
      return fk::engine::flops_per_second(value, threads, seconds);
    }
  } catch (const std::bad_alloc&) {
  }
  return 0;
}

}  // extern "C"
