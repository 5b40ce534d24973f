// Keys and values of one sequence.
//
// Keys lie in blocks of 16: for each dimension the 16 keys' values, so that a lane is a key and a
// score needs no sum across lanes. Values lie row by row, so that a lane is a dimension. Rows are
// padded to whole vectors. Both are float or half. Memory is taken as positions are reached.
#pragma once

#include <cstdint>

#include "engine/arena.h"

namespace fk::engine {

constexpr int64_t kKeyBlock = 16;

struct KvCache {
  bool half = false;
  int64_t layers = 0, heads = 0, head_dim = 0, capacity = 0;
  int64_t padded_dim = 0;
  Arena memory;

  int64_t element() const { return half ? 2 : 4; }
  // Of one layer's one head; keys and values take as much.
  int64_t head_bytes() const { return capacity * padded_dim * element(); }
  void* keys(int64_t layer, int64_t head) const {
    return memory.data() + (layer * heads + head) * 2 * head_bytes();
  }
  void* values(int64_t layer, int64_t head) const {
    return memory.data() + ((layer * heads + head) * 2 + 1) * head_bytes();
  }
  int64_t bytes() const { return layers * heads * 2 * head_bytes(); }
};

// Query rows of one head of keys: row r may see keys [first[r], last[r]].
struct AttentionRows {
  int64_t rows;
  const float* const* q;  // head_dim values each, already rotated and scaled
  const int64_t* first;
  const int64_t* last;
  float* const* out;  // padded_dim values each: sum of p v, not yet divided by `sum`
  float* max;         // per row
  float* sum;
};

// Stores one position's key and value, head_dim floats each.
void append(const KvCache& cache, int64_t layer, int64_t head, int64_t position, const float* key,
            const float* value);

// Attention of `rows` over keys [begin, end); begin is a multiple of kKeyBlock. Rows that see none
// of them get out = 0, sum = 0, max = -infinity.
void attend(const KvCache& cache, int64_t layer, int64_t head, const AttentionRows& rows,
            int64_t begin, int64_t end);

}  // namespace fk::engine
