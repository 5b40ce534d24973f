// This file sees registers as arrays of 32 lanes.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "exec/machine.h"

namespace fk::softgpu {

// This is the type that a register of up to 32 bits, or of 64, is kept in. Narrow values have zeros
// above.
template <class T>
using Kept = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
inline T from_kept(Kept<T> kept) {
  if constexpr (sizeof(T) == sizeof(Kept<T>)) {
    T value;
    std::memcpy(&value, &kept, sizeof value);
    return value;
  } else {
    return static_cast<T>(kept);
  }
}
template <class T>
inline Kept<T> to_kept(T value) {
  if constexpr (sizeof(T) == sizeof(Kept<T>)) {
    Kept<T> kept;
    std::memcpy(&kept, &value, sizeof kept);
    return kept;
  } else {
    return static_cast<std::make_unsigned_t<T>>(value);
  }
}

template <class K = uint32_t>
inline const K* lanes_at(const Warp& warp, Place place) {
  return reinterpret_cast<const K*>(warp.base[place & kConstantBit] + (place & ~kConstantBit));
}
// Returns the lanes of a destination, which is never a constant.
template <class K = uint32_t>
inline K* lanes_to(Warp& warp, Place place) {
  return reinterpret_cast<K*>(warp.base[0] + place);
}

inline bool has(uint32_t lanes, int lane) { return (lanes >> lane) & 1; }
inline int first_lane(uint32_t lanes) { return __builtin_ctz(lanes); }

// Writes the lanes that take part; the others keep what they had.
template <class K>
inline void put(K* to, const K* from, uint32_t lanes) {
  if (__builtin_expect(lanes == kAllLanes, 1)) {
    std::memcpy(to, from, sizeof(K) * kLanes);
  } else {
    for (int l = 0; l < kLanes; ++l) to[l] = has(lanes, l) ? from[l] : to[l];
  }
}

template <class D, class A, class Operation>
inline void unary(Warp& warp, const Instruction& i, uint32_t lanes, Operation operation) {
  const auto* a = lanes_at<Kept<A>>(warp, i.at[1]);
  alignas(64) Kept<D> result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = to_kept<D>(operation(from_kept<A>(a[l])));
  put(lanes_to<Kept<D>>(warp, i.at[0]), result, lanes);
}

template <class D, class A, class B, class Operation>
inline void binary(Warp& warp, const Instruction& i, uint32_t lanes, Operation operation) {
  const auto* a = lanes_at<Kept<A>>(warp, i.at[1]);
  const auto* b = lanes_at<Kept<B>>(warp, i.at[2]);
  alignas(64) Kept<D> result[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    result[l] = to_kept<D>(operation(from_kept<A>(a[l]), from_kept<B>(b[l])));
  }
  put(lanes_to<Kept<D>>(warp, i.at[0]), result, lanes);
}

template <class D, class A, class B, class C, class Operation>
inline void ternary(Warp& warp, const Instruction& i, uint32_t lanes, Operation operation) {
  const auto* a = lanes_at<Kept<A>>(warp, i.at[1]);
  const auto* b = lanes_at<Kept<B>>(warp, i.at[2]);
  const auto* c = lanes_at<Kept<C>>(warp, i.at[3]);
  alignas(64) Kept<D> result[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    result[l] = to_kept<D>(operation(from_kept<A>(a[l]), from_kept<B>(b[l]), from_kept<C>(c[l])));
  }
  put(lanes_to<Kept<D>>(warp, i.at[0]), result, lanes);
}

// Returns a predicate as a mask of lanes.
inline uint32_t predicate(const Warp& warp, const Instruction& i, int operand) {
  const uint32_t value = warp.predicates[i.at[operand]];
  return (i.negated >> operand) & 1 ? ~value : value;
}
inline void put_predicate(Warp& warp, Place place, uint32_t value, uint32_t lanes) {
  if (place == kNoPlace) return;
  uint32_t& to = warp.predicates[place];
  to = (to & ~lanes) | (value & lanes);
}

// Returns what `test` says of each lane, as a mask.
template <class Test>
inline uint32_t mask_of(Test test) {
  alignas(64) uint32_t bits[kLanes];
  for (int l = 0; l < kLanes; ++l) bits[l] = test(l) ? 1u << l : 0u;
  uint32_t mask = 0;
  for (int l = 0; l < kLanes; ++l) mask |= bits[l];
  return mask;
}

}  // namespace fk::softgpu
