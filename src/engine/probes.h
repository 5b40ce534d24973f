// The inner loops that find a machine's ceilings (engine/ceilings.h): each does nothing but move
// bytes, or nothing but multiply and add, as fast as the active instruction set can.
#pragma once

#include <cstdint>

namespace fk::cpu {

// How a loop goes through memory. Which way is the fastest depends on the machine and on where the
// memory lies, so the measurement tries all.
enum class Way {
  kPlain,
  kAhead,  // prefetches well ahead of its reads and writes past the caches
  kFour,   // works in four places at once, a quarter of the memory apart
};
constexpr Way kWays[] = {Way::kPlain, Way::kAhead, Way::kFour};

// Sizes in bytes must be multiples of kProbeStep, and pointers aligned to a cache line.
constexpr int64_t kProbeStep = 1024;

// Each goes once through `bytes` of each of its arrays, on the calling thread: probe_read returns a
// value made from all that it read, probe_add writes a + b as floats.
uint64_t probe_read(const uint8_t* p, int64_t bytes, Way way);
void probe_write(uint8_t* p, int64_t bytes, Way way);
void probe_copy(uint8_t* to, const uint8_t* from, int64_t bytes, Way way);
void probe_add(uint8_t* to, const uint8_t* a, const uint8_t* b, int64_t bytes, Way way);
void probe_update(uint8_t* p, int64_t bytes);  // reads and writes each byte in its place

// These do nothing but multiply-adds on registers, `steps` for each of as many sums as hide their
// latency. They return the operations done, two for a multiply-add, or 0 where the active target
// has no such instruction. They add a result to *sink, so that the compiler cannot leave the work
// out. probe_bfloat16 multiplies pairs of bfloat16 and sums in float32; probe_int8 multiplies
// groups of four bytes and sums in int32, by VNNI where the kernels would (cpu/gemm/bytes.h).
int64_t probe_float32(int64_t steps, float* sink);
int64_t probe_bfloat16(int64_t steps, float* sink);
int64_t probe_int8(int64_t steps, float* sink);

}  // namespace fk::cpu
