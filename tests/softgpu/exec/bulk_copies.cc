#define SOFTGPU_TARGET base
#include "exec/bulk_copies.h"

#include <algorithm>

#include "check/access.h"
#include "check/race_hooks.h"
#include "exec/finish.h"
#include "exec/memory_barrier.h"
#include "exec/memory_ops.h"
#include "exec/targets.h"
#include "exec/tensor_box.h"
#include "memory/memory_map.h"

namespace fk::softgpu {

namespace {

using namespace base;

template <class Visit>
void for_lanes(uint32_t lanes, Visit visit) {
  for (; lanes != 0; lanes &= lanes - 1) visit(first_lane(lanes));
}

uint64_t value_in(const Warp& warp, const Instruction& i, int operand, int lane) {
  return (i.wide_address >> operand) & 1 ? lanes_at<uint64_t>(warp, i.at[operand])[lane]
                                         : lanes_at(warp, i.at[operand])[lane];
}

// Global memory that a copy reads or writes: whether it is all there.
bool global_there(Warp& warp, int lane, uint64_t address, uint64_t bytes, bool write,
                  const char* what) {
  KnownRange& known = warp.run->known[warp.pc];
  if (address < known.begin || address + bytes > known.end) {
    const KnownRange* found = warp.run->memory->find(address, bytes);
    known = found == nullptr ? KnownRange() : *found;
  }
  if (known.end == 0) {
    const auto* pointer = reinterpret_cast<const void*>(address);
    report(warp, warp.run->memory->was_freed(address) ? Problem::kFreed : Problem::kOutOfBounds,
           lane, address,
           std::string(what) + " of " + std::to_string(bytes) + " bytes where there is " +
               warp.run->memory->describe(pointer));
    return false;
  }
  if (write && !known.writable) {
    report(warp, Problem::kReadOnly, lane, address, "a copy to memory that is only to be read");
    return false;
  }
  if (warp.run->launch->early && !warp.waited_for_grid) report_early(warp, 1u << lane, &address);
  return true;
}

// A range of shared memory of some block of the cluster; nullptr where there is none.
Block* shared_there(Warp& warp, int lane, uint32_t* address, uint32_t bytes, uint32_t align) {
  const uint32_t given = *address;
  Block* block = block_of(warp, address);
  if (block == nullptr || *address < kSharedBase || bytes > block->shared_end ||
      *address > block->shared_end - bytes || block->warps_left == 0) {
    report(warp, Problem::kOutOfBounds, lane, given,
           "a copy of " + std::to_string(bytes) + " bytes that reaches out of shared memory");
    return nullptr;
  }
  if (*address % align != 0) {
    report(warp, Problem::kMisaligned, lane, given,
           "a copy at an address of shared memory that is no multiple of " + std::to_string(align));
    return nullptr;
  }
  return block;
}

// How many sectors of global memory a piece of a copy touches that the piece before did not: where
// copies are swizzled, a piece is half a sector. `last` is the last sector's number plus one.
uint64_t sectors_after(uint64_t* last, uint64_t address, uint64_t bytes) {
  const uint64_t first = address / 32 + (address / 32 + 1 == *last ? 1 : 0);
  *last = (address + bytes + 31) / 32;
  return *last - first;
}

void count_load(Warp& warp, const BulkLoad& load) {
  Run& run = *warp.run;
  ++run.counts.async_copies;
  if (!run.count_memory) return;
  uint64_t last = 0;
  for (const BulkLoad::Piece& piece : load.pieces) {
    if (piece.from == 0 || load.local) continue;
    run.counts.load_bytes += piece.bytes;
    run.counts.load_sectors += sectors_after(&last, piece.from, piece.bytes);
    run.touched->add_range(piece.from, piece.bytes);
  }
  ++run.counts.load_requests;
}

// The copy is under way: what it will write cannot be read from now on.
void start_load(Warp& warp, int lane, Block& block, BulkLoad load) {
  if (!has_barrier(block, load.barrier)) {
    report(warp, Problem::kBarrier, lane, load.barrier,
           "a copy is to complete where there is no initialised mbarrier");
    throw Abandoned();
  }
  load.pc = warp.pc;
  load.issuer = &warp;
  for (const BulkLoad::Piece& piece : load.pieces) {
    load_begins(warp, block, piece.to, piece.bytes);
    std::memset(block.shared.get() + piece.to, kPoison, piece.bytes);
    begin_pending(block, piece.to, piece.bytes);
  }
  count_load(warp, load);
  block.loads.push_back(std::move(load));
  warp.block->changed = true;
}

void finish_load(Block& block, BulkLoad& load) {
  Warp& warp = *load.issuer;
  const uint32_t pc = warp.pc;
  warp.pc = load.pc;
  size_t next = 0;
  for (const BulkLoad::Piece& piece : load.pieces) {
    uint8_t* to = block.shared.get() + piece.to;
    if (!load.data.empty()) {
      std::memcpy(to, load.data.data() + next, piece.bytes);
      next += piece.bytes;
    } else if (piece.from != 0) {
      std::memcpy(to, reinterpret_cast<const void*>(piece.from), piece.bytes);
    } else {
      std::memset(to, 0, piece.bytes);
    }
    finish_pending(block, piece.to, piece.bytes);
  }
  if (block.races) load_written(block, load);
  complete_bytes(warp, block, load.barrier, load.bytes);
  warp.pc = pc;
}

// cp.async.bulk to shared memory: [to], [from], bytes, [barrier]
template <bool kFromShared>
void bulk_load(Warp& warp, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    auto to =
        static_cast<uint32_t>(value_in(warp, i, 0, lane) + static_cast<uint64_t>(i.immediate));
    uint64_t from = value_in(warp, i, 1, lane) + static_cast<uint64_t>(i.second_offset);
    const uint32_t bytes = lanes_at(warp, i.at[2])[lane];
    auto barrier = static_cast<uint32_t>(value_in(warp, i, 3, lane));
    if (bytes % 16 != 0 || (!kFromShared && from % 16 != 0)) {
      return report(warp, Problem::kMisaligned, lane, from,
                    "a bulk copy of " + std::to_string(bytes) +
                        " bytes: sizes and addresses are multiples of 16");
    }
    Block* block = shared_there(warp, lane, &to, bytes, 16);
    if (block == nullptr || block_of(warp, &barrier) != block) return;
    BulkLoad load;
    if constexpr (kFromShared) {
      auto source = static_cast<uint32_t>(from);
      Block* own = shared_there(warp, lane, &source, bytes, 16);
      if (own == nullptr) return;
      for (uint32_t at = source; at < source + bytes; at += 16) {
        uint32_t addresses[kLanes] = {};
        addresses[lane] = at;
        if (own->unreadable != 0) check_readable(warp, 1u << lane, addresses, 0xffff);
      }
      if (own->races) note_async_read(warp, *own, source, bytes, true);
      from = reinterpret_cast<uint64_t>(own->shared.get() + source);
      load.local = true;
    } else if (!global_there(warp, lane, from, bytes, false, "a bulk copy")) {
      return;
    }
    load.pieces.push_back({from, to, bytes});
    load.barrier = barrier;
    load.bytes = bytes;
    start_load(warp, lane, *block, std::move(load));
  });
}

