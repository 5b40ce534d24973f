// When an output should go past the caches.
#pragma once

#include <cstdint>

namespace fk::cpu {

// Whether a call that reads and writes `bytes` in all should store its outputs with StreamF32.
// Where the last-level cache does not hold them they are evicted before anyone reads them, and an
// ordinary store would first fetch the line it is about to overwrite. Below that, the next op finds
// them in the cache. The limit is a constant because what the C library reports of that cache is
// not the part of it that these cores get.
inline bool pays_to_stream(int64_t bytes) { return bytes >= int64_t{24} << 20; }

// Whether rows that start at `data` and are `stride_bytes` apart start at multiples of a cache
// line, which is what StreamF32 needs to write them from their starts.
inline bool streamable(const void* data, int64_t stride_bytes) {
  return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(stride_bytes)) % 64 == 0;
}

}  // namespace fk::cpu
