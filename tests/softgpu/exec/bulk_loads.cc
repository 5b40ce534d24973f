// This file executes copies of the copy engine into shared memory: bulk and tensor copies,
// st.async.
#include "exec/bulk_loads.h"

#include <algorithm>

#include "check/access.h"
#include "check/race_hooks.h"
#include "exec/copy_operands.h"
#include "exec/finish.h"
#include "exec/memory_barrier.h"
#include "exec/memory_ops.h"
#include "exec/tables.h"
#include "exec/tensor_box.h"

namespace fk::softgpu {

namespace {

void count_load(Warp& warp, const BulkLoad& load) {
  Run& run = *warp.run;
  ++run.counts.async_copies;
  if (!run.count_memory) return;
  MemoryCounts& counts = run.counts;
  uint64_t last = 0, sectors = 0;
  for (const BulkLoad::Piece& piece : load.pieces) {
    if (piece.from == 0 || load.local) continue;
    counts.load_bytes += piece.bytes;
    sectors += sectors_after(&last, piece.from, piece.bytes);
    run.touched->add_range(piece.from, piece.bytes);
  }
  counts.load_sectors += sectors;
  counts.copied_load_sectors += sectors;
  ++counts.load_requests;
  ++counts.copied_load_requests;
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
    load_begins(warp, block, piece.to, piece.bytes, !load.data.empty());
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

// Executes cp.async.bulk to shared memory: [to], [from], bytes, [barrier]
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

// Executes st.async [to], value, [barrier]
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
    // Its completion releases, at the scope of the cluster, what the thread did and saw before.
    for (MemoryBarrier& known : block->memory_barriers) {
      if (known.offset == barrier) phase_arrived(warp, *block, known);
    }
  });
}

// Executes cp.async.bulk.tensor to shared memory: [to], [map, {coordinates}], [barrier]{, blocks}
void tensor_load(Warp& warp, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    const auto to =
        static_cast<uint32_t>(value_in(warp, i, 0, lane) + static_cast<uint64_t>(i.immediate));
    const uint64_t map_address =
        value_in(warp, i, 1, lane) + static_cast<uint64_t>(i.second_offset);
    const auto barrier = static_cast<uint32_t>(value_in(warp, i, 2, lane));
    TensorMap map;
    int32_t coordinates[5] = {};
    if (!tensor_operands(warp, i, lane, map_address, &map, coordinates)) return;
    const uint32_t bytes = bytes_of_box(map);
    // With a mask the copy goes to the same place in several blocks.
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

void finish_block(Block& block) {
  if (block.loads.empty()) return;
  BulkLoad& load = block.loads.front();
  Warp& warp = *load.issuer;
  warp.pc = load.pc;
  report(warp, Problem::kUnfinished, -1, load.barrier,
         "the block ends while a copy into its shared memory is under way");
  block.loads.clear();
}

void add_bulk_loads(Operations& table) {
  const std::string to_cluster = "cp.async.bulk.shared::cluster";
  const std::string completes = ".mbarrier::complete_tx::bytes";
  table[to_cluster + ".global" + completes] = {"a a r a", bulk_load<false>, Class::kAsyncCopy};
  table[to_cluster + ".shared::cta" + completes] = {"a a r a", bulk_load<true>, Class::kAsyncCopy};
  for (int rank = 1; rank <= 5; ++rank) {
    const std::string dims = std::to_string(rank) + "d";
    const std::string load = "cp.async.bulk.tensor." + dims + ".shared::cluster.global" + completes;
    table[load] = {"a c a", tensor_load, Class::kAsyncCopy};
    table[load + ".multicast::cluster"] = {"a c a h", tensor_load, Class::kAsyncCopy};
    table["cp.async.bulk.prefetch.tensor." + dims + ".L2.global"] = {
        "c", [](Warp&, const Instruction&, uint32_t) {}, Class::kAsyncCopy};
  }
  const std::string store = "st.async.weak.shared::cluster" + completes;
  table[store + ".b32"] = {"a r a", store_async, Class::kAsyncCopy};
  table[store + ".v2.b32"] = {"a v a", store_async, Class::kAsyncCopy};
  table[store + ".v4.b32"] = {"a v a", store_async, Class::kAsyncCopy};
}

}  // namespace fk::softgpu
