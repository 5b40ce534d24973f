// Brings 8-bit q, k and v on the CPU into bfloat16, which holds them exactly, in the workspace.
// That is one pass over memory, which is small beside the products.
#pragma once

#include <array>
#include <cstdint>

#include "core/access.h"
#include "core/exec.h"
#include "core/workspace.h"
#include "ops/attention/attention.h"

namespace fk::attention {

// Returns the call with bfloat16 in the place of 8-bit floats, without gaps. Other calls are
// returned as they are.
inline AttentionFwd widened(const AttentionFwd& a, WorkspaceParts& parts) {
  AttentionFwd wide = a;
  if (a.q.dtype != DType::kFloat8E4M3) return wide;
  for (Tensor* t : {&wide.q, &wide.k, &wide.v}) {
    t->data = parts.take<uint16_t>(t->numel());
    t->dtype = DType::kBFloat16;
    int64_t stride = 1;
    for (int i = t->ndim - 1; i >= 0; --i) {
      t->strides[i] = stride;
      stride *= t->shape[i];
    }
  }
  return wide;
}

// Fills `to`, which is without gaps.
inline void widen(const Tensor& from, const Tensor& to, const Exec& exec) {
  static const std::array<uint16_t, 256> kWide = [] {
    std::array<uint16_t, 256> wide;
    for (int i = 0; i < 256; ++i)
      wide[i] = encode_float16<7>(decode_float8(static_cast<uint8_t>(i)));
    return wide;
  }();
  constexpr int64_t kRowsAtOnce = 256;
  const int64_t columns = from.size(-1), stride = from.stride(-1);
  if (columns == 0) return;
  exec.parallel_for(from.numel() / columns, kRowsAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      int64_t offset = 0, rest = row;
      for (int i = from.ndim - 2; i >= 0; --i) {
        offset += rest % from.shape[i] * from.strides[i];
        rest /= from.shape[i];
      }
      const uint8_t* x = from.ptr<const uint8_t>() + offset;
      uint16_t* y = to.ptr<uint16_t>() + row * columns;
      for (int64_t c = 0; c < columns; ++c) y[c] = kWide[x[c * stride]];
    }
  });
}

}  // namespace fk::attention
