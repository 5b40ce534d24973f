// The pool is one static object of plain atomics: it needs no construction and no destruction, so
// it works before main, during exit and, once reset, in a forked child.
//
// A job is opened by the calling thread, which then works on it at once. Workers join when they
// notice it, and the caller waits only for those that joined: a worker that is asleep or preempted
// delays nobody, and a wake-up that gets lost costs speed, never correctness.
#include "core/thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <string>

namespace fk {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxThreads = 1024;
// Each thread gets so many ranges: enough to even out threads of unequal speed, few enough that
// claiming them costs nothing.
constexpr int64_t kRangesPerThread = 4;
// A waiting thread first spins, for decoding posts jobs a few microseconds apart. It then offers
// its core to other threads between looks, and at last sleeps.
constexpr auto kSpinTime = std::chrono::microseconds(15);
constexpr auto kAwakeTime = std::chrono::microseconds(50);

// Pool::state holds the number of workers inside the job, whether it is open, and the job's number.
constexpr uint32_t kInsideMask = 0xfff;
constexpr uint32_t kOpen = 0x1000;
constexpr uint32_t kJobStep = 0x2000;
constexpr uint32_t kJobMask = ~(kJobStep - 1);
constexpr uint32_t kNoJob = 1;  // equals no job's number
static_assert(kMaxThreads < kInsideMask);

// Keeps what was thrown in a worker, for the caller to throw on.
struct WorkerError {
  std::atomic<bool> taken{false};
  std::exception_ptr error;
};

struct Job {
  fk_range_body body;
  void* context;
  int64_t count;
  int64_t range;  // items per range
  int64_t ranges;
  WorkerError* thrown;
};

struct Pool {
  alignas(64) std::atomic<uint32_t> state{0};
  alignas(64) std::atomic<int64_t> next_range{0};
  // The holder of the pool writes these, while no worker is inside a job.
  alignas(64) Job job{};
  // Workers with an index from here on stay out, asleep.
  alignas(64) std::atomic<uint32_t> workers_wanted{0};
  std::atomic<int> workers_asleep{0};
  int workers_started = 0;
  alignas(64) std::atomic<bool> held{false};
  std::atomic<int> num_threads{0};  // 0: not yet known
};

Pool pool;
thread_local bool inside_body = false;

void futex_wait(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word, int threads) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, threads, nullptr, nullptr, 0);
}

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits for `ready`, for at most `limit`; says whether it came.
template <class Ready>
bool spin_until(const Ready& ready, Clock::duration limit) {
  constexpr int kLooksPerClock = 16;
  Clock::time_point start{};
  for (;;) {
    for (int i = 0; i < kLooksPerClock; ++i) {
      if (ready()) return true;
      pause();
    }
    const Clock::time_point now = Clock::now();
    if (start == Clock::time_point{}) start = now;
    if (now - start >= limit) return false;
    if (now - start >= kSpinTime) sched_yield();
  }
}

void run_ranges() {
  const Job& job = pool.job;
  for (;;) {
    const int64_t i = pool.next_range.fetch_add(1, std::memory_order_relaxed);
    if (i >= job.ranges) return;
    const int64_t begin = i * job.range;
    job.body(begin, i + 1 == job.ranges ? job.count : begin + job.range, job.context);
  }
}

void run_ranges_in_worker() {
  WorkerError& thrown = *pool.job.thrown;
  try {
    run_ranges();
  } catch (...) {
    if (!thrown.taken.exchange(true, std::memory_order_relaxed)) {
      thrown.error = std::current_exception();
    }
  }
}

// Returns when there may be an open job other than `last`.
void wait_for_job(uint32_t last) {
  const auto is_new = [last](uint32_t state) {
    return (state & kOpen) != 0 && (state & kJobMask) != last;
  };
  if (spin_until([&] { return is_new(pool.state.load(std::memory_order_relaxed)); }, kAwakeTime)) {
    return;
  }
  // The opener of a job looks at workers_asleep after the state changed, we look at the state after
  // counting ourselves: one of the two notices.
  pool.workers_asleep.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t state = pool.state.load(std::memory_order_seq_cst);
  if (!is_new(state)) futex_wait(pool.state, state);
  pool.workers_asleep.fetch_sub(1, std::memory_order_relaxed);
}

