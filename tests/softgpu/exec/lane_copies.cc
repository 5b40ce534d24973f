// This file executes cp.async: copies of a few bytes to shared memory for each thread. They are
// done as late as is allowed, when the thread waits for them; until then their destination cannot
// be read.
#include <algorithm>

#include "check/access.h"
#include "check/race_hooks.h"
#include "exec/lanes.h"
#include "exec/memory_ops.h"
#include "exec/tables.h"

namespace fk::softgpu {

namespace {

void do_copy(Warp& warp, const LaneCopy& copy) {
  Block& block = *warp.block;
  uint8_t* to = block.shared.get() + copy.to;
  if (copy.wanted > 0) std::memcpy(to, reinterpret_cast<const void*>(copy.from), copy.wanted);
  std::memset(to + copy.wanted, 0, static_cast<size_t>(copy.bytes - copy.wanted));
  finish_pending(block, copy.to, copy.bytes);
  if (block.races) {
    uint32_t addresses[kLanes];
    addresses[copy.lane] = copy.to;
    note_shared(warp, 1u << copy.lane, addresses, copy.bytes, Kind::kWrite);
  }
}

// Returns how many bytes of a lane are copied; the others are zero.
uint32_t wanted_bytes(const Warp& warp, const Instruction& i, bool sized, int lane) {
  const auto bytes = static_cast<uint32_t>(i.number);
  if (sized) return std::min(lanes_at(warp, i.at[3])[lane], bytes);
  return i.at[3] != kNoPlace && has(predicate(warp, i, 3), lane) ? 0 : bytes;
}

// Returns whether the first and the last byte can be read of what a lane copies in part.
bool part_there(Warp& warp, int lane, uint64_t from, uint32_t wanted) {
  uint64_t addresses[kLanes] = {};
  for (const uint64_t at : {from, from + wanted - 1}) {
    addresses[lane] = at;
    if (check_global(warp, 1u << lane, addresses, 1, false) == 0) return false;
  }
  return true;
}

// Executes cp.async [to], [from], bytes{, ignored} or, sized, the number of bytes that are not zero
template <bool kSized>
void start_copies(Warp& warp, const Instruction& i, uint32_t lanes) {
  const auto bytes = static_cast<uint32_t>(i.number);
  alignas(64) uint32_t to[kLanes];
  alignas(64) uint64_t from[kLanes];
  uint64_t pointers[kLanes];
  narrow_addresses_of(warp, i, 0, i.immediate, lanes, to);
  addresses_of(warp, i, 1, i.second_offset, lanes, from);
  lanes = check_shared(warp, lanes, to, bytes, false, pointers);
  uint32_t wanted = 0;  // lanes that copy all
  uint32_t partly[kLanes] = {};
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    const int l = first_lane(left);
    const uint32_t n = wanted_bytes(warp, i, kSized, l);
    if (n == bytes) {
      wanted |= 1u << l;
    } else if (n > 0 && !part_there(warp, l, from[l], n)) {
      lanes &= ~(1u << l);
    } else {
      partly[l] = n;
    }
  }
  if (wanted != 0) {
    uint64_t sources[kLanes];
    std::memcpy(sources, from, sizeof sources);
    fill_others(sources, wanted);
    const uint32_t good = prepare_global<Access::kLoad, Kind::kRead>(warp, wanted, sources, bytes);
    lanes &= ~(wanted & ~good);
    wanted = good;
  }
  if (warp.run->count_memory && lanes != 0) {
    for (int l = 0; l < kLanes; ++l) {
      if (!has(lanes, l)) to[l] = to[first_lane(lanes)];
    }
    count_shared(warp, to, lanes, bytes, true);
  }
  const bool early = warp.run->options.seed != 0 && warp.run->draw() % 2 == 0;
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    const int l = first_lane(left);
    LaneCopy copy;
    copy.from = from[l];
    copy.to = to[l];
    copy.pc = warp.pc;
    copy.group = warp.copy_group[l];
    copy.bytes = static_cast<uint8_t>(bytes);
    copy.wanted = has(wanted, l) ? copy.bytes : static_cast<uint8_t>(partly[l]);
    copy.lane = static_cast<uint8_t>(l);
    copy.early = early;
    std::memset(warp.block->shared.get() + copy.to, kPoison, bytes);
    begin_pending(*warp.block, copy.to, bytes);
    if (early) {  // the bytes may be there at once, but nobody may rely on it
      uint8_t* data = warp.block->shared.get() + copy.to;
      std::memset(data, 0, bytes);
      std::memcpy(data, reinterpret_cast<const void*>(copy.from), copy.wanted);
    }
    warp.copies.push_back(copy);
  }
}

void commit_copies(Warp& warp, const Instruction&, uint32_t lanes) {
  for (uint32_t left = lanes; left != 0; left &= left - 1) ++warp.copy_group[first_lane(left)];
}

// Finishes the copies of all but the last `pending` groups of each lane.
void wait_for_copies(Warp& warp, uint32_t lanes, uint32_t pending, bool open_too) {
  size_t kept = 0;
  const uint32_t pc = warp.pc;
  for (size_t k = 0; k < warp.copies.size(); ++k) {
    const LaneCopy copy = warp.copies[k];
    const uint32_t group = warp.copy_group[copy.lane];
    if (has(lanes, copy.lane) && (open_too || copy.group + pending < group)) {
      warp.pc = copy.pc;
      do_copy(warp, copy);
    } else {
      warp.copies[kept++] = copy;
    }
  }
  warp.pc = pc;
  warp.copies.resize(kept);
}

}  // namespace

void add_lane_copies(Operations& table) {
  for (const char* cache : {"ca", "cg"}) {
    for (const char* space :
         {"shared.global", "shared.global.L2::128B", "shared.global.L2::256B"}) {
      table[std::string("cp.async.") + cache + "." + space] = {"a a i p?", start_copies<false>,
                                                               Class::kAsyncCopy};
      // The decoder asks for this one by name.
      table[std::string("cp.async.") + cache + "." + space + " sized"] = {
          "a a i r", start_copies<true>, Class::kAsyncCopy};
    }
  }
  table["cp.async.commit_group"] = {"", commit_copies, Class::kAsyncCopy};
  table["cp.async.wait_group"] = {"i",
                                  [](Warp& warp, const Instruction& i, uint32_t lanes) {
                                    wait_for_copies(warp, lanes, static_cast<uint32_t>(i.number),
                                                    false);
                                  },
                                  Class::kAsyncCopy};
  table["cp.async.wait_all"] = {
      "",
      [](Warp& warp, const Instruction&, uint32_t lanes) { wait_for_copies(warp, lanes, 0, true); },
      Class::kAsyncCopy};
}

}  // namespace fk::softgpu
