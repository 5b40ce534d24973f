// The inner loops that find a machine's ceilings, compiled once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/probes.cc"
#include "engine/probes.h"

#include "cpu/foreach_target.h"
#include "cpu/gemm/bytes.h"
#include "cpu/gemm/tiles.h"
#include "cpu/gemm/tiles_bfloat16.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace probes {

using Lanes = hn::ScalableTag<float>;
using V = hn::Vec<Lanes>;

HWY_INLINE V load(const uint8_t* p) { return hn::Load(Lanes(), reinterpret_cast<const float*>(p)); }

// Stores past the caches where kWay asks for it.
template <Way kWay>
HWY_INLINE void store(V v, uint8_t* p) {
  if constexpr (kWay == Way::kAhead) {
    hn::Stream(v, Lanes(), reinterpret_cast<float*>(p));
  } else {
    hn::Store(v, Lanes(), reinterpret_cast<float*>(p));
  }
}

// Calls body(offset) for the offset of each vector in `bytes`, several in each iteration: eight in
// a row, or with Way::kFour one in each quarter of the memory.
template <Way kWay, class Body>
HWY_INLINE void for_each_vector(int64_t bytes, const Body& body) {
  constexpr int kPlaces = kWay == Way::kFour ? 4 : 1, kUnrolled = kWay == Way::kFour ? 1 : 8;
  const int64_t step = static_cast<int64_t>(hn::Lanes(Lanes())) * 4;
  const int64_t apart = bytes / kPlaces;
  for (int64_t i = 0; i < apart; i += kUnrolled * step) {
    detail::repeat<kPlaces>([&](auto place) FK_MATRIX_BODY {
      detail::repeat<kUnrolled>([&](auto u) FK_MATRIX_BODY { body(place * apart + i + u * step); });
    });
  }
}

// Reads all bytes into four independent registers; what it returns keeps the compiler from leaving
// the reads out.
template <Way kWay>
uint64_t read(const uint8_t* p, int64_t bytes) {
  constexpr int64_t kAhead = 4096, kLine = 64;
  const hn::Repartition<uint64_t, Lanes> d;
  const int64_t step = static_cast<int64_t>(hn::Lanes(Lanes())) * 4;
  const int64_t places = kWay == Way::kFour ? 4 : 1;
  const int64_t apart = kWay == Way::kFour ? bytes / 4 : step, iteration_bytes = 4 / places * step;
  auto a = hn::Zero(d), b = a, c = a, e = a;
  const auto take = [&](int64_t i) FK_MATRIX_BODY { return hn::BitCast(d, load(p + i)); };
  for (int64_t i = 0; i < bytes / places; i += iteration_bytes) {
    if constexpr (kWay == Way::kAhead) {
      for (int64_t line = 0; line < iteration_bytes; line += kLine)
        hwy::Prefetch(p + i + line + kAhead);
    }
    a = hn::Or(a, take(i));
    b = hn::Or(b, take(i + apart));
    c = hn::Or(c, take(i + 2 * apart));
    e = hn::Or(e, take(i + 3 * apart));
  }
  return hn::GetLane(hn::Or(hn::Or(a, b), hn::Or(c, e)));
}

template <Way kWay>
void write(uint8_t* p, int64_t bytes) {
  const V value = hn::Set(Lanes(), 1.0f);
  for_each_vector<kWay>(bytes, [&](int64_t i) FK_MATRIX_BODY { store<kWay>(value, p + i); });
}

template <Way kWay>
void copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
  for_each_vector<kWay>(bytes,
                        [&](int64_t i) FK_MATRIX_BODY { store<kWay>(load(from + i), to + i); });
}

template <Way kWay>
void add(uint8_t* to, const uint8_t* a, const uint8_t* b, int64_t bytes) {
  for_each_vector<kWay>(bytes, [&](int64_t i) FK_MATRIX_BODY {
    store<kWay>(hn::Add(load(a + i), load(b + i)), to + i);
  });
}

