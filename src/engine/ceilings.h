// Measures this machine's ceilings: the most bytes a second over a working set of any size, and the
// most operations a second. Benchmarks and `fk bench decode` report their figures as
// shares of these.
//
// Each figure is the rate of the best moment of a measurement, all threads taken together:
// disturbances, such as another program or a lower clock, only ever lower a rate, so the best one
// is nearest the truth. To compare something with a ceiling, measure the ceiling several times,
// before and after.
#pragma once

#include <cstdint>

namespace fk::engine {

// What a measurement of bandwidth does with memory.
enum class Traffic {
  kRead,
  kWrite,
  kCopy,    // one byte written for one read
  kAdd,     // one byte written for two read
  kUpdate,  // each byte read and then written in its place
};

// Returns how many bytes `threads` threads read and write per second while they go through a
// working set of `bytes` again and again; where the caches can hold it, the figure is theirs. Takes
// about `seconds`. Returns 0 if the memory for the working set cannot be had.
double bytes_per_second(Traffic traffic, int64_t bytes, int threads, double seconds);

enum class Arithmetic {
  kFloat32,
  kBfloat16,  // dot products of pairs; the rate is 0 where the active instruction set has none
  kInt8,      // dot products of four bytes, as int8 weights are multiplied
};

// Returns the operations per second of `threads` threads, counting two for a multiply-add. Takes
// about `seconds`.
double flops_per_second(Arithmetic arithmetic, int threads, double seconds);

}  // namespace fk::engine
