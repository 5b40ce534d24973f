// This is the CPU kernel of rope, for both directions, since the backward turns the other way.
//
// Floor: memory traffic, one read and one write of x; a pair costs four multiplications.
//
// Threads take tokens. A token's cosines and sines are first laid out as the vectors that its heads
// will use: as they are for halves, each twice (and the sines with alternating sign) for
// interleaved pairs, where a vector of x is then x * cos + swapped(x) * sin. All heads share them.

#include "ops/rope/rope.h"

#ifndef FK_OPS_ROPE_CPU_ONCE_
#define FK_OPS_ROPE_CPU_ONCE_

#include <algorithm>

#include "cpu/axis_plan.h"
#include "cpu/cache.h"

namespace fk::cpu {
namespace {

// The angles of so many pairs are laid out at a time.
constexpr int64_t kPairs = 256;

struct RopeJob {
  Tensor x, cos, sin, positions, y;
  bool interleaved;
  float direction;      // 1: forward, -1: backward
  bool stream = false;  // y goes past the caches

  int64_t position(int64_t batch, int64_t token) const {
    if (!positions) return token;
    const int64_t i =
        token * positions.stride(-1) + (positions.ndim == 2 ? batch * positions.stride(0) : 0);
    return positions.dtype == DType::kInt64 ? positions.ptr<const int64_t>()[i]
                                            : positions.ptr<const int32_t>()[i];
  }
};

}  // namespace
}  // namespace fk::cpu

#endif  // FK_OPS_ROPE_CPU_ONCE_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rope/cpu.cc"
#include "cpu/foreach_target.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

// Holds the angles of up to kPairs pairs of a token, as float.
struct Angles {
  alignas(64) float cos[2 * kPairs];
  alignas(64) float sin[2 * kPairs];
};

template <class P>
HWY_INLINE void widen(const P* p, int64_t stride, int64_t n, float* out) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  if (stride != 1) {
    for (int64_t k = 0; k < n; ++k) out[k] = ToF32(p + k * stride);
    return;
  }
  int64_t k = 0;
  for (; k + lanes <= n; k += lanes) hn::Store(LoadF32(d, p + k), d, out + k);
  if (k < n) hn::Store(LoadNF32(d, p + k, static_cast<size_t>(n - k)), d, out + k);
}

// Reads entries [first, first + n) of a table's row. A table is in float32 or in x's dtype.
template <class T>
HWY_INLINE void read_table(const Tensor& table, int64_t row, int64_t first, int64_t n, float* out) {
  const int64_t stride = table.stride(1), offset = row * table.stride(0) + first * stride;
  if (sizeof(T) == 4 || table.dtype == DType::kFloat32) {
    widen(table.ptr<const float>() + offset, stride, n, out);
  } else {
    widen(table.ptr<const T>() + offset, stride, n, out);
  }
}

// Writes each angle twice, the first time with its sine negated. It goes from the end, so that it
// can be done in place.
HWY_INLINE void spread(Angles& angles, int64_t n) {
  const hn::FixedTag<float, 4> d;
  for (int64_t k = (n - 1) / 4 * 4; k >= 0; k -= 4) {
    const auto c = hn::Load(d, angles.cos + k), s = hn::Load(d, angles.sin + k);
    hn::Store(hn::InterleaveLower(d, c, c), d, angles.cos + 2 * k);
    hn::Store(hn::InterleaveUpper(d, c, c), d, angles.cos + 2 * k + 4);
    hn::Store(hn::InterleaveLower(d, hn::Neg(s), s), d, angles.sin + 2 * k);
    hn::Store(hn::InterleaveUpper(d, hn::Neg(s), s), d, angles.sin + 2 * k + 4);
  }
}

template <bool kStream, class V, class T>
HWY_INLINE void store(V v, T* p) {
  if constexpr (kStream) {
    StreamF32(F32(), v, p);
  } else {
    StoreF32(F32(), v, p);
  }
}