// Calls body(way), with the way as a compile-time constant.
template <class Body>
HWY_INLINE void with_way(Way way, const Body& body) {
  if (way == Way::kPlain) body(std::integral_constant<Way, Way::kPlain>());
  if (way == Way::kAhead) body(std::integral_constant<Way, Way::kAhead>());
  if (way == Way::kFour) body(std::integral_constant<Way, Way::kFour>());
}

// How many sums are kept at once: as many as a tile of cpu/gemm/tiles.h has, which hide the
// latency.
constexpr int kSums = detail::kManyRegisters ? 24 : 12;

#if FK_CPU_BFLOAT16_TARGET
// The body of probe_bfloat16.
FK_BFLOAT16_ATTR int64_t dot_products(int64_t steps, float* sink) {
  const auto factor = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3a803a80));  // 2^-10
  __m512 sum[kSums];
  detail::repeat_pairs<kSums>([&](auto s) FK_PAIRS_BODY { sum[s] = _mm512_setzero_ps(); });
  for (int64_t i = 0; i < steps; ++i) {
    detail::repeat_pairs<kSums>(
        [&](auto s) FK_PAIRS_BODY { sum[s] = _mm512_dpbf16_ps(sum[s], factor, factor); });
    // The empty statement hides that all sums are equal: the compiler would keep only one.
    detail::repeat_pairs<kSums>([&](auto s) FK_PAIRS_BODY { asm volatile("" : "+v"(sum[s])); });
  }
  detail::repeat_pairs<kSums>([&](auto s) FK_PAIRS_BODY { *sink += _mm512_cvtss_f32(sum[s]); });
  return steps * kSums * 16 * 4;
}
#endif

// Hides a vector from the compiler: what it computes of it is not known, nor equal to anything
// else.
template <class Vector>
HWY_INLINE void hide(Vector& v) {
#if defined(__x86_64__)
  asm volatile("" : "+v"(v.raw));
#else
  asm volatile("" : "+w"(v.raw));
#endif
}

// The body of probe_int8: all bytes are 1, so that each lane of a sum takes 4 a step.
template <bool kVnni>
int64_t byte_products(int64_t steps, float* sink) {
  const I32 d;
  auto codes = hn::Set(Bytes(), 1);
  const auto values = hn::Set(d, 0x01010101);
  hn::Vec<I32> sum[kSums];
  detail::repeat<kSums>([&](auto s) FK_MATRIX_BODY { sum[s] = hn::Zero(d); });
  for (int64_t i = 0; i < steps; ++i) {
    detail::repeat<kSums>([&](auto s) FK_MATRIX_BODY {
      if constexpr (kVnni) {
        sum[s] = add_by_vnni(sum[s], codes, values);
      } else {
        hide(codes);  // or one product would serve all sums
        sum[s] = hn::Add(sum[s], add_pairs(multiply_pairs(codes, hn::BitCast(Bytes(), values))));
      }
    });
    detail::repeat<kSums>([&](auto s) FK_MATRIX_BODY { hide(sum[s]); });
  }
  detail::repeat<kSums>([&](auto s)
                            FK_MATRIX_BODY { *sink += static_cast<float>(hn::GetLane(sum[s])); });
  return steps * kSums * static_cast<int64_t>(hn::Lanes(d)) * 4 * 2;
}

}  // namespace probes

uint64_t probe_read(const uint8_t* p, int64_t bytes, Way way) {
  uint64_t result = 0;
  probes::with_way(way, [&](auto w) FK_MATRIX_BODY { result = probes::read<w()>(p, bytes); });
  return result;
}

void probe_write(uint8_t* p, int64_t bytes, Way way) {
  probes::with_way(way, [&](auto w) FK_MATRIX_BODY { probes::write<w()>(p, bytes); });
  hwy::FlushStream();
}

void probe_copy(uint8_t* to, const uint8_t* from, int64_t bytes, Way way) {
  probes::with_way(way, [&](auto w) FK_MATRIX_BODY { probes::copy<w()>(to, from, bytes); });
  hwy::FlushStream();
}

