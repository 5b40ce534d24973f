// Decides when a kernel should store its output past the caches.
#pragma once

#include <cstdint>

namespace fk::cpu {

// Returns whether a call that reads and writes `bytes` in all should store its outputs with
// StreamF32. If the last-level cache cannot hold the outputs, they are evicted before anyone reads
// them, and an ordinary store would only fetch the line that it is about to overwrite. Below
// `from_mib` MiB, the next op finds the outputs in the cache. Far above, allocators hand out fresh
// pages, which the system zeroes in the cache just before they are written, so that an ordinary
// store finds its line there. The limits are constants, because the C library reports the size of
// the whole cache and not of the part that these cores get. An op that would wait long for such a
// line passes a lower `from_mib`.
inline bool pays_to_stream(int64_t bytes, int64_t from_mib = 24) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  return bytes >= from_mib * kMiB && bytes < 96 * kMiB;
}

// Returns whether rows that start at `data` and are `stride_bytes` apart all start at a multiple of
// a cache line, as StreamF32 needs to write them from their starts.
inline bool streamable(const void* data, int64_t stride_bytes) {
  return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(stride_bytes)) % 64 == 0;
}

}  // namespace fk::cpu
