// What this machine lets a program reach at the most: bytes a second over working sets of any size,
// and floating point operations a second. The ceilings of benchmarks and of decoding.
//
// Each figure is that of the best moment of a measurement, all threads taken together: what
// disturbs it, such as another program or a lower clock, only ever lowers it, so the best is
// nearest the truth. Who compares with a ceiling measures it several times, before and after what
// is compared.
#pragma once

#include <cstdint>

namespace fk::engine {

enum class Traffic {
  kRead,
  kWrite,
  kCopy,    // one byte written for one read
  kAdd,     // one byte written for two read
  kUpdate,  // each byte read and then written in its place
};

// Bytes read and written in a second by `threads` threads, each over its own part of a working set
// of `bytes`, again and again, so that caches that hold it may. Takes about `seconds`; 0: there is
// no memory for it.
double bytes_per_second(Traffic traffic, int64_t bytes, int threads, double seconds);

enum class Arithmetic {
  kFloat32,
  kBfloat16,  // by dot products of pairs, where the active instruction set has them; else 0
};

// Floating point operations in a second, two to a multiply-add.
double flops_per_second(Arithmetic arithmetic, int threads, double seconds);

}  // namespace fk::engine