// st.async [to], value, [barrier]
void store_async(Warp& warp, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    const int words = i.list_size == 0 ? 1 : i.list_size;
    const auto bytes = static_cast<uint32_t>(4 * words);
    auto to =
        static_cast<uint32_t>(value_in(warp, i, 0, lane) + static_cast<uint64_t>(i.immediate));
    auto barrier =
        static_cast<uint32_t>(value_in(warp, i, 2, lane) + static_cast<uint64_t>(i.second_offset));
    Block* block = shared_there(warp, lane, &to, bytes, bytes);
    if (block == nullptr) return;
    if (block_of(warp, &barrier) != block) {
      return report(warp, Problem::kBarrier, lane, barrier,
                    "st.async with a barrier in another block than the data");
    }
    BulkLoad load;
    load.data.resize(bytes);
    for (int k = 0; k < words; ++k) {
      std::memcpy(load.data.data() + 4 * k, lanes_at(warp, register_of(warp, i, 1, k)) + lane, 4);
    }
    load.pieces.push_back({0, to, bytes});
    load.barrier = barrier;
    load.bytes = bytes;
    start_load(warp, lane, *block, std::move(load));
  });
}

bool map_at(Warp& warp, int lane, uint64_t address, TensorMap* map) {
  if (address % 64 == 0 && warp.run->memory->find(address, 128) != nullptr &&
      decode_tensor_map(reinterpret_cast<const void*>(address), map)) {
    return true;
  }
  report(warp, Problem::kOther, lane, address, "there is no tensor map");
  return false;
}