void probe_add(uint8_t* to, const uint8_t* a, const uint8_t* b, int64_t bytes, Way way) {
  probes::with_way(way, [&](auto w) FK_MATRIX_BODY { probes::add<w()>(to, a, b, bytes); });
  hwy::FlushStream();
}

void probe_update(uint8_t* p, int64_t bytes) {
  const auto factor = hn::Set(probes::Lanes(), 0.5f);
  probes::for_each_vector<Way::kPlain>(bytes, [&](int64_t i) FK_MATRIX_BODY {
    probes::store<Way::kPlain>(hn::Mul(probes::load(p + i), factor), p + i);
  });
}

int64_t probe_float32(int64_t steps, float* sink) {
  const probes::Lanes d;
  const auto factor = hn::Set(d, 0x1p-10f);
  probes::V sum[probes::kSums];
  detail::repeat<probes::kSums>([&](auto s) FK_MATRIX_BODY { sum[s] = hn::Zero(d); });
  for (int64_t i = 0; i < steps; ++i) {
    detail::repeat<probes::kSums>(
        [&](auto s) FK_MATRIX_BODY { sum[s] = hn::MulAdd(factor, factor, sum[s]); });
    // All sums are equal: the compiler would keep only one.
    detail::repeat<probes::kSums>([&](auto s) FK_MATRIX_BODY { probes::hide(sum[s]); });
  }
  detail::repeat<probes::kSums>([&](auto s) FK_MATRIX_BODY { *sink += hn::GetLane(sum[s]); });
  return steps * probes::kSums * static_cast<int64_t>(hn::Lanes(d)) * 2;
}

int64_t probe_bfloat16(int64_t steps, float* sink) {
#if FK_CPU_BFLOAT16_TARGET
  if (multiplies_bfloat16()) return probes::dot_products(steps, sink);
#endif
  (void)steps, (void)sink;
  return 0;
}

int64_t probe_int8(int64_t steps, float* sink) {
  if (kCanHaveVnni && has_vnni()) return probes::byte_products<kCanHaveVnni>(steps, sink);
  return probes::byte_products<false>(steps, sink);
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {
namespace {
FK_CPU_EXPORT(probe_read);
FK_CPU_EXPORT(probe_write);
FK_CPU_EXPORT(probe_copy);
FK_CPU_EXPORT(probe_add);
FK_CPU_EXPORT(probe_update);
FK_CPU_EXPORT(probe_float32);
FK_CPU_EXPORT(probe_bfloat16);
FK_CPU_EXPORT(probe_int8);
}  // namespace

uint64_t probe_read(const uint8_t* p, int64_t bytes, Way way) {
  return FK_CPU_DISPATCH(probe_read)(p, bytes, way);
}
void probe_write(uint8_t* p, int64_t bytes, Way way) {
  FK_CPU_DISPATCH(probe_write)(p, bytes, way);
}
void probe_copy(uint8_t* to, const uint8_t* from, int64_t bytes, Way way) {
  FK_CPU_DISPATCH(probe_copy)(to, from, bytes, way);
}
void probe_add(uint8_t* to, const uint8_t* a, const uint8_t* b, int64_t bytes, Way way) {
  FK_CPU_DISPATCH(probe_add)(to, a, b, bytes, way);
}
void probe_update(uint8_t* p, int64_t bytes) { FK_CPU_DISPATCH(probe_update)(p, bytes); }
int64_t probe_float32(int64_t steps, float* sink) {
  return FK_CPU_DISPATCH(probe_float32)(steps, sink);
}
int64_t probe_bfloat16(int64_t steps, float* sink) {
  return FK_CPU_DISPATCH(probe_bfloat16)(steps, sink);
}
int64_t probe_int8(int64_t steps, float* sink) { return FK_CPU_DISPATCH(probe_int8)(steps, sink); }
}  // namespace fk::cpu
#endif
