// A row's columns as vectors, and loops over them, for the CPU kernels of the norms.

// Once per target: see cpu/foreach_target.h.
#if defined(FK_CPU_NORM_ROWS_SIMD_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_CPU_NORM_ROWS_SIMD_PER_TARGET
#undef FK_CPU_NORM_ROWS_SIMD_PER_TARGET
#else
#define FK_CPU_NORM_ROWS_SIMD_PER_TARGET
#endif

#include <type_traits>

#include "cpu/norm/rows.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {
namespace {

using V = hn::Vec<F32>;

// Says how many lanes of a vector are in the row: all, or the first few.
struct Full {};
using Part = size_t;

template <class T>
HWY_INLINE V load(const T* p, Full) {
  return LoadF32(F32(), p);
}
template <class T>
HWY_INLINE V load(const T* p, Part lanes) {
  return LoadNF32(F32(), p, lanes);
}
template <class T>
HWY_INLINE void store(V v, T* p, Full) {
  StoreF32(F32(), v, p);
}
template <class T>
HWY_INLINE void store(V v, T* p, Part lanes) {
  StoreNF32(F32(), v, p, lanes);
}
// Stores past the caches.
template <class T>
HWY_INLINE void stream(V v, T* p, Full) {
  StreamF32(F32(), v, p);
}
template <class T>
HWY_INLINE void stream(V v, T* p, Part lanes) {
  StoreNF32(F32(), v, p, lanes);
}
// Rounds v to T, stores it if there is where to, and returns it.
template <class T>
HWY_INLINE V round_and_store(V v, T* p, Full) {
  return p == nullptr ? RoundF32<T>(F32(), v) : StoreRoundedF32(F32(), v, p);
}
template <class T>
HWY_INLINE V round_and_store(V v, T* p, Part lanes) {
  v = RoundF32<T>(F32(), v);
  if (p != nullptr) StoreNF32(F32(), v, p, lanes);
  return v;
}
HWY_INLINE V keep(V v, Full) { return v; }
HWY_INLINE V keep(V v, Part lanes) { return hn::IfThenElseZero(hn::FirstN(F32(), lanes), v); }

// Gives blocks of a row as contiguous memory: the row itself where its stride is 1 (kUnit says that
// it is, and an output's only block is the whole row), else a copy. It is NULL where there is no
// row.
template <class T, bool kUnit>
struct Input {
  const T* p = nullptr;
  int64_t stride = 1;
  T buffer[kUnit ? 1 : kCopied];

  HWY_INLINE void bind(const T* data, int64_t data_stride) {
    p = data;
    stride = data_stride;
  }
  HWY_INLINE const T* block(int64_t i, int64_t n) {
    if constexpr (kUnit) return p == nullptr ? nullptr : p + i;
    return i == 0 && stride == 1 ? p : distant_block(i, n);
  }

 private:
  HWY_NOINLINE const T* distant_block(int64_t i, int64_t n) {
    if (p == nullptr) return nullptr;
    if (stride == 1) return p + i;
    for (int64_t k = 0; k < n; ++k) buffer[k] = p[(i + k) * stride];
    return buffer;
  }
};

template <class T, bool kUnit>
struct Output {
  T* p = nullptr;
  int64_t stride = 1;
  T buffer[kUnit ? 1 : kCopied];

  HWY_INLINE void bind(T* data, int64_t data_stride) {
    p = data;
    stride = data_stride;
  }
  HWY_INLINE T* block(int64_t i) {
    if constexpr (kUnit) return p;
    return p == nullptr ? nullptr : stride == 1 ? p + i : buffer;
  }
  HWY_INLINE void finish(int64_t i, int64_t n) {
    if (!kUnit && stride != 1) copy_out(i, n);
  }

 private:
  HWY_NOINLINE void copy_out(int64_t i, int64_t n) {
    if (p == nullptr) return;
    for (int64_t k = 0; k < n; ++k) p[(i + k) * stride] = buffer[k];
  }
};

// Gives blocks of the weight or the bias.
template <class T, bool kUnit>
struct ParameterInput {
  static constexpr bool kHalf = sizeof(T) == 2;
  Input<float, kUnit> f;
  Input<T, kUnit> t;  // where it is in the activations' half precision