// The coordinates of a lane, behind the map in the list.
void coordinates_of(const Warp& warp, const Instruction& i, int lane, int32_t* to) {
  for (int d = 0; d < i.list_size; ++d) {
    to[d] = static_cast<int32_t>(
        lanes_at(warp, warp.run->program->lists[i.list + static_cast<uint32_t>(d)])[lane]);
  }
}

bool rank_fits(Warp& warp, const Instruction& i, int lane, const TensorMap& map) {
  if (map.rank == i.list_size) return true;
  report(warp, Problem::kOther, lane, 0,
         "a tensor map of rank " + std::to_string(map.rank) + ", with coordinates of rank " +
             std::to_string(i.list_size));
  return false;
}

uint32_t box_align(const TensorMap& map) {
  // Permuted pieces repeat every 8 rows: a box that does not begin there is not what a
  // multiplication expects, though the copy itself would be done.
  return map.swizzle == Swizzle::k128 ? 1024 : map.swizzle == Swizzle::k64 ? 512 : 128;
}

// cp.async.bulk.tensor to shared memory: [to], [map, {coordinates}], [barrier]{, blocks}
void tensor_load(Warp& warp, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    const auto to =
        static_cast<uint32_t>(value_in(warp, i, 0, lane) + static_cast<uint64_t>(i.immediate));
    const uint64_t map_address =
        value_in(warp, i, 1, lane) + static_cast<uint64_t>(i.second_offset);
    const auto barrier = static_cast<uint32_t>(value_in(warp, i, 2, lane));
    TensorMap map;
    if (!map_at(warp, lane, map_address, &map) || !rank_fits(warp, i, lane, map)) return;
    int32_t coordinates[5] = {};
    coordinates_of(warp, i, lane, coordinates);
    const uint32_t bytes = bytes_of_box(map);
    // With a mask, to the same place in several blocks.
    std::vector<uint32_t> ranks(1, ~0u);
    if (i.at[3] != kNoPlace) {
      ranks.clear();
      const uint32_t mask = lanes_at(warp, i.at[3])[lane];
      for (uint32_t rank = 0; rank < 16; ++rank) {
        if ((mask >> rank) & 1) ranks.push_back(rank);
      }
    }
    for (const uint32_t rank : ranks) {
      const uint32_t window = rank == ~0u ? 0 : (rank + 1) << kClusterShift;
      uint32_t own_to = rank == ~0u ? to : window | (to & kSharedOffsetMask);
      uint32_t own_barrier = rank == ~0u ? barrier : window | (barrier & kSharedOffsetMask);
      Block* block = shared_there(warp, lane, &own_to, bytes, box_align(map));
      if (block == nullptr || block_of(warp, &own_barrier) != block) return;
      BulkLoad load;
      for (const BoxPiece& piece : pieces_of_box(map, coordinates, own_to)) {
        if (piece.global != 0 &&
            !global_there(warp, lane, piece.global, piece.bytes, false, "a tensor copy")) {
          return;
        }
        load.pieces.push_back({piece.global, piece.shared, piece.bytes});
      }
      load.barrier = own_barrier;
      load.bytes = bytes;
      start_load(warp, lane, *block, std::move(load));
    }
  });
}

