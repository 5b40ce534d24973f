// This file declares the cache of one sequence's keys and values, and attention over it.
//
// Keys lie in blocks of 16: for each dimension the 16 keys' values, so that a lane is a key and a
// score needs no sum across lanes. Values lie row by row, so that a lane is a dimension. Rows are
// padded to whole vectors. Both are float or half. The keys and values of all layers for kKeyChunk
// positions lie together, so that memory is taken up as positions are reached, however large the
// system's pages are.
#pragma once

#include <cstdint>

#include "engine/arena.h"

namespace fk::engine {

constexpr int64_t kKeyBlock = 16;
// A thread takes this many keys at a time when a single token attends to the cache.
constexpr int64_t kKeyChunk = 256;

struct KvCache {
  bool half = false;  // elements are float16, not float
  int64_t layers = 0, heads = 0, head_dim = 0;
  int64_t capacity = 0;    // in positions, a multiple of kKeyChunk
  int64_t padded_dim = 0;  // head_dim rounded up to a multiple of 16
  Arena memory;            // reserved by the engine, bytes() long

  // Returns the size of an element in bytes.
  int64_t element() const { return half ? 2 : 4; }
  // Returns the size in bytes of one layer's and one head's keys in a chunk, and of its values.
  int64_t chunk_bytes() const { return kKeyChunk * padded_dim * element(); }
  // Returns where the block of 16 keys at `position`, a multiple of 16, begins.
  void* keys(int64_t layer, int64_t head, int64_t position) const {
    const int64_t chunk = (position / kKeyChunk * layers + layer) * heads + head;
    return memory.data() + chunk * 2 * chunk_bytes() +
           position % kKeyChunk * padded_dim * element();
  }
  // Returns where the value at `position` begins; the values of a chunk follow one another.
  void* values(int64_t layer, int64_t head, int64_t position) const {
    return static_cast<uint8_t*>(keys(layer, head, position)) + chunk_bytes();
  }
  // Returns the size of the whole cache in bytes.
  int64_t bytes() const { return capacity / kKeyChunk * layers * heads * 2 * chunk_bytes(); }
};

// Describes query rows that attend to one head of keys, with room for their results. Row r sees the
// keys from first[r] to last[r], both included.
struct AttentionRows {
  int64_t rows;
  const float* const* q;  // head_dim values each, already rotated and scaled
  const int64_t* first;
  const int64_t* last;
  float* const* out;  // padded_dim values each: the sum of p v, not yet divided by `sum`
  float* max;         // each row's largest score
  float* sum;         // each row's sum of exp(score - max)
};

// Stores the key and the value of one layer, head and position in the cache, head_dim floats each.
void append(const KvCache& cache, int64_t layer, int64_t head, int64_t position, const float* key,
            const float* value);

// Computes the attention of `rows` over the keys in [begin, end) alone; begin is a multiple of
// kKeyBlock. Rows that see none of these keys get out = 0, sum = 0, max = -infinity.
void attend(const KvCache& cache, int64_t layer, int64_t head, const AttentionRows& rows,
            int64_t begin, int64_t end);

}  // namespace fk::engine
