// This file loads and stores vectors of a tensor's row, for what the ops do with a block of sums.

// This part is compiled once per target.
#if defined(FK_CPU_GEMM_ELEMENTS_PER_TARGET) == defined(HWY_TARGET_TOGGLE)
#ifdef FK_CPU_GEMM_ELEMENTS_PER_TARGET
#undef FK_CPU_GEMM_ELEMENTS_PER_TARGET
#else
#define FK_CPU_GEMM_ELEMENTS_PER_TARGET
#endif

#include <algorithm>
#include <cstdint>

#include "core/tensor.h"
#include "cpu/simd.h"

HWY_BEFORE_NAMESPACE();
namespace fk::cpu {
namespace HWY_NAMESPACE {

// Calls body(t) with a value of the element type.
template <class Body>
HWY_INLINE void by_type(DType dtype, const Body& body) {
  if (dtype == DType::kFloat16) return body(float16_t());
  if (dtype == DType::kBFloat16) return body(bfloat16_t());
  body(float());
}

// Loads up to Lanes(F32()) elements at a column of the row that starts at element `row`.
template <class T>
HWY_INLINE hn::Vec<F32> load_some(const Tensor& t, int64_t row, int64_t column, int64_t n) {
  const F32 d;
  const T* p = static_cast<const T*>(t.data) + row + column * t.stride(-1);
  if (t.stride(-1) != 1) return LoadStridedF32(d, p, t.stride(-1), static_cast<size_t>(n));
  if (n == static_cast<int64_t>(hn::Lanes(d))) return LoadF32(d, p);
  return LoadNF32(d, p, static_cast<size_t>(n));
}

template <class T>
HWY_INLINE void store_some(const Tensor& t, int64_t row, int64_t column, int64_t n,
                           hn::Vec<F32> v) {
  const F32 d;
  T* p = static_cast<T*>(t.data) + row + column * t.stride(-1);
  if (t.stride(-1) != 1) {
    StoreStridedF32(d, v, p, t.stride(-1), static_cast<size_t>(n));
  } else if (n == static_cast<int64_t>(hn::Lanes(d))) {
    StoreF32(d, v, p);
  } else {
    StoreNF32(d, v, p, static_cast<size_t>(n));
  }
}

// Stores up to Lanes(F32()) elements side by side.
template <class T>
HWY_INLINE void store_vector(T* p, int64_t n, hn::Vec<F32> v) {
  const F32 d;
  if (n == static_cast<int64_t>(hn::Lanes(d))) return StoreF32(d, v, p);
  StoreNF32(d, v, p, static_cast<size_t>(n));
}

// Calls body(c, n) for every vector of columns: it begins at column c and has n of them.
template <class Body>
HWY_INLINE void for_vectors(int64_t columns, const Body& body) {
  const int64_t lanes = hn::Lanes(F32());
  for (int64_t c = 0; c < columns; c += lanes) body(c, std::min(lanes, columns - c));
}

// Writes the columns [first, first + columns) of a bias to `out` as floats, in whole vectors, or
// zeros if there is no bias. The bias is float, or T.
template <class T>
HWY_INLINE void load_bias(const Tensor& bias, int64_t first, int64_t columns, float* out) {
  const F32 d;
  for_vectors(columns, [&](int64_t c, int64_t n) HWY_ATTR {
    auto b = hn::Zero(d);
    if (bias) {
      b = bias.dtype == DType::kFloat32 ? load_some<float>(bias, 0, first + c, n)
                                        : load_some<T>(bias, 0, first + c, n);
    }
    hn::StoreU(b, d, out + c);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace fk::cpu
HWY_AFTER_NAMESPACE();

#endif  // FK_CPU_GEMM_ELEMENTS_PER_TARGET