void start_store(Warp& warp, int lane, BulkStore store) {
  Run& run = *warp.run;
  store.lane = static_cast<uint8_t>(lane);
  store.pc = warp.pc;
  store.group = warp.bulk_group[lane];
  Block& block = *warp.block;
  uint64_t last = 0;
  for (size_t p = 0; p < store.pieces.size(); ++p) {
    const auto [to, bytes] = store.pieces[p];
    const uint32_t from = store.sources[p];
    for (uint32_t at = from; at < from + bytes;) {
      const uint32_t end = std::min((at | 15) + 1, from + bytes);
      uint32_t addresses[kLanes] = {};
      addresses[lane] = at;
      if (block.unreadable != 0) {
        check_readable(warp, 1u << lane, addresses, (1u << (end - at)) - 1);
      }
      at = end;
    }
    if (block.races) note_async_read(warp, block, from, bytes, true);
    const uint8_t* data = block.shared.get() + from;
    store.data.insert(store.data.end(), data, data + bytes);
    if (run.count_memory) {
      (store.add_type != 0 ? run.counts.atomic_bytes : run.counts.store_bytes) += bytes;
      run.counts.store_sectors += sectors_after(&last, to, bytes);
      run.touched->add_range(to, bytes);
    }
    if (run.global_races) {
      note_global_range(warp, lane, to, bytes, store.add_type != 0 ? Kind::kAtomic : Kind::kWrite);
    }
  }
  ++run.counts.async_copies;
  if (run.count_memory) ++run.counts.store_requests;
  warp.bulk_stores.push_back(std::move(store));
}

template <class T>
void add_values(void* to, const uint8_t* from, uint32_t bytes) {
  auto* values = static_cast<uint8_t*>(to);
  for (uint32_t at = 0; at + sizeof(T) <= bytes; at += sizeof(T)) {
    T a, b;
    std::memcpy(&a, values + at, sizeof a);
    std::memcpy(&b, from + at, sizeof b);
    a = AtomicAdd::apply(a, b);
    std::memcpy(values + at, &a, sizeof a);
  }
}

// Types as in TensorMap::type.
void add_of_type(uint32_t type, void* to, const uint8_t* from, uint32_t bytes) {
  switch (type) {
    case 2:
      return add_values<uint32_t>(to, from, bytes);
    case 3:
      return add_values<int32_t>(to, from, bytes);
    case 4:
      return add_values<uint64_t>(to, from, bytes);
    case 7:
      return add_values<float>(to, from, bytes);
    case 8:
      return add_values<double>(to, from, bytes);
    case 6:
    case 9: {
      auto* values = static_cast<uint8_t*>(to);
      for (uint32_t at = 0; at < bytes; at += 2) {
        uint16_t a, b;
        std::memcpy(&a, values + at, 2);
        std::memcpy(&b, from + at, 2);
        a = static_cast<uint16_t>(
            type == 6 ? float_to_half(half_to_float(a) + half_to_float(b))
                      : float_to_bfloat16(bfloat16_to_float(a) + bfloat16_to_float(b)));
        std::memcpy(values + at, &a, 2);
      }
      return;
    }
    default:
      return;
  }
}

// The copy has read shared memory: what it found must be what was there when it began.
void read_sources(Warp& warp, BulkStore& store) {
  if (store.read) return;
  store.read = true;
  const uint8_t* expected = store.data.data();
  for (size_t p = 0; p < store.pieces.size(); ++p) {
    const uint32_t bytes = store.pieces[p].second;
    const uint8_t* now = warp.block->shared.get() + store.sources[p];
    if (std::memcmp(now, expected, bytes) != 0) {
      const uint32_t pc = warp.pc;
      warp.pc = store.pc;
      report(warp, Problem::kPending, store.lane, store.sources[p],
             "shared memory changed while a copy under way read it");
      warp.pc = pc;
    }
    expected += bytes;
  }
}

