// How fast this machine's threads read memory: the ceiling of decoding.
#pragma once

#include "engine/arena.h"

namespace fk::engine {

class MemoryReader {
 public:
  MemoryReader();
  // Bytes a second of the best of `passes` passes over more than the caches hold; 0: no memory.
  double bytes_per_second(int passes) const;

 private:
  Arena memory_;
};

// The same once (about 0.1 s).
double read_bandwidth();

}  // namespace fk::engine
