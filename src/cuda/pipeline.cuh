// Rings of places in shared memory that one warp fills and others read: which place the i-th round
// takes, and which phase of that place's barriers it waits for.
//
// A place has two barriers. `full` completes a phase each time the place has been filled, `empty`
// each time all have read it. Phases are counted by their parity, from 0 on. Who reads round i
// waits for phase_of(i) of `full`; who fills it waits for the other parity of `empty`, which in the
// first turn around the ring is complete from the start.
#pragma once

#include <cstdint>

namespace fk::cuda {

// The place of the i-th round, counted from 0, in a ring of `kPlaces`.
template <int kPlaces>
__device__ __forceinline__ int stage_of(int i) {
  return static_cast<unsigned>(i) % kPlaces;
}
// The parity of the phase in which the i-th round fills its place.
template <int kPlaces>
__device__ __forceinline__ uint32_t phase_of(int i) {
  return (static_cast<unsigned>(i) / kPlaces) & 1;
}

// The same as a count of rounds that a thread carries along.
template <int kPlaces>
struct Ring {
  uint32_t number = 0;
  // Returns the place. For a single one it is 0 in a form that the compiler takes for a value that
  // changes: it would keep all descriptors of what is there in registers.
  __device__ __forceinline__ int index() const {
    return kPlaces == 1 ? number >> 31 : number % kPlaces;
  }
  __device__ __forceinline__ uint32_t phase() const { return number / kPlaces % 2; }
};

// The same where the number of places is known only at run time: a division would cost more than a
// step from place to place.
struct RingStep {
  int index = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next(int places) {
    if (++index == places) {
      index = 0;
      phase ^= 1;
    }
  }
};

}  // namespace fk::cuda