void write_destinations(Warp& warp, BulkStore& store) {
  read_sources(warp, store);
  const uint8_t* from = store.data.data();
  for (const auto& [to, bytes] : store.pieces) {
    auto* pointer = reinterpret_cast<void*>(to);
    if (store.add_type == 0) {
      std::memcpy(pointer, from, bytes);
    } else {
      add_of_type(store.add_type - 1u, pointer, from, bytes);
    }
    from += bytes;
  }
  warp.block->changed = true;
}

// cp.async.bulk.tensor to global memory: [map, {coordinates}], [from]
template <bool kAdd>
void tensor_store(Warp& warp, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    const uint64_t map_address = value_in(warp, i, 0, lane) + static_cast<uint64_t>(i.immediate);
    auto from =
        static_cast<uint32_t>(value_in(warp, i, 1, lane) + static_cast<uint64_t>(i.second_offset));
    TensorMap map;
    if (!map_at(warp, lane, map_address, &map) || !rank_fits(warp, i, lane, map)) return;
    int32_t coordinates[5] = {};
    coordinates_of(warp, i, lane, coordinates);
    if (shared_there(warp, lane, &from, bytes_of_box(map), box_align(map)) == nullptr) return;
    BulkStore store;
    store.add_type = kAdd ? static_cast<uint8_t>(1 + map.type) : 0;
    for (const BoxPiece& piece : pieces_of_box(map, coordinates, from)) {
      if (piece.global == 0) continue;
      if (!global_there(warp, lane, piece.global, piece.bytes, true, "a tensor copy")) return;
      store.pieces.push_back({piece.global, piece.bytes});
      store.sources.push_back(piece.shared);
    }
    start_store(warp, lane, std::move(store));
  });
}

// cp.async.bulk and cp.reduce.async.bulk to global memory: [to], [from], bytes
template <uint8_t kAddType>
void bulk_store(Warp& warp, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    const uint64_t to = value_in(warp, i, 0, lane) + static_cast<uint64_t>(i.immediate);
    auto from =
        static_cast<uint32_t>(value_in(warp, i, 1, lane) + static_cast<uint64_t>(i.second_offset));
    const uint32_t bytes = lanes_at(warp, i.at[2])[lane];
    if (bytes % 16 != 0 || to % 16 != 0) {
      return report(warp, Problem::kMisaligned, lane, to,
                    "a bulk copy of " + std::to_string(bytes) +
                        " bytes: sizes and addresses are multiples of 16");
    }
    if (shared_there(warp, lane, &from, bytes, 16) == nullptr) return;
    if (!global_there(warp, lane, to, bytes, true, "a bulk copy")) return;
    BulkStore store;
    store.add_type = kAddType;
    store.pieces.push_back({to, bytes});
    store.sources.push_back(from);
    start_store(warp, lane, std::move(store));
  });
}

// Groups of each lane but the last `pending` are done: read, and with `whole` written, too.
void wait_for_stores(Warp& warp, uint32_t lanes, uint32_t pending, bool whole) {
  size_t kept = 0;
  for (size_t k = 0; k < warp.bulk_stores.size(); ++k) {
    BulkStore& store = warp.bulk_stores[k];
    if (has(lanes, store.lane) && store.group + pending < warp.bulk_group[store.lane]) {
      if (whole) {
        write_destinations(warp, store);
        continue;
      }
      read_sources(warp, store);
    }
    if (kept != k) warp.bulk_stores[kept] = std::move(store);
    ++kept;
  }
  warp.bulk_stores.resize(kept);
}

