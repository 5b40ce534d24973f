// Arithmetic on sizes that more than one room needs. Results have the common type of the arguments,
// so kernels that count in 32 bits stay there.
#pragma once

#include <type_traits>

#include "core/host_device.h"

namespace fk {

// Returns how many pieces of `b` cover `a`.
template <class A, class B>
FK_HOST_DEVICE constexpr std::common_type_t<A, B> ceil_div(A a, B b) {
  return (a + b - 1) / b;
}

// Rounds `a` up to a multiple of `b`.
template <class A, class B>
FK_HOST_DEVICE constexpr std::common_type_t<A, B> round_up(A a, B b) {
  return ceil_div(a, b) * b;
}

}  // namespace fk
