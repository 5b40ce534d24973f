// When an output should go past the caches.
#pragma once

#include <cstdint>

namespace fk::cpu {

// Whether a call that reads and writes `bytes` in all should store its outputs with StreamF32. Past
// most of the last-level cache an output is evicted before anyone reads it, and an ordinary store
// would first fetch the line it is about to overwrite. Below that, the next op finds it in the cache.
bool pays_to_stream(int64_t bytes);

// StreamF32 at whole vectors from the start of each row: rows must start at multiples of a cache line.
inline bool streamable(const void* data, int64_t stride_bytes) {
  return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(stride_bytes)) % 64 == 0;
}

}  // namespace fk::cpu