void add_loads(Operations& table) {
  const std::string to_cluster = "cp.async.bulk.shared::cluster";
  const std::string completes = ".mbarrier::complete_tx::bytes";
  table[to_cluster + ".global" + completes] = {"a a r a", bulk_load<false>, Class::kAsyncCopy};
  table[to_cluster + ".shared::cta" + completes] = {"a a r a", bulk_load<true>, Class::kAsyncCopy};
  for (int rank = 1; rank <= 5; ++rank) {
    const std::string dims = std::to_string(rank) + "d";
    const std::string load = "cp.async.bulk.tensor." + dims + ".shared::cluster.global" + completes;
    table[load] = {"a c a", tensor_load, Class::kAsyncCopy};
    table[load + ".multicast::cluster"] = {"a c a h", tensor_load, Class::kAsyncCopy};
    table["cp.async.bulk.tensor." + dims + ".global.shared::cta.bulk_group"] = {
        "c a", tensor_store<false>, Class::kAsyncCopy};
    table["cp.reduce.async.bulk.tensor." + dims + ".global.shared::cta.add.bulk_group"] = {
        "c a", tensor_store<true>, Class::kAsyncCopy};
    table["cp.async.bulk.prefetch.tensor." + dims + ".L2.global"] = {
        "c", [](Warp&, const Instruction&, uint32_t) {}, Class::kAsyncCopy};
  }
  const std::string store = "st.async.weak.shared::cluster" + completes;
  table[store + ".b32"] = {"a r a", store_async, Class::kAsyncCopy};
  table[store + ".v2.b32"] = {"a v a", store_async, Class::kAsyncCopy};
  table[store + ".v4.b32"] = {"a v a", store_async, Class::kAsyncCopy};
}

void add_stores(Operations& table) {
  table["cp.async.bulk.global.shared::cta.bulk_group"] = {"a a r", bulk_store<0>,
                                                          Class::kAsyncCopy};
  table["cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"] = {"a a r", bulk_store<1 + 7>,
                                                                         Class::kAsyncCopy};
  table["cp.async.bulk.commit_group"] = {"",
                                         [](Warp& warp, const Instruction&, uint32_t lanes) {
                                           for_lanes(lanes,
                                                     [&](int lane) { ++warp.bulk_group[lane]; });
                                         },
                                         Class::kAsyncCopy};
  table["cp.async.bulk.wait_group"] = {"i",
                                       [](Warp& warp, const Instruction& i, uint32_t lanes) {
                                         wait_for_stores(warp, lanes,
                                                         static_cast<uint32_t>(i.number), true);
                                       },
                                       Class::kAsyncCopy};
  table["cp.async.bulk.wait_group.read"] = {
      "i",
      [](Warp& warp, const Instruction& i, uint32_t lanes) {
        wait_for_stores(warp, lanes, static_cast<uint32_t>(i.number), false);
      },
      Class::kAsyncCopy};
}

}  // namespace

void finish_loads(Block& block, uint32_t barrier) {
  std::vector<BulkLoad> now;
  const auto wanted = [&](const BulkLoad& load) { return load.barrier == barrier; };
  for (BulkLoad& load : block.loads) {
    if (wanted(load)) now.push_back(std::move(load));
  }
  block.loads.erase(std::remove_if(block.loads.begin(), block.loads.end(), wanted),
                    block.loads.end());
  for (BulkLoad& load : now) finish_load(block, load);
}

void finish_lanes(Warp& warp, uint32_t lanes) {
  for (BulkStore& store : warp.bulk_stores) {
    if (!has(lanes, store.lane) || store.done) continue;
    store.done = true;
    if (!store.read) {
      report(warp, Problem::kUnfinished, store.lane, 0,
             "the thread ends before cp.async.bulk.wait_group has seen that its copy out of shared "
             "memory was read");
    }
    write_destinations(warp, store);
  }
  if (!warp.multiplications.empty() && lanes == warp.live) {
    report(warp, Problem::kUnfinished, -1, 0, "the warp ends with multiplications under way");
  }
}

void finish_block(Block& block) {
  if (block.loads.empty()) return;
  BulkLoad& load = block.loads.front();
  Warp& warp = *load.issuer;
  warp.pc = load.pc;
  report(warp, Problem::kUnfinished, -1, load.barrier,
         "the block ends while a copy into its shared memory is under way");
  block.loads.clear();
}

void add_bulk_copies(Operations& table) {
  add_loads(table);
  add_stores(table);
}

}  // namespace fk::softgpu