// Turns pairs (x[k], x[k + half]) of kHeads heads, x_head and y_head elements apart, which share
// the loads of the angles.
template <bool kStream, int kHeads, class T>
HWY_INLINE void turn_halves(const Angles& angles, const T* x, int64_t x_head, T* y, int64_t y_head,
                            int64_t half, int64_t n) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  int64_t k = 0;
  for (; k + lanes <= n; k += lanes) {
    const auto c = hn::Load(d, angles.cos + k), s = hn::Load(d, angles.sin + k);
    // All loads come first: behind a store to an address that agrees in its lowest 12 bits, as the
    // other head's may, a load would wait.
    hn::Vec<F32> a[kHeads], b[kHeads];
    for (int h = 0; h < kHeads; ++h) {
      a[h] = LoadF32(d, x + h * x_head + k);
      b[h] = LoadF32(d, x + h * x_head + half + k);
    }
    for (int h = 0; h < kHeads; ++h) {
      T* yh = y + h * y_head + k;
      store<kStream>(hn::NegMulAdd(b[h], s, hn::Mul(a[h], c)), yh);
      store<kStream>(hn::MulAdd(a[h], s, hn::Mul(b[h], c)), yh + half);
    }
  }
  if (k == n) return;
  const size_t part = static_cast<size_t>(n - k);
  const auto c = hn::Load(d, angles.cos + k), s = hn::Load(d, angles.sin + k);
  for (int h = 0; h < kHeads; ++h) {
    const T* xh = x + h * x_head + k;
    T* yh = y + h * y_head + k;
    const auto a = LoadNF32(d, xh, part), b = LoadNF32(d, xh + half, part);
    StoreNF32(d, hn::NegMulAdd(b, s, hn::Mul(a, c)), yh, part);
    StoreNF32(d, hn::MulAdd(a, s, hn::Mul(b, c)), yh + half, part);
  }
}

// Turns pairs (x[2k], x[2k + 1]), with the angles spread.
template <bool kStream, class T>
HWY_INLINE void turn_neighbours(const Angles& angles, const T* x, T* y, int64_t n) {
  const F32 d;
  const int64_t lanes = hn::Lanes(d);
  int64_t k = 0;
  for (; k + lanes <= 2 * n; k += lanes) {
    const auto c = hn::Load(d, angles.cos + k), s = hn::Load(d, angles.sin + k);
    const auto v = LoadF32(d, x + k);
    store<kStream>(hn::MulAdd(hn::Shuffle2301(v), s, hn::Mul(v, c)), y + k);
  }
  if (k < 2 * n) {
    const size_t part = static_cast<size_t>(2 * n - k);
    const auto c = hn::Load(d, angles.cos + k), s = hn::Load(d, angles.sin + k);
    const auto v = LoadNF32(d, x + k, part);
    StoreNF32(d, hn::MulAdd(hn::Shuffle2301(v), s, hn::Mul(v, c)), y + k, part);
  }
}

// Turns pairs at any strides; the angles are not spread.
template <class T>
void turn_strided(const Angles& angles, const T* x, int64_t x_stride, T* y, int64_t y_stride,
                  int64_t step, int64_t apart, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    const float c = angles.cos[k], s = angles.sin[k];
    const float a = ToF32(x + k * step * x_stride);
    const float b = ToF32(x + (k * step + apart) * x_stride);
    FromF32(a * c - b * s, y + k * step * y_stride);
    FromF32(b * c + a * s, y + (k * step + apart) * y_stride);
  }
}

