// Copies of the copy engine out of shared memory, and sums of them with what is there.
#include <algorithm>

#include "check/access.h"
#include "check/race_hooks.h"
#include "exec/copy_operands.h"
#include "exec/finish.h"
#include "exec/memory_ops.h"
#include "exec/tables.h"
#include "exec/tensor_box.h"

namespace fk::softgpu {

namespace {

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
      const uint64_t sectors = sectors_after(&last, to, bytes);
      run.counts.store_sectors += sectors;
      run.counts.copied_store_sectors += sectors;
      run.touched->add_range(to, bytes);
    }
    if (run.global_races) {
      note_global_range(warp, lane, to, bytes, store.add_type != 0 ? Kind::kAtomic : Kind::kWrite);
    }
  }
  ++run.counts.async_copies;
  if (run.count_memory) {
    ++run.counts.store_requests;
    ++run.counts.copied_store_requests;
  }
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

// Adds numbers of a type, which is counted as in TensorMap::type.
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

// Executes cp.async.bulk.tensor to global memory: [map, {coordinates}], [from]
template <bool kAdd>
void tensor_store(Warp& warp, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    const uint64_t map_address = value_in(warp, i, 0, lane) + static_cast<uint64_t>(i.immediate);
    auto from =
        static_cast<uint32_t>(value_in(warp, i, 1, lane) + static_cast<uint64_t>(i.second_offset));
    TensorMap map;
    int32_t coordinates[5] = {};
    if (!tensor_operands(warp, i, lane, map_address, &map, coordinates)) return;
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

// Executes cp.async.bulk and cp.reduce.async.bulk to global memory: [to], [from], bytes
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

// Finishes the groups of each lane but the last `pending`: they are read, and with `whole` written,
// too.
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

}  // namespace

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

void add_bulk_stores(Operations& table) {
  for (int rank = 1; rank <= 5; ++rank) {
    const std::string dims = std::to_string(rank) + "d";
    table["cp.async.bulk.tensor." + dims + ".global.shared::cta.bulk_group"] = {
        "c a", tensor_store<false>, Class::kAsyncCopy};
    table["cp.reduce.async.bulk.tensor." + dims + ".global.shared::cta.add.bulk_group"] = {
        "c a", tensor_store<true>, Class::kAsyncCopy};
  }
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

}  // namespace fk::softgpu
