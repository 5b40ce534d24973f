// This file finds accesses that nothing orders. Each warp has a clock for every other agent: how
// far it has seen what that one did. Barriers pass these on; an access to a word that another agent
// wrote, at a time that this warp has not seen, is a race. The agents are the warps of a cluster
// and its mbarriers, for the copies that complete on them; what is known of other clusters is kept
// beside. This is about shared memory; global_races.h goes by the same clocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "exec/machine.h"

namespace fk::softgpu {

// Says what an access does; kWriteEqual stores what is there already, and may. The last three are
// those by which warps of different clusters may wait for each other: a volatile or acquiring load
// takes over what those have seen who released at its address, a volatile or releasing store passes
// on what its warp has seen, an atomic does both.
enum class Kind : uint8_t { kRead, kWrite, kWriteEqual, kAtomic, kAcquire, kRelease, kSynchronise };

// Holds for each agent up to which of its times all is seen.
class Clocks {
 public:
  uint32_t at(size_t agent) const { return agent < times_.size() ? times_[agent] : 0; }
  void set(size_t agent, uint32_t time) {
    if (times_.size() <= agent) times_.resize(agent + 1, 0);
    times_[agent] = time;
  }
  size_t size() const { return times_.size(); }
  void join(const Clocks& other) {
    if (times_.size() < other.times_.size()) times_.resize(other.times_.size(), 0);
    for (size_t i = 0; i < other.times_.size(); ++i) {
      times_[i] = times_[i] < other.times_[i] ? other.times_[i] : times_[i];
    }
  }

 private:
  std::vector<uint32_t> times_;
};

// Holds the same for agents of several clusters; most of it is empty.
class ClustersClocks {
 public:
  using Key = uint64_t;
  static Key key(uint32_t cluster, size_t agent) { return uint64_t{cluster} << 32 | agent; }
  uint32_t at(Key key) const {
    const auto found = times_.find(key);
    return found == times_.end() ? 0 : found->second;
  }
  void advance_to(Key key, uint32_t time) {
    uint32_t& own = times_[key];
    own = std::max(own, time);
  }
  void join(const ClustersClocks& other) {
    for (const auto& [key, time] : other.times_) advance_to(key, time);
  }
  const std::unordered_map<Key, uint32_t>& times() const { return times_; }

 private:
  std::unordered_map<Key, uint32_t> times_;
};

// Holds what an agent has seen, and how much of it lies behind a proxy fence, so that copies and
// multiplications see it, too.
struct Seen {
  Clocks all, fenced;
  ClustersClocks others;  // of other clusters
  void join(const Seen& other) {
    all.join(other.all);
    fenced.join(other.fenced);
    others.join(other.others);
  }
};

// Describes one access that later ones are compared with.
struct Trace {
  uint32_t time = 0;   // 0: there was none
  uint32_t epoch = 0;  // of the warp: how often its lanes have met
  uint32_t pc = 0;
  uint16_t agent = 0;
  uint8_t lane = 0;   // kWholeWarp: no lane by itself
  uint8_t bytes = 0;  // of the word, a bit each
  bool atomic = false;
  bool copied = false;      // by the copy engine
  bool multiplied = false;  // read by wgmma
};
constexpr uint8_t kWholeWarp = 255;

struct Word {
  Trace write;
  Trace read[2];
};

// Holds what the threads of one block did to its shared memory.
class Races {
 public:
  explicit Races(uint32_t end) : words((end + 3) / 4) {}
  std::vector<Word> words;  // by address / 4
  // Holds for each word the stores of the same bytes as the last one, which nothing orders with it.
  std::unordered_map<const Word*, std::vector<Trace>> equal;
  Seen barriers[16];  // what those who wait there bring along
};

// Holds what the barriers of one cluster put in order among its warps.
class ClusterRaces {
 public:
  struct Phases {
    Seen arriving, complete;
  };
  uint32_t number = 0;      // no other cluster of the launch has it
  std::vector<Seen> warps;  // by agent
  std::vector<uint32_t> epochs;
  size_t agents = 0;
  std::map<int, Phases> memory_barriers;  // by agent
  Seen cluster, cluster_complete;
};

// Returns which agent of its cluster a warp is.
inline size_t agent_of(const Warp& warp) {
  return warp.block->rank * warp.block->warps.size() + static_cast<size_t>(warp.index);
}

// Makes what the warp does from now on later than what it has passed on.
inline void advance(ClusterRaces& races, size_t agent) {
  Clocks& own = races.warps[agent].all;
  own.set(agent, own.at(agent) + 1);
}

}  // namespace fk::softgpu
