// This file declares the state of a launch: warps, blocks, clusters, and what is under way. Whoever
// executes instructions works on this.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "program/instruction.h"
#include "softgpu.h"

namespace fk::softgpu {

struct Block;
struct Run;
class Races;
class ClusterRaces;

// Addresses in shared memory begin here, so that a null pointer is found. An address holds the
// rank of the block in its cluster plus one from bit 24 on, or 0 there for the own block.
constexpr uint32_t kSharedBase = 1024;
constexpr int kClusterShift = 24;
constexpr uint32_t kSharedOffsetMask = (1u << kClusterShift) - 1;
// Generic addresses see shared memory here.
constexpr uint64_t kSharedWindow = 0x5a00000000000000;
constexpr uint64_t kSharedWindowMask = 0xff00000000000000;
// Memory that nobody wrote holds this: NaN in all float types.
constexpr uint8_t kPoison = 0xff;

enum class Wait : uint8_t { kNone, kConverge, kBarrier, kCluster };

// Calls visit(lane) for each of the lanes.
template <class Visit>
void for_lanes(uint32_t lanes, Visit visit) {
  for (; lanes != 0; lanes &= lanes - 1) visit(__builtin_ctz(lanes));
}

// Holds the lanes of a warp that are at the same place.
struct Fragment {
  uint32_t pc = 0;
  uint32_t lanes = 0;
  Wait wait = Wait::kNone;
  uint32_t detail = 0;  // the barrier, or the lanes that are waited for
};

// Describes a copy of cp.async that is not seen yet.
struct LaneCopy {
  uint64_t from = 0;
  uint32_t to = 0;
  uint32_t pc = 0;
  uint32_t group = 0;
  uint8_t bytes = 0, wanted = 0, lane = 0;
  bool early = false;  // the bytes are there already, though nobody may look
};

// Describes a bulk copy out of shared memory (cp.async.bulk ... .bulk_group), under way for one
// thread.
struct BulkStore {
  std::vector<uint8_t> data;  // what was read from shared memory, once it was
  std::vector<std::pair<uint64_t, uint32_t>> pieces;  // where in global memory, how many bytes
  std::vector<uint32_t> sources;                      // where in shared memory, by piece
  uint32_t pc = 0, group = 0;
  uint8_t lane = 0;
  uint8_t add_type = 0;  // 0: a plain copy; else 1 + TensorMap::type
  bool read = false;
  bool done = false;
};

// Holds the accumulators of multiplications under way: the registers hold poison meanwhile.
struct Accumulators {
  std::vector<Place> places;
  std::vector<float> values;  // 16 rows
};
// Describes a multiplication of a warpgroup under way, as this warp's 16 rows see it.
struct Multiplication {
  void (*finish)(Warp& warp, const Multiplication& multiplication) = nullptr;
  const Instruction* instruction = nullptr;
  uint64_t a = 0, b = 0;              // where the matrices are
  std::vector<uint32_t> a_registers;  // 32 lanes of each
  std::shared_ptr<Accumulators> accumulators;
  uint64_t sum = 0;  // of what is in shared memory, when it began
  uint32_t group = 0, pc = 0;
  bool accumulate = false;
  bool poisoned = false;  // it cannot read what it multiplies
};

struct Warp {
  uint8_t* base[2] = {nullptr, nullptr};  // registers, constants
  uint32_t* predicates = nullptr;
  uint32_t pc = 0;     // of the instruction that runs
  uint32_t live = 0;   // lanes that have not ended
  uint32_t begun = 0;  // lanes that there are
  bool yield = false;  // set by an instruction that would have to wait: lets others run
  Run* run = nullptr;
  Block* block = nullptr;
  int index = 0;
  std::vector<Fragment> fragments;
  bool waited_for_grid = false;
  uint64_t last_yield = 0;
  uint32_t turn = 0;    // which of several fragments runs
  uint32_t slices = 0;  // turns that were used up

