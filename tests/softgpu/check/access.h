// This file says what happens where an access is not the usual kind: it is looked at lane by lane.
#pragma once

#include "exec/machine.h"

namespace fk::softgpu {

// Returns which of the lanes may access `bytes` of global memory at their addresses; reports the
// others.
uint32_t check_global(Warp& warp, uint32_t lanes, const uint64_t* addresses, uint32_t bytes,
                      bool write);
// Turns addresses of shared memory, the own block's or of another one of the cluster, into
// pointers; returns the lanes for which there are some and reports the others.
uint32_t check_shared(Warp& warp, uint32_t lanes, const uint32_t* addresses, uint32_t bytes,
                      bool cluster, uint64_t* pointers);
// Reports lanes that read bytes of the own block that are not there yet. `used`: a bit for each
// byte of the access that matters.
void check_readable(Warp& warp, uint32_t lanes, const uint32_t* addresses, uint32_t used);
// Takes bytes of the block as written by a thread, with a report where a copy under way writes
// them, too.
void mark_written(Warp& warp, int lane, uint32_t address, uint32_t bytes);
// Returns the block of the cluster that an address of shared memory names, and the offset there;
// nullptr where there is none.
Block* block_of(Warp& warp, uint32_t* address);

// A copy that will write the bytes is under way: until finish_pending they cannot be read.
void begin_pending(Block& block, uint32_t address, uint32_t bytes);
void finish_pending(Block& block, uint32_t address, uint32_t bytes);

// Holds the wavefronts that an access of shared memory takes, and the fewest that any such access
// could.
struct Wavefronts {
  uint32_t taken = 0;
  uint32_t least = 0;
};
Wavefronts count_wavefronts(const uint32_t* addresses, uint32_t lanes, uint32_t bytes);
// Counts different 32-byte sectors; an aligned access of at most 32 bytes is in one.
uint32_t count_sectors(const uint64_t* addresses, uint32_t lanes);

// Holds every 32-byte sector of global memory that a launch touches.
class TouchedSectors {
 public:
  void add(const uint64_t* addresses, uint32_t lanes);
  void add_range(uint64_t begin, uint64_t bytes);
  uint64_t bytes() const { return 32 * count_; }
  // Calls visit with the address of each.
  template <class Visit>
  void for_each(Visit visit) const {
    for (const Page& page : pages_) {
      for (uint64_t sector = 0; sector < 64 && page.number != 0; ++sector) {
        if (page.bits >> sector & 1) visit(((page.number - 1) * 64 + sector) * 32);
      }
    }
  }

 private:
  void add_sector(uint64_t sector);
  // A page holds 64 sectors: bits, in a table of open addresses.
  struct Page {
    uint64_t number = 0;  // plus one; 0 is empty
    uint64_t bits = 0;
  };
  void grow();
  std::vector<Page> pages_ = std::vector<Page>(1024);
  size_t used_ = 0;
  size_t last_ = 0;
  uint64_t count_ = 0;
};

}  // namespace fk::softgpu
