// When an output should go past the caches.
#pragma once

#include <cstdint>

namespace fk::cpu {

// Whether a call that reads and writes `bytes` in all should store its outputs with StreamF32.
// Where the last-level cache does not hold them they are evicted before anyone reads them, and an
// ordinary store would first fetch the line it is about to overwrite. Below that, the next op finds
// them in the cache. Far above it, allocators hand out fresh pages, which the system zeroes in the
// cache just before they are written: an ordinary store finds the line there. The limits are
// constants because what the C library reports of that cache is not the part these cores get.
// `from_mib`: for ops that wait longer for such lines.
inline bool pays_to_stream(int64_t bytes, int64_t from_mib = 24) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  return bytes >= from_mib * kMiB && bytes < 96 * kMiB;
}

// Whether rows that start at `data` and are `stride_bytes` apart start at multiples of a cache
// line, which is what StreamF32 needs to write them from their starts.
inline bool streamable(const void* data, int64_t stride_bytes) {
  return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(stride_bytes)) % 64 == 0;
}

}  // namespace fk::cpu
