#include "check/access.h"

#include <algorithm>

#include "check/race_hooks.h"
#include "memory/memory_map.h"

namespace fk::softgpu {

namespace {

std::string bytes_text(uint32_t bytes) {
  return bytes == 1 ? "1 byte" : std::to_string(bytes) + " bytes";
}

}  // namespace

uint32_t check_global(Warp& warp, uint32_t lanes, const uint64_t* addresses, uint32_t bytes,
                      bool write) {
  const MemoryMap& memory = *warp.run->memory;
  uint32_t good = 0;
  for_lanes(lanes, [&](int lane) {
    const uint64_t address = addresses[lane];
    const auto* pointer = reinterpret_cast<const void*>(address);
    if (address % bytes != 0) {
      return report(
          warp, Problem::kMisaligned, lane, address,
          "access of " + bytes_text(bytes) + " at an address that is no multiple of that");
    }
    const KnownRange* range = memory.find(address, bytes);
    if (range == nullptr) {
      const bool freed = memory.was_freed(address);
      return report(warp, freed ? Problem::kFreed : Problem::kOutOfBounds, lane, address,
                    std::string(write ? "store" : "load") + " of " + bytes_text(bytes) +
                        " where there is " + memory.describe(pointer));
    }
    if (write && !range->writable) {
      return report(warp, Problem::kReadOnly, lane, address,
                    "store to memory that is only to be read: " + memory.describe(pointer));
    }
    warp.run->known[warp.pc] = *range;
    good |= 1u << lane;
  });
  return good;
}

Block* block_of(Warp& warp, uint32_t* address) {
  const uint32_t rank = *address >> kClusterShift;
  if (rank == 0) return warp.block;
  const auto& blocks = warp.block->cluster->blocks;
  if (rank > blocks.size()) return nullptr;
  *address &= kSharedOffsetMask;
  return blocks[rank - 1];
}

uint32_t check_shared(Warp& warp, uint32_t lanes, const uint32_t* addresses, uint32_t bytes,
                      bool cluster, uint64_t* pointers) {
  uint32_t good = 0;
  for_lanes(lanes, [&](int lane) {
    uint32_t address = addresses[lane];
    if (address % bytes != 0) {
      return report(warp, Problem::kMisaligned, lane, address,
                    "access of " + bytes_text(bytes) +
                        " of shared memory at an address that is no multiple of that");
    }
    Block* block = cluster || address >> kClusterShift == 0 ? block_of(warp, &address) : nullptr;
    if (block == nullptr || address < kSharedBase || address + bytes > block->shared_end) {
      const int64_t offset = int64_t{address & kSharedOffsetMask} - kSharedBase;
      return report(warp, Problem::kOutOfBounds, lane, addresses[lane],
                    "access of " + bytes_text(bytes) + " at byte " + std::to_string(offset) +
                        " of the " + std::to_string(warp.block->shared_end - kSharedBase) +
                        " bytes of shared memory" +
                        (address >> kClusterShift ? ", in another block" : ""));
    }
    if (block != warp.block && block->warps_left == 0) {
      return report(warp, Problem::kOutOfBounds, lane, addresses[lane],
                    "access to the shared memory of a block of the cluster that has ended");
    }
    pointers[lane] = reinterpret_cast<uint64_t>(block->shared.get() + address);
    good |= 1u << lane;
  });
  return good;
}

void check_readable(Warp& warp, uint32_t lanes, const uint32_t* addresses, uint32_t used) {
  for_lanes(lanes, [&](int lane) {
    uint32_t address = addresses[lane];
    Block* block = block_of(warp, &address);
    if (block == nullptr) return;
    const uint32_t wanted = used << (address & 31);
    const uint32_t missing = wanted & ~block->readable[address / 32];
    if (missing == 0) return;
    const bool pending = (missing & block->pending[address / 32]) != 0;
    if (pending || warp.run->options.report_uninitialised) {
      report(warp, pending ? Problem::kPending : Problem::kUninitialised, lane, addresses[lane],
             pending ? "load of shared memory that a copy under way has not written yet"
                     : "load of shared memory that nobody has written (byte " +
                           std::to_string(address - kSharedBase) + ")");
    }
    block->readable[address / 32] |= missing & ~block->pending[address / 32];
    block->unreadable -=
        static_cast<uint32_t>(__builtin_popcount(missing & ~block->pending[address / 32]));
  });
}

void mark_written(Warp& warp, int lane, uint32_t address, uint32_t bytes) {
  const uint32_t original = address;
  Block& block = *block_of(warp, &address);
  for (uint32_t at = address; at < address + bytes;) {
    const uint32_t end = std::min((at | 31) + 1, address + bytes);
    const uint32_t bits = (end - at == 32 ? ~0u : (1u << (end - at)) - 1) << (at & 31);
    if (block.pending_bytes != 0 && (block.pending[at / 32] & bits) != 0) {
      report(warp, Problem::kPending, lane, original,
             "store to shared memory that a copy under way writes, too");
    }
    const uint32_t fresh = bits & ~block.readable[at / 32] & ~block.pending[at / 32];
    block.readable[at / 32] |= fresh;
    block.unreadable -= static_cast<uint32_t>(__builtin_popcount(fresh));
    at = end;
  }
}

void begin_pending(Block& block, uint32_t address, uint32_t bytes) {
  for (uint32_t at = address; at < address + bytes;) {
    const uint32_t end = std::min((at | 31) + 1, address + bytes);
    const uint32_t bits = (end - at == 32 ? ~0u : (1u << (end - at)) - 1) << (at & 31);
    block.unreadable += static_cast<uint32_t>(__builtin_popcount(bits & block.readable[at / 32]));
    block.pending_bytes +=
        static_cast<uint32_t>(__builtin_popcount(bits & ~block.pending[at / 32]));
    block.readable[at / 32] &= ~bits;
    block.pending[at / 32] |= bits;
    at = end;
  }
}

void finish_pending(Block& block, uint32_t address, uint32_t bytes) {
  for (uint32_t at = address; at < address + bytes;) {
    const uint32_t end = std::min((at | 31) + 1, address + bytes);
    const uint32_t bits = (end - at == 32 ? ~0u : (1u << (end - at)) - 1) << (at & 31);
    block.unreadable -= static_cast<uint32_t>(__builtin_popcount(bits & ~block.readable[at / 32]));
    block.pending_bytes -= static_cast<uint32_t>(__builtin_popcount(bits & block.pending[at / 32]));
    block.readable[at / 32] |= bits;
    block.pending[at / 32] &= ~bits;
    at = end;
  }
}

namespace {

// Returns whether the lanes pair up, each with the one `apart` from it, at the same address.
bool lanes_pair(const uint32_t* addresses, uint32_t lanes, uint32_t apart) {
  bool all = true;
  for_lanes(lanes, [&](int lane) {
    const uint32_t other = static_cast<uint32_t>(lane) ^ apart;
    all &= (lanes >> other & 1) == 0 || addresses[other] == addresses[lane];
  });
  return all;
}

// Returns how many passes over the banks lanes take that are served together: as many as there are
// different words in the busiest bank.
uint32_t passes(const uint32_t* addresses, uint32_t lanes, uint32_t words) {
  uint32_t seen[kLanes][kLanes];  // by bank, the different words
  uint32_t counts[kLanes] = {};
  uint32_t most = 1;
  for_lanes(lanes, [&](int lane) {
    const uint32_t first = addresses[lane] / 4;
    for (uint32_t word = first; word < first + words; ++word) {
      uint32_t(&list)[kLanes] = seen[word % 32];
      uint32_t& count = counts[word % 32];
      if (std::find(list, list + count, word) != list + count) continue;
      list[count++] = word;
      most = std::max(most, count);
    }
  });
  return most;
}

}  // namespace

Wavefronts count_wavefronts(const uint32_t* addresses, uint32_t lanes, uint32_t bytes) {
  const uint32_t words = std::max(bytes / 4, 1u);
  if (lanes == kAllLanes) {  // mostly lanes have neighbours' words
    uint32_t apart = 0;
    for (uint32_t l = 0; l < kLanes; ++l) apart |= addresses[l] ^ (addresses[0] + l * bytes);
    if (apart == 0 && addresses[0] % 128 == 0) return {words, words};
  }
  // Lanes are served together that ask for 128 bytes at most. Where neighbours ask for the same
  // words, so are twice as many, up to half of the warp if each lane asks for 16 bytes.
  const int served = bytes <= 4 ? kLanes : 128 / static_cast<int>(bytes);
  const int most_served = bytes <= 8 ? kLanes : kLanes / 2;
  Wavefronts result;
  for (int begin = 0; begin < kLanes; begin += most_served) {
    const uint32_t all = most_served == kLanes ? kAllLanes : (1u << most_served) - 1;
    const uint32_t part = lanes & (all << begin);
    if (part == 0) continue;
    const bool together =
        served == most_served || lanes_pair(addresses, part, 1) || lanes_pair(addresses, part, 2);
    for (int at = begin; at < begin + most_served; at += together ? most_served : served) {
      const uint32_t some = together ? part : part & (((1u << served) - 1) << at);
      if (some == 0) continue;
      result.taken += passes(addresses, some, words);
      result.least += 1;
    }
  }
  return result;
}

uint32_t count_sectors(const uint64_t* addresses, uint32_t lanes) {
  uint64_t seen[kLanes];
  uint64_t highest = 0;
  int count = 0;
  for_lanes(lanes, [&](int lane) {
    const uint64_t sector = addresses[lane] / 32;  // accesses are aligned, of 32 bytes at most
    if (count > 0 && seen[count - 1] == sector) return;
    if (count == 0 || sector > highest) {
      highest = seen[count++] = sector;
    } else if (std::find(seen, seen + count, sector) == seen + count) {
      seen[count++] = sector;
    }
  });
  return static_cast<uint32_t>(count);
}

void TouchedSectors::grow() {
  std::vector<Page> old(pages_.size() * 2);
  old.swap(pages_);
  for (const Page& page : old) {
    if (page.number == 0) continue;
    size_t at = (page.number * 0x9e3779b97f4a7c15u >> 20) & (pages_.size() - 1);
    while (pages_[at].number != 0) at = (at + 1) & (pages_.size() - 1);
    pages_[at] = page;
  }
}

void TouchedSectors::add_sector(uint64_t sector) {
  const uint64_t number = sector / 64 + 1;
  if (pages_[last_].number != number) {
    if (2 * used_ > pages_.size()) grow();
    last_ = (number * 0x9e3779b97f4a7c15u >> 20) & (pages_.size() - 1);
    while (pages_[last_].number != number && pages_[last_].number != 0) {
      last_ = (last_ + 1) & (pages_.size() - 1);
    }
    if (pages_[last_].number == 0) {
      pages_[last_].number = number;
      ++used_;
    }
  }
  const uint64_t bit = uint64_t{1} << (sector % 64);
  count_ += (pages_[last_].bits & bit) == 0;
  pages_[last_].bits |= bit;
}

void TouchedSectors::add(const uint64_t* addresses, uint32_t lanes) {
  uint64_t before = ~uint64_t{0};
  for_lanes(lanes, [&](int lane) {
    const uint64_t sector = addresses[lane] / 32;
    if (sector != before) add_sector(sector);
    before = sector;
  });
}

void TouchedSectors::add_range(uint64_t begin, uint64_t bytes) {
  if (bytes == 0) return;
  for (uint64_t sector = begin / 32; sector <= (begin + bytes - 1) / 32; ++sector) {
    add_sector(sector);
  }
}

}  // namespace fk::softgpu