void* worker_main(void* index_as_pointer) {
  const auto index = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(index_as_pointer));
  inside_body = true;
  uint32_t last = kNoJob;
  for (;;) {
    const uint32_t wanted = pool.workers_wanted.load(std::memory_order_relaxed);
    if (index >= wanted) {
      futex_wait(pool.workers_wanted, wanted);
      continue;
    }
    wait_for_job(last);
    const uint32_t state = pool.state.fetch_add(1, std::memory_order_acquire);
    last = state & kJobMask;
    // While we are counted inside an open job, its fields stay as they are.
    if ((state & kOpen) != 0 &&
        (state & kInsideMask) < pool.workers_wanted.load(std::memory_order_relaxed)) {
      run_ranges_in_worker();
    }
    pool.state.fetch_sub(1, std::memory_order_release);
  }
  return nullptr;
}

// Starts a worker, detached, so that nothing waits for it when the process ends. Workers leave
// signals that are meant for the process to the program's own threads.
bool start_worker(int index) {
  sigset_t blocked, before;
  sigfillset(&blocked);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGPROF}) {
    sigdelset(&blocked, fault);
  }
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  pthread_t thread;
  const int error = pthread_create(&thread, &attributes, worker_main,
                                   reinterpret_cast<void*>(static_cast<uintptr_t>(index)));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  if (error == 0) pthread_setname_np(thread, "flashkernel");
  return error == 0;
}

// The holder of the pool calls this between jobs. Returns how many sleepers a job must wake so that
// `needed` of them work on it.
int want_workers(int workers, int needed) {
  const uint32_t before = pool.workers_wanted.load(std::memory_order_relaxed);
  const auto wanted = static_cast<uint32_t>(workers);
  if (wanted != before) {
    pool.workers_wanted.store(wanted, std::memory_order_relaxed);
    if (wanted > before) futex_wake(pool.workers_wanted, INT_MAX);
    // Where the system gives no more threads, we work with those there are.
    while (pool.workers_started < workers && start_worker(pool.workers_started)) {
      ++pool.workers_started;
    }
  }
  // Workers that are to stay out must be woken to learn of it.
  return wanted < before ? INT_MAX : needed;
}

// The caller's part in a job. It ends with the job, also where the caller's own range throws:
// workers may still be reading what lies on its stack.
class OpenJob {
 public:
  OpenJob() { inside_body = true; }
  ~OpenJob() {
    if (is_open_) pool.state.fetch_sub(kOpen, std::memory_order_relaxed);
    const auto all_left = [] {
      return (pool.state.load(std::memory_order_acquire) & kInsideMask) == 0;
    };
    if (is_open_) spin_until(all_left, Clock::duration::max());
    inside_body = false;
    pool.held.store(false, std::memory_order_release);
  }
  OpenJob(const OpenJob&) = delete;

  void open() {
    pool.state.fetch_add(kJobStep | kOpen, std::memory_order_seq_cst);
    is_open_ = true;
  }

 private:
  bool is_open_ = false;
};

// The holder of the pool calls this, and holds it no more when it returns.
void run_with_workers(Job job, int threads) {
  WorkerError thrown;
  job.thrown = &thrown;
  {
    OpenJob open_job;
    const int64_t helpers = std::min<int64_t>(threads - 1, job.ranges - 1);
    const int to_wake = want_workers(threads - 1, static_cast<int>(helpers));
    pool.job = job;
    pool.next_range.store(0, std::memory_order_relaxed);
    open_job.open();
    if (pool.workers_asleep.load(std::memory_order_seq_cst) > 0) futex_wake(pool.state, to_wake);
    run_ranges();
  }
  if (thrown.error != nullptr) std::rethrow_exception(thrown.error);
}