  explicit ParameterInput(const Parameter& p) {
    if (!kHalf || p.is_float) {
      f.bind(static_cast<const float*>(p.data), p.column_stride);
    } else {
      t.bind(static_cast<const T*>(p.data), p.column_stride);
    }
  }

  struct Block {
    const float* f;
    const T* t;

    explicit operator bool() const { return f != nullptr || (kHalf && t != nullptr); }
    template <class Lanes>
    HWY_INLINE V load(int64_t i, Lanes lanes) const {
      if constexpr (kHalf) {
        if (f == nullptr) return HWY_NAMESPACE::load(t + i, lanes);
      }
      return HWY_NAMESPACE::load(f + i, lanes);
    }
  };
  HWY_INLINE Block block(int64_t i, int64_t n) {
    return {f.block(i, n), kHalf ? t.block(i, n) : nullptr};
  }
};

struct Sums {
  V a, b;

  HWY_INLINE Sums() : a(hn::Zero(F32())), b(hn::Zero(F32())) {}
  HWY_INLINE void add(const Sums& other) {
    a = hn::Add(a, other.a);
    b = hn::Add(b, other.b);
  }
};

// Returns how many columns are added up in float32, whose error grows with their number.
HWY_INLINE int64_t summed_block_of(int64_t block) {
  return std::min<int64_t>(block, 64 * hn::Lanes(F32()));
}

// Means over a row of which each block of `block` columns is added up in float32, and the blocks in
// double. A single block needs no double, which would show in the time of short rows.
class Means {
 public:
  HWY_INLINE Means(int64_t columns, int64_t block) : columns_(columns), one_(columns <= block) {}
  HWY_INLINE void add(const Sums& block) {
    block_ = block;
    if (one_) return;
    a_ += ReduceSum(F32(), block.a);
    b_ += ReduceSum(F32(), block.b);
  }
  HWY_INLINE float a(float per_column) const { return mean(a_, block_.a, per_column); }
  HWY_INLINE float b(float per_column) const { return mean(b_, block_.b, per_column); }

 private:
  HWY_INLINE float mean(double total, V block, float per_column) const {
    return one_ ? ReduceSum(F32(), block) * per_column : static_cast<float>(total / columns_);
  }

  int64_t columns_;
  bool one_;
  Sums block_;  // the last one
  double a_ = 0.0, b_ = 0.0;
};

// Lambdas below are vector code, to be inlined into every loop of their caller.
#define FK_BODY HWY_ATTR __attribute__((always_inline))

// Adds up body(i, lanes, sums) over n columns. Four vectors at a time have sums of their own, which
// are enough independent additions to hide an addition's latency.
template <class Body>
HWY_INLINE Sums accumulate(int64_t n, const Body& body) {
  const int64_t lanes = hn::Lanes(F32());
  Sums s0, s1, s2, s3;
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    body(i, Full(), s0);
    body(i + lanes, Full(), s1);
    body(i + 2 * lanes, Full(), s2);
    body(i + 3 * lanes, Full(), s3);
  }
  for (; i + lanes <= n; i += lanes) body(i, Full(), s0);
  if (i < n) body(i, static_cast<Part>(n - i), s1);
  s0.add(s1);
  s2.add(s3);
  s0.add(s2);
  return s0;
}

// Calls body(i, lanes) over n columns.
template <class Body>
HWY_INLINE void for_columns(int64_t n, const Body& body) {
  const int64_t lanes = hn::Lanes(F32());
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) body(i, Full());
  if (i < n) body(i, static_cast<Part>(n - i));
}

// Calls body(k) for k in [0, kCount), unrolled, so that arrays indexed by k can live in registers.
template <int kCount, class Body>
HWY_INLINE void unrolled(const Body& body) {
  if constexpr (kCount > 0) {
    unrolled<kCount - 1>(body);
    body(std::integral_constant<int, kCount - 1>());
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_CPU_NORM_ROWS_SIMD_PER_TARGET