  uint32_t copy_group[kLanes] = {};  // of cp.async: the one that is open
  std::vector<LaneCopy> copies;
  uint32_t bulk_group[kLanes] = {};
  std::vector<BulkStore> bulk_stores;
  uint32_t multiply_group = 0;
  bool multiply_fenced = false;
  std::vector<Multiplication> multiplications;
  uint32_t cluster_phase = 0;
  int registers = 0;  // of a thread, as setmaxnreg set them; 0 before
};

struct NamedBarrier {
  int arrived = 0;                       // threads
  int expected = 0;                      // 0: nobody is there
  uint32_t any = 0, all = 1, count = 0;  // of bar.red
  uint32_t first_pc = 0;
};

// Describes an mbarrier object; its 8 bytes of shared memory are only a place.
struct MemoryBarrier {
  uint32_t offset = 0;
  uint32_t expected = 0;  // arrivals of a phase
  uint32_t pending = 0;   // arrivals still missing in this one
  int64_t bytes = 0;      // of copies, still missing
  uint32_t phase = 0;
  uint32_t waits_failed = 0;  // in this phase
  int agent = -1;             // for races: who completes copies on it
  uint32_t time = 0;          // and how many phases it has had
};

// Describes a bulk copy into shared memory, under way: completes on a barrier of the block that
// owns it.
struct BulkLoad {
  struct Piece {
    uint64_t from = 0;  // 0: zeros
    uint32_t to = 0;
    uint32_t bytes = 0;
  };
  std::vector<Piece> pieces;
  std::vector<uint8_t> data;  // of st.async, and of copies from shared memory
  uint32_t barrier = 0;       // offset
  uint32_t bytes = 0;
  uint32_t pc = 0;
  Warp* issuer = nullptr;
  bool local = false;  // from shared memory
};

struct Cluster {
  Cluster();
  ~Cluster();
  std::vector<Block*> blocks;
  int arrived = 0;
  uint32_t phase = 0;
  int threads = 0;  // that take part, all blocks together
  std::unique_ptr<ClusterRaces> races;
};

struct Block {
  Block();
  ~Block();
  Run* run = nullptr;
  uint32_t index[3] = {0, 0, 0};
  uint32_t number = 0;
  uint32_t rank = 0;  // in its cluster
  std::shared_ptr<Cluster> cluster;
  std::vector<std::unique_ptr<Warp>> warps;
  int threads = 0;
  int exited = 0;  // threads
  int warps_left = 0;

  uint32_t shared_end = kSharedBase;  // one past the last address
  AlignedArray<uint8_t> shared;       // indexed by address: kSharedBase bytes are wasted
  std::vector<uint32_t> readable;     // a bit for each byte: written, and no copy under way
  std::vector<uint32_t> pending;      // a bit for each byte that a copy under way will write
  uint32_t unreadable = 0;            // how many bytes are not readable
  uint32_t pending_bytes = 0;

  NamedBarrier barriers[16];
  std::vector<MemoryBarrier> memory_barriers;
  std::vector<BulkLoad> loads;  // into this block
  bool changed = false;         // something happened since the scheduler last looked
  std::unique_ptr<Races> races;
};

// Counts how often an instruction ran.
struct Executed {
  uint64_t warps = 0;
  uint64_t lanes = 0;
};

// Holds where accesses of one instruction last were: most go to the same allocation.
struct KnownRange {
  uint64_t begin = 1, end = 0;
  bool writable = false;
};

struct MemoryCounts {
  uint64_t load_bytes = 0, store_bytes = 0, atomic_bytes = 0;
  uint64_t load_requests = 0, load_sectors = 0, store_requests = 0, store_sectors = 0;
  uint64_t copied_load_requests = 0, copied_load_sectors = 0;
  uint64_t copied_store_requests = 0, copied_store_sectors = 0;
  uint64_t shared_load_bytes = 0, shared_store_bytes = 0;
  uint64_t shared_load_wavefronts = 0, shared_store_wavefronts = 0;
  uint64_t shared_load_conflicts = 0, shared_store_conflicts = 0;
  uint64_t tensor_flops = 0, barriers = 0, barrier_waits = 0, async_copies = 0;
};

// Is thrown to end a launch: a report was made that nothing sensible can follow.
struct Abandoned {};

class MemoryMap;
class GlobalRaces;
class TouchedSectors;

struct Run {
  Program* program = nullptr;
  const Launch* launch = nullptr;
  LaunchOptions options;
  const Chip* chip = nullptr;
  MemoryMap* memory = nullptr;
  const std::map<int, std::string>* files = nullptr;
  LaunchResult* result = nullptr;
  std::vector<Executed> executed;  // by instruction
  std::vector<KnownRange> known;   // by instruction
  std::vector<bool> reported;      // by instruction
  MemoryCounts counts;
  uint64_t instructions = 0;
  uint64_t blocks_run = 0;
  uint64_t random = 0;
  bool count_memory = true;
  std::unique_ptr<GlobalRaces> global_races;
  std::unique_ptr<TouchedSectors> touched;

  uint64_t draw();  // the next random number
};

// Adds a report; throws Abandoned where there are too many. Only the first of each problem at an
// instruction is kept. `lane` may be -1.
void report(Warp& warp, Problem problem, int lane, uint64_t address, const std::string& text);

// This is the loop of the interpreter: it runs a warp until it must wait, has ended, or `budget`
// instructions were run. Returns how many were.
uint64_t run_warp(Warp& warp, uint64_t budget);

}  // namespace fk::softgpu
