// This file says where the rows and the lse of a place (a head of a query) lie in the tensors of
// merge_attention_states, batched or packed, with or without a leading dim of parts.
#pragma once

#include "core/rows.h"
#include "core/tensor.h"

namespace fk::merge_attention_states {

// Strides count elements. They are 0 for dims a tensor does not have.
struct Strides {
  int64_t part = 0, batch = 0, token = 0, head = 0, column = 0;
};

// Returns the strides of [parts,] [batch,] token, head, column.
inline Strides row_strides(const Tensor& t, bool has_parts) {
  if (!t) return {};
  const bool batched = t.ndim == (has_parts ? 5 : 4);
  return {has_parts ? t.strides[0] : 0, batched ? t.strides[has_parts] : 0, t.stride(-3),
          t.stride(-2), t.stride(-1)};
}

// Returns the strides of [parts,] [batch,] head, token.
inline Strides lse_strides(const Tensor& t, bool has_parts) {
  if (!t) return {};
  const bool batched = t.ndim == (has_parts ? 4 : 3);
  return {has_parts ? t.strides[0] : 0, batched ? t.strides[has_parts] : 0, t.stride(-1),
          t.stride(-2), 0};
}

// Holds the sizes of a call, and its places in the order of the outputs' rows, heads innermost.
struct Places {
  int64_t parts, batch, tokens, heads, columns;

  explicit Places(const Tensor& outs)
      : parts(outs.size(0)),
        batch(outs.ndim == 5 ? outs.size(1) : 1),
        tokens(outs.size(-3)),
        heads(outs.size(-2)),
        columns(outs.size(-1)) {}

  FK_HOST_DEVICE int64_t count() const { return batch * tokens * heads; }
};

struct Place {
  int64_t batch, token, head;

  FK_HOST_DEVICE Place(const Places& p, int64_t index) {
    const int64_t row = index / p.heads;
    head = index - row * p.heads;
    batch = row / p.tokens;
    token = row - batch * p.tokens;
  }

  // Returns where the place lies in part 0.
  FK_HOST_DEVICE int64_t offset(const Strides& s) const {
    return batch * s.batch + token * s.token + head * s.head;
  }
};

}  // namespace fk::merge_attention_states
