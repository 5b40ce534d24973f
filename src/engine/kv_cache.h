// Keys and values of one sequence.
//
// Keys lie in blocks of 16: for each dimension the 16 keys' values, so that a lane is a key and a
// score needs no sum across lanes. Values lie row by row, so that a lane is a dimension. Rows are
// padded to whole vectors. Both are float or half. What all layers hold of kKeyChunk positions lies
// together: memory is taken as positions are reached, however large its pages are.
#pragma once

#include <cstdint>

#include "engine/arena.h"

namespace fk::engine {

constexpr int64_t kKeyBlock = 16;
// Keys that one thread takes at a time when a single token looks back.
constexpr int64_t kKeyChunk = 256;

struct KvCache {
  bool half = false;
  int64_t layers = 0, heads = 0, head_dim = 0;
  int64_t capacity = 0;  // whole chunks
  int64_t padded_dim = 0;
  Arena memory;

  int64_t element() const { return half ? 2 : 4; }
  // Of a chunk of one layer's one head; keys and values take as much.
  int64_t chunk_bytes() const { return kKeyChunk * padded_dim * element(); }
  // The block of 16 keys at `position`, a multiple of 16.
  void* keys(int64_t layer, int64_t head, int64_t position) const {
    const int64_t chunk = (position / kKeyChunk * layers + layer) * heads + head;
    return memory.data() + chunk * 2 * chunk_bytes() +
           position % kKeyChunk * padded_dim * element();
  }
  // The value at `position`; those of a chunk follow one another.
  void* values(int64_t layer, int64_t head, int64_t position) const {
    return static_cast<uint8_t*>(keys(layer, head, position)) + chunk_bytes();
  }
  int64_t bytes() const { return capacity / kKeyChunk * layers * heads * 2 * chunk_bytes(); }
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