template <class T, bool kStream>
void turn_tokens(const RopeJob& job, int64_t begin, int64_t end) {
  const int64_t length = job.x.size(1), heads = job.x.size(2), size = job.x.size(3);
  const int64_t pairs = job.cos.size(1);
  const int64_t x_head = job.x.stride(2), y_head = job.y.stride(2);
  const int64_t x_stride = job.x.stride(3), y_stride = job.y.stride(3);
  const bool unit = x_stride == 1 && y_stride == 1;
  const bool spread_angles = unit && job.interleaved;
  const int64_t step = job.interleaved ? 2 : 1, apart = job.interleaved ? 1 : pairs;

  Angles angles;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t batch = t / length, token = t - batch * length;
    const int64_t position = job.position(batch, token);
    const T* x = job.x.ptr<const T>() + batch * job.x.stride(0) + token * job.x.stride(1);
    T* y = job.y.ptr<T>() + batch * job.y.stride(0) + token * job.y.stride(1);

    for (int64_t first = 0; first < pairs; first += kPairs) {
      const int64_t n = std::min(kPairs, pairs - first);
      read_table<T>(job.cos, position, first, n, angles.cos);
      read_table<T>(job.sin, position, first, n, angles.sin);
      if (job.direction < 0) {
        for (int64_t k = 0; k < n; ++k) angles.sin[k] = -angles.sin[k];
      }
      if (spread_angles) spread(angles, n);
      for (int64_t h = 0, taken = 1; h < heads; h += taken) {
        const T* xh = x + h * x_head + first * step * x_stride;
        T* yh = y + h * y_head + first * step * y_stride;
        if (!unit) {
          turn_strided(angles, xh, x_stride, yh, y_stride, step, apart, n);
        } else if (job.interleaved) {
          turn_neighbours<kStream>(angles, xh, yh, n);
        } else if (h + 1 < heads) {
          turn_halves<kStream, 2>(angles, xh, x_head, yh, y_head, pairs, n);
          taken = 2;
        } else {
          turn_halves<kStream, 1>(angles, xh, x_head, yh, y_head, pairs, n);
        }
      }
    }
    if (2 * pairs == size || job.x.data == job.y.data) continue;
    for (int64_t h = 0; h < heads; ++h) {
      const T* xh = x + h * x_head;
      T* yh = y + h * y_head;
      for (int64_t k = 2 * pairs; k < size; ++k) yh[k * y_stride] = xh[k * x_stride];
    }
  }
}

template <class T>
void turn_as(const RopeJob& job, int64_t begin, int64_t end) {
  if (!job.stream) return turn_tokens<T, false>(job, begin, end);
  turn_tokens<T, true>(job, begin, end);
  hwy::FlushStream();
}

void turn(const RopeJob& job, int64_t begin, int64_t end) {
  ByDType(job.x.dtype, [&](auto t) { turn_as<decltype(t)>(job, begin, end); });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fk::cpu {
namespace {

FK_CPU_EXPORT(turn);

// Returns whether every vector of y can be written with StreamF32, and should be.
bool streams(const RopeJob& job) {
  const Tensor& y = job.y;
  const int64_t bytes = size_of(y.dtype);
  bool aligned = y.stride(3) == 1 && job.x.stride(3) == 1;
  for (int i = 0; i < 3; ++i) aligned = aligned && streamable(y.data, y.stride(i) * bytes);
  // Second halves start in the middle of a head.
  if (!job.interleaved) aligned = aligned && streamable(y.data, job.cos.size(1) * bytes);
  return aligned && y.data != job.x.data && pays_to_stream(2 * y.numel() * bytes);
}

Status run(RopeJob job, const Exec& exec) {
  if (!job.y) return {};
  job.stream = streams(job);
  const int64_t tokens = job.x.size(0) * job.x.size(1);
  const auto kernel = FK_CPU_DISPATCH(turn);
  exec.parallel_for(tokens, grain_of(tokens, job.x.size(2) * job.x.size(3)),
                    [&](int64_t begin, int64_t end) { kernel(job, begin, end); });
  return {};
}

}  // namespace

Status run(const RopeFwd& a, const Exec& exec) {
  return run(RopeJob{a.x, a.cos, a.sin, a.positions, a.y, a.interleaved, 1.0f}, exec);
}

Status run(const RopeBwd& a, const Exec& exec) {
  return run(RopeJob{a.dy, a.cos, a.sin, a.positions, a.dx, a.interleaved, -1.0f}, exec);
}

}  // namespace fk::cpu
#endif
