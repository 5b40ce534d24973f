#include "fuzz_limits.h"

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <new>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FK_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define FK_SANITIZED 1
#endif
#endif

namespace {

// A slow machine has twice the time, and a watched program twenty times.
#ifdef FK_SANITIZED
constexpr double kMostSeconds = 2.0 * 20;
#else
constexpr double kMostSeconds = 2.0 * 2;
#endif
constexpr size_t kMostBytes = size_t{512} << 20;

std::atomic<size_t> held{0}, peak{0};

void* take(size_t bytes) {
  void* memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) return nullptr;
  const size_t now = held += malloc_usable_size(memory);
  if (now > peak) peak = now;
  return memory;
}

void give(void* memory) {
  if (memory == nullptr) return;
  held -= malloc_usable_size(memory);
  std::free(memory);
}

}  // namespace

void* operator new(size_t bytes) {
  void* memory = take(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return take(bytes); }
void operator delete(void* memory) noexcept { give(memory); }
void operator delete(void* memory, size_t) noexcept { give(memory); }

namespace fk::model {
namespace {

const std::string* input = nullptr;

double processor_seconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

}  // namespace

Meter::Meter() : begin_(processor_seconds()), held_(held) { peak = held.load(); }
double Meter::seconds() const { return processor_seconds() - begin_; }
size_t Meter::bytes() const { return peak - std::min<size_t>(peak, held_); }

Extremes& extremes() {
  static Extremes all;
  return all;
}

void begin_input(const std::string* bytes) { input = bytes; }

void report_finding(const std::string& what) {
  std::fprintf(stderr, "fk_fuzz: %s\n", what.c_str());
  if (input != nullptr) {
    std::ofstream("fk_fuzz_finding", std::ios::binary) << *input;
    std::fprintf(stderr, "fk_fuzz: the file is in fk_fuzz_finding\n");
  }
  std::abort();
}

void check_limits(const char* what, const Meter& meter) {
  const double seconds = meter.seconds();
  const size_t bytes = meter.bytes();
  extremes().seconds = std::max(extremes().seconds, seconds);
  extremes().bytes = std::max(extremes().bytes, bytes);
  if (seconds <= kMostSeconds && bytes <= kMostBytes) return;
  report_finding(std::string(what) + " took " + std::to_string(seconds) + " s and " +
                 std::to_string(bytes >> 20) + " MiB");
}

}  // namespace fk::model
