#include "core/overlap.h"

#include <cstdint>
#include <cstdlib>
#include <utility>

namespace fk {
namespace {

// The addresses from the lowest element of a tensor, which is not empty, to the end of the highest.
std::pair<uintptr_t, uintptr_t> span(const Tensor& t) {
  const int64_t item = size_of(t.dtype);
  int64_t low = 0, high = item;
  for (int i = 0; i < t.ndim; ++i) {
    const int64_t reach = (t.shape[i] - 1) * t.strides[i] * item;
    (reach < 0 ? low : high) += reach;
  }
  const auto first = reinterpret_cast<uintptr_t>(t.data);
  return {first + static_cast<uintptr_t>(low), first + static_cast<uintptr_t>(high)};
}

}  // namespace

bool overlap(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const auto [a_begin, a_end] = span(a);
  const auto [b_begin, b_end] = span(b);
  return a_begin < b_end && b_begin < a_end;
}

int repeated_dim(const Tensor& t) {
  if (t.contiguous()) return -1;  // as nearly every output, and every one without elements
  int order[kMaxDims];
  int dims = 0;
  for (int i = t.ndim - 1; i >= 0; --i) {
    if (t.shape[i] == 1) continue;
    int place = dims++;
    for (; place > 0 && std::abs(t.strides[order[place - 1]]) > std::abs(t.strides[i]); --place) {
      order[place] = order[place - 1];
    }
    order[place] = i;
  }
  int64_t reach = 0;
  for (int k = 0; k < dims; ++k) {
    const int64_t stride = std::abs(t.strides[order[k]]);
    if (stride <= reach) return order[k];
    reach += (t.shape[order[k]] - 1) * stride;
  }
  return -1;
}

}  // namespace fk
