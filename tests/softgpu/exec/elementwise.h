// This file holds the parts of instructions that compute each lane by itself.
#pragma once

#include <string>

#include "exec/lanes.h"
#include "exec/operations.h"

namespace fk::softgpu {

// Returns the letter of a register that holds T, for Operation::operands.
template <class T>
std::string letter() {
  return sizeof(T) == 8 ? "q" : sizeof(T) == 4 ? "r" : "h";
}

#define SOFTGPU_UNARY(D, A, expression)                                   \
  [](Warp& w, const Instruction& i, uint32_t m) {                         \
    unary<D, A>(w, i, m, [](A a) { return static_cast<D>(expression); }); \
  }
#define SOFTGPU_BINARY(D, A, B, expression)                                        \
  [](Warp& w, const Instruction& i, uint32_t m) {                                  \
    binary<D, A, B>(w, i, m, [](A a, B b) { return static_cast<D>(expression); }); \
  }
#define SOFTGPU_TERNARY(D, A, B, C, expression)                                             \
  [](Warp& w, const Instruction& i, uint32_t m) {                                           \
    ternary<D, A, B, C>(w, i, m, [](A a, B b, C c) { return static_cast<D>(expression); }); \
  }

template <class K>
void move(Warp& warp, const Instruction& i, uint32_t lanes) {
  put(lanes_to<K>(warp, i.at[0]), lanes_at<K>(warp, i.at[1]), lanes);
}

// A comparison writes a mask of lanes.
template <class T, class Test>
inline void compare(Warp& warp, const Instruction& i, uint32_t lanes, Test test) {
  const auto* a = lanes_at<Kept<T>>(warp, i.at[1]);
  const auto* b = lanes_at<Kept<T>>(warp, i.at[2]);
  put_predicate(warp, i.at[0],
                mask_of([&](int l) { return test(from_kept<T>(a[l]), from_kept<T>(b[l])); }),
                lanes);
}
#define SOFTGPU_COMPARE(T, expression)                                \
  [](Warp& w, const Instruction& i, uint32_t m) {                     \
    compare<T>(w, i, m, [](T a, T b) -> bool { return expression; }); \
  }

}  // namespace fk::softgpu