// Gives the share of the CPUs that a control group allows, in cores; 0 means no limit. `quota` and
// `period` are in microseconds, "max" or negative where unlimited.
double cores_of(const std::string& quota, const std::string& period) {
  const double q = std::strtod(quota.c_str(), nullptr);
  const double p = std::strtod(period.c_str(), nullptr);
  return q > 0 && p > 0 ? q / p : 0;
}

double cgroup_cores(const std::string& folder) {
  std::string quota, period;
  if (std::ifstream(folder + "/cpu.max") >> quota >> period) return cores_of(quota, period);
  if (std::ifstream(folder + "/cpu.cfs_quota_us") >> quota &&
      std::ifstream(folder + "/cpu.cfs_period_us") >> period) {
    return cores_of(quota, period);
  }
  return 0;
}

// Finds the tightest limit among this process's control group and those above it, in cores; 0 means
// none.
double cgroup_limit() {
  double limit = 0;
  std::ifstream memberships("/proc/self/cgroup");
  // Each line reads "number:controllers:/path", with no controllers in version 2.
  for (std::string line; std::getline(memberships, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string mount = "/sys/fs/cgroup";
    if (controllers != ",,") {
      if (controllers.find(",cpu,") == std::string::npos) continue;
      mount += "/cpu";
    }
    for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
      if (path == "/") path.clear();
      const double cores = cgroup_cores(mount + path);
      if (cores > 0 && (limit == 0 || cores < limit)) limit = cores;
      if (path.empty() || path.rfind('/') == std::string::npos) break;
    }
  }
  return limit;
}

int cores_in_affinity_mask() {
  for (int cpus = 1024; cpus <= (1 << 16); cpus *= 4) {
    cpu_set_t* set = CPU_ALLOC(cpus);
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(cpus);
    const int cores = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (cores > 0) return cores;
  }
  return std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
}

int default_num_threads() {
  if (const char* text = std::getenv("FK_NUM_THREADS")) {
    char* end = nullptr;
    const long threads = std::strtol(text, &end, 10);
    if (end != text && *end == '\0' && threads >= 1) {
      return static_cast<int>(std::min<long>(threads, kMaxThreads));
    }
    std::fprintf(stderr, "flashkernel: FK_NUM_THREADS: expected a number from 1, got \"%s\"\n",
                 text);
  }
  int threads = cores_in_affinity_mask();
  const double limit = cgroup_limit();
  if (limit > 0) threads = std::min(threads, static_cast<int>(limit + 0.999));
  return std::clamp(threads, 1, kMaxThreads);
}

// A forked child has the forking thread only. Whatever other threads were doing with the pool will
// never be finished there, so the pool starts afresh.
void reset_after_fork() {
  pool.state.store(0, std::memory_order_relaxed);
  pool.workers_wanted.store(0, std::memory_order_relaxed);
  pool.workers_asleep.store(0, std::memory_order_relaxed);
  pool.workers_started = 0;
  pool.held.store(false, std::memory_order_relaxed);
}

// Registers at load time: a lock taken for lazy registration could itself be caught by a fork.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, reset_after_fork);

}  // namespace

int num_threads() {
  int threads = pool.num_threads.load(std::memory_order_relaxed);
  if (threads == 0) {
    const int found = default_num_threads();
    // A set_num_threads that came in between stands.
    if (pool.num_threads.compare_exchange_strong(threads, found, std::memory_order_relaxed)) {
      threads = found;
    }
  }
  return threads;
}

void set_num_threads(int threads) {
  pool.num_threads.store(std::clamp(threads, 1, kMaxThreads), std::memory_order_relaxed);
}

void pool_parallel_for(void*, int64_t count, int64_t grain, fk_range_body body, void* context) {
  if (count <= 0) return;
  const int threads = inside_body ? 1 : num_threads();
  const int64_t range = std::max({int64_t{1}, grain, count / (threads * kRangesPerThread)});
  const int64_t ranges = (count - 1) / range + 1;
  if (threads == 1 || ranges == 1 || pool.held.exchange(true, std::memory_order_acquire)) {
    body(0, count, context);
    return;
  }
  run_with_workers({body, context, count, range, ranges, nullptr}, threads);
}

}  // namespace fk
