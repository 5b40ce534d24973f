// The inner loops that find a machine's ceilings (engine/ceilings.h): each does nothing but move
// bytes, or nothing but multiply and add, as fast as the active instruction set can.
#pragma once

#include <cstdint>

namespace fk::cpu {

// How a loop goes through memory: which way is the best depends on the machine and on where the
// memory lies.
enum class Way {
  kPlain,
  kAhead,  // reads with prefetches well ahead, writes past the caches
  kFour,   // four places at once, a quarter of the memory apart
};
constexpr Way kWays[] = {Way::kPlain, Way::kAhead, Way::kFour};

// All sizes are multiples of kProbeStep bytes, and so are the pointers.
constexpr int64_t kProbeStep = 1024;

uint64_t probe_read(const uint8_t* p, int64_t bytes, Way way);
void probe_write(uint8_t* p, int64_t bytes, Way way);
void probe_copy(uint8_t* to, const uint8_t* from, int64_t bytes, Way way);
void probe_add(uint8_t* to, const uint8_t* a, const uint8_t* b, int64_t bytes, Way way);
void probe_update(uint8_t* p, int64_t bytes);  // reads and writes each byte in its place

// Multiply-adds on registers alone, `steps` times over as many sums as hide their latency. Return
// the floating point operations done (two to a multiply-add); 0: there is no such instruction.
// `sink` takes a result, so that no compiler leaves the work out.
int64_t probe_float32(int64_t steps, float* sink);
int64_t probe_bfloat16(int64_t steps, float* sink);  // products of pairs, added up in float32

}  // namespace fk::cpu
