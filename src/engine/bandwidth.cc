// How fast the machine reads memory: the ceiling of decoding.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/bandwidth.cc"
#include "cpu/foreach_target.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {

uint64_t read_all(const uint8_t* p, int64_t bytes) {
  const hn::ScalableTag<uint64_t> d;
  const int64_t step = static_cast<int64_t>(hn::Lanes(d)) * 8;
  auto a = hn::Zero(d), b = a, c = a, e = a;
  for (int64_t i = 0; i + 4 * step <= bytes; i += 4 * step) {
    for (int64_t line = 0; line < 4 * step; line += 64) hwy::Prefetch(p + i + line + 4096);
    a = hn::Xor(a, hn::LoadU(d, reinterpret_cast<const uint64_t*>(p + i)));
    b = hn::Xor(b, hn::LoadU(d, reinterpret_cast<const uint64_t*>(p + i + step)));
    c = hn::Xor(c, hn::LoadU(d, reinterpret_cast<const uint64_t*>(p + i + 2 * step)));
    e = hn::Xor(e, hn::LoadU(d, reinterpret_cast<const uint64_t*>(p + i + 3 * step)));
  }
  return hn::GetLane(hn::Xor(hn::Xor(a, b), hn::Xor(c, e)));
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "engine/bandwidth.h"
#include "engine/parallel.h"

namespace fk::cpu {
FK_CPU_EXPORT(read_all);
static auto read_now() { return FK_CPU_DISPATCH(read_all); }
}  // namespace fk::cpu

namespace fk::engine {
namespace {

constexpr int64_t kBytes = int64_t{256} << 20;
constexpr int64_t kPiece = int64_t{1} << 20;

}  // namespace

MemoryReader::MemoryReader() {
  if (!memory_.reserve(kBytes)) return;
  parallel(kBytes / kPiece, 1, [&](int64_t begin, int64_t end) {
    std::memset(memory_.data() + begin * kPiece, 1, static_cast<size_t>((end - begin) * kPiece));
  });
}

double MemoryReader::bytes_per_second(int passes) const {
  if (memory_.data() == nullptr) return 0;
  std::atomic<uint64_t> sink{0};
  double best = 0;
  for (int i = 0; i < passes; ++i) {
    const auto start = std::chrono::steady_clock::now();
    parallel(kBytes / kPiece, 1, [&](int64_t begin, int64_t end) {
      sink ^= cpu::read_now()(memory_.data() + begin * kPiece, (end - begin) * kPiece);
    });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(kBytes) / took.count());
  }
  return best;
}

double read_bandwidth() { return MemoryReader().bytes_per_second(5); }

}  // namespace fk::engine
#endif
