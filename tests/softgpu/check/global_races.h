// This file finds accesses to global memory that nothing orders, by warps of a block, of a cluster
// or of different ones. Within a cluster its barriers order them, as they do those of shared memory
// (races.h). Clusters order themselves by atomics with a result and by volatile, acquiring and
// releasing accesses: each passes on, at its address, what its warp has done and seen.
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
    uint32_t cluster = 0;
    uint32_t agent = 0;  // of the cluster
    uint32_t time = 0;   // 0: there was none
    uint32_t epoch = 0;
    uint32_t pc = 0;
    uint32_t block = 0;
    uint8_t lane = 0;
    uint8_t bytes = 0;
    Kind kind = Kind::kRead;
  };
  struct GlobalWord {
    Access write;
    Access read[2];
  };
  // Holds what was released at an address, and how often something was.
  struct Released {
    ClustersClocks clocks;
    uint32_t version = 0;
  };
  struct Acquired {
    uint64_t address = 0;
    uint32_t version = 0;
  };
  static bool is_seen(const ClusterRaces& races, const Access& now, const Access& earlier);
  static void remember_read(const ClusterRaces& races, GlobalWord& word, const Access& now);
  void acquire(ClusterRaces& races, size_t agent, uint64_t address);
  void release(ClusterRaces& races, size_t agent, uint64_t address);

  std::unordered_map<uint64_t, GlobalWord> words_;
  std::unordered_map<uint64_t, Released> released_;
  std::unordered_map<ClustersClocks::Key, Acquired> acquired_;  // what each warp took last
};

}  // namespace fk::softgpu
