// Arithmetic on sizes that more than one room needs.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace fk {

// How many pieces of `b` cover `a`.
FK_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace fk
