// Accesses to global memory by different blocks of a launch that nothing orders. Blocks order
// themselves by atomics with a result, and by volatile, acquiring and releasing accesses: each
// passes on, at its address, all that its block has done and seen.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "check/races.h"

namespace fk::softgpu {

class GlobalRaces {
 public:
  void note(Warp& warp, int lane, uint64_t address, uint32_t bytes, Kind kind);

 private:
  struct Access {
    uint32_t block = 0;  // plus one; 0: there was none
    uint32_t time = 0;
    uint32_t pc = 0;
    uint8_t bytes = 0;
    Kind kind = Kind::kRead;
  };
  struct GlobalWord {
    Access write;
    Access read[2];
  };
  using Times = std::unordered_map<uint32_t, uint32_t>;  // by block
  struct BlockTimes {
    uint32_t now = 1;
    Times seen;
  };
  bool is_seen(BlockTimes& own, uint32_t block, const Access& earlier, uint8_t bytes) const;
  void synchronise(BlockTimes& own, uint32_t block, uint64_t address);

  std::unordered_map<uint64_t, GlobalWord> words_;
  std::unordered_map<uint32_t, BlockTimes> blocks_;
  std::unordered_map<uint64_t, Times> released_;
};

}  // namespace fk::softgpu
