// Loads, stores and atomics of all memories.
#pragma once

#include "check/access.h"
#include "check/race_hooks.h"
#include "exec/elementwise.h"
#include "exec/small_floats.h"

namespace fk::softgpu {

// Writes the addresses of the lanes; those that do not take part get one of a lane that does.
inline void addresses_of(const Warp& warp, const Instruction& i, int operand, int64_t offset,
                         uint32_t lanes, uint64_t* addresses) {
  if ((i.wide_address >> operand) & 1) {
    const uint64_t* base = lanes_at<uint64_t>(warp, i.at[operand]);
    const uint64_t any = base[first_lane(lanes)];
    for (int l = 0; l < kLanes; ++l) {
      addresses[l] = (has(lanes, l) ? base[l] : any) + static_cast<uint64_t>(offset);
    }
  } else {
    const uint32_t* base = lanes_at(warp, i.at[operand]);
    const uint32_t any = base[first_lane(lanes)];
    for (int l = 0; l < kLanes; ++l) {
      addresses[l] =
          static_cast<uint32_t>((has(lanes, l) ? base[l] : any) + static_cast<uint32_t>(offset));
    }
  }
}
inline void narrow_addresses_of(const Warp& warp, const Instruction& i, int operand, int64_t offset,
                                uint32_t lanes, uint32_t* addresses) {
  if ((i.wide_address >> operand) & 1) {
    uint64_t wide[kLanes];
    addresses_of(warp, i, operand, offset, lanes, wide);
    for (int l = 0; l < kLanes; ++l) addresses[l] = static_cast<uint32_t>(wide[l]);
  } else {
    const uint32_t* base = lanes_at(warp, i.at[operand]);
    const uint32_t any = base[first_lane(lanes)];
    for (int l = 0; l < kLanes; ++l) {
      addresses[l] = (has(lanes, l) ? base[l] : any) + static_cast<uint32_t>(offset);
    }
  }
}

// Gives the lanes that take no part the pointer of the first that does, so that all can be loaded
// from.
inline void fill_others(uint64_t* pointers, uint32_t lanes) {
  const uint64_t any = pointers[first_lane(lanes)];
  for (int l = 0; l < kLanes; ++l) pointers[l] = has(lanes, l) ? pointers[l] : any;
}

enum class Access { kLoad, kStore, kAtomic };

inline void count_global(Warp& warp, const uint64_t* addresses, uint32_t lanes, uint32_t bytes,
                         Access access) {
  MemoryCounts& counts = warp.run->counts;
  const uint64_t asked =
      static_cast<uint64_t>(bytes) * static_cast<uint32_t>(__builtin_popcount(lanes));
  if (access == Access::kAtomic) {
    counts.atomic_bytes += asked;
  } else {
    const uint32_t sectors = count_sectors(addresses, lanes);
    (access == Access::kLoad ? counts.load_bytes : counts.store_bytes) += asked;
    (access == Access::kLoad ? counts.load_requests : counts.store_requests) += 1;
    (access == Access::kLoad ? counts.load_sectors : counts.store_sectors) += sectors;
  }
  warp.run->touched->add(addresses, lanes);
}

// Returns the lanes that may go on. Afterwards the addresses of all lanes can be loaded from.
template <Access kAccess, Kind kKind>
inline uint32_t prepare_global(Warp& warp, uint32_t lanes, uint64_t* addresses, uint32_t bytes) {
  uint64_t low = ~uint64_t{0}, high = 0, all = 0;
  for (int l = 0; l < kLanes; ++l) {
    low = addresses[l] < low ? addresses[l] : low;
    high = addresses[l] > high ? addresses[l] : high;
    all |= addresses[l];
  }
  const KnownRange& known = warp.run->known[warp.pc];
  if (__builtin_expect((all & (bytes - 1)) != 0 || low < known.begin || high + bytes > known.end ||
                           (kAccess != Access::kLoad && !known.writable),
                       0)) {
    lanes = check_global(warp, lanes, addresses, bytes, kAccess != Access::kLoad);
    if (lanes == 0) return 0;
    fill_others(addresses, lanes);
  }
  if (warp.run->launch->early && !warp.waited_for_grid) report_early(warp, lanes, addresses);
  if (warp.run->count_memory) count_global(warp, addresses, lanes, bytes, kAccess);
  if (warp.run->global_races) note_global(warp, lanes, addresses, bytes, kKind);
  return lanes;
}

inline void count_shared(Warp& warp, const uint32_t* addresses, uint32_t lanes, uint32_t bytes,
                         bool store) {
  MemoryCounts& counts = warp.run->counts;
  const uint64_t asked =
      static_cast<uint64_t>(bytes) * static_cast<uint32_t>(__builtin_popcount(lanes));
  const Wavefronts wavefronts = count_wavefronts(addresses, lanes, bytes);
  (store ? counts.shared_store_bytes : counts.shared_load_bytes) += asked;
  (store ? counts.shared_store_wavefronts : counts.shared_load_wavefronts) += wavefronts.taken;
  (store ? counts.shared_store_conflicts : counts.shared_load_conflicts) +=
      wavefronts.taken - wavefronts.least;
}

// Turns addresses into pointers; the lanes that may go on.
// A strong load (volatile) and an atomic do not race. Without kNote the race checks are not told.
template <Access kAccess, bool kCluster = false, bool kStrong = false, bool kNote = true>
inline uint32_t prepare_shared(Warp& warp, uint32_t lanes, const uint32_t* addresses,
                               uint32_t bytes, uint64_t* pointers, uint32_t used = ~0u) {
  Block& block = *warp.block;
  uint32_t low = ~0u, high = 0, all = 0;
  for (int l = 0; l < kLanes; ++l) {
    low = addresses[l] < low ? addresses[l] : low;
    high = addresses[l] > high ? addresses[l] : high;
    all |= addresses[l];
  }
  const auto base = reinterpret_cast<uint64_t>(block.shared.get());
  if (__builtin_expect(
          (all & (bytes - 1)) == 0 && low >= kSharedBase && high + bytes <= block.shared_end, 1)) {
    for (int l = 0; l < kLanes; ++l) pointers[l] = base + addresses[l];
  } else {
    lanes = check_shared(warp, lanes, addresses, bytes, kCluster, pointers);
    if (lanes == 0) return 0;
    fill_others(pointers, lanes);
  }
  if constexpr (kAccess != Access::kStore) {
    if (block.unreadable != 0 || kCluster) {
      check_readable(warp, lanes, addresses, used & ((bytes >= 32 ? 0 : 1u << bytes) - 1));
    }
  }
  if constexpr (kAccess != Access::kLoad) {
    if (block.unreadable != 0 || kCluster) {
      for (uint32_t left = lanes; left != 0; left &= left - 1) {
        mark_written(warp, first_lane(left), addresses[first_lane(left)], bytes);
      }
    }
  }
  if (warp.run->count_memory) {
    count_shared(warp, addresses, lanes, bytes, kAccess == Access::kStore);
  }
  if (kNote && block.races) {
    note_shared(warp, lanes, addresses, bytes,
                kAccess == Access::kLoad    ? kStrong ? Kind::kAcquire : Kind::kRead
                : kAccess == Access::kStore ? Kind::kWrite
                                            : Kind::kAtomic);
  }
  return lanes;
}

// Returns register k of an instruction, which has one of them or a vector.
inline Place register_of(const Warp& warp, const Instruction& i, int operand, int k) {
  return i.list_size == 0 ? i.at[operand]
                          : warp.run->program->lists[i.list + static_cast<uint32_t>(k)];
}

// `T` is the type in memory, `R` that of the register.
template <class T, class R, int kCount>
inline void load_lanes(Warp& warp, const Instruction& i, uint32_t lanes, const uint64_t* pointers) {
  using K = Kept<R>;
  alignas(64) K result[kCount][kLanes];
  for (int l = 0; l < kLanes; ++l) {
    T values[kCount];
    std::memcpy(values, reinterpret_cast<const void*>(pointers[l]), sizeof values);
    for (int k = 0; k < kCount; ++k) result[k][l] = to_kept<R>(static_cast<R>(values[k]));
  }
  for (int k = 0; k < kCount; ++k) {
    const Place place = register_of(warp, i, 0, k);
    if (place == kNoPlace) continue;
    if (std::is_signed_v<T> && sizeof(T) < sizeof(R) && i.register_bytes == 2) {
      for (int l = 0; l < kLanes; ++l) result[k][l] &= 0xffff;
    }
    put(lanes_to<K>(warp, place), result[k], lanes);
  }
}

// Returns the lanes whose bytes are in memory already.
template <class T, int kCount, class K = Kept<T>>
inline uint32_t lanes_that_change_nothing(Warp& warp, const Instruction& i, uint32_t lanes,
                                          const uint64_t* pointers) {
  const K* from[kCount];
  for (int k = 0; k < kCount; ++k) from[k] = lanes_at<K>(warp, register_of(warp, i, 1, k));
  uint32_t same = 0;
  for_lanes(lanes, [&](int l) {
    T values[kCount];
    for (int k = 0; k < kCount; ++k) values[k] = from_kept<T>(static_cast<Kept<T>>(from[k][l]));
    const auto* there = reinterpret_cast<const void*>(pointers[l]);
    if (std::memcmp(there, values, sizeof values) == 0) same |= 1u << l;
  });
  return same;
}

// `K` is what the register is kept in: wider than the value where its upper part is left out.
template <class T, int kCount, class K = Kept<T>>
inline void store_lanes(Warp& warp, const Instruction& i, uint32_t lanes,
                        const uint64_t* pointers) {
  const K* from[kCount];
  for (int k = 0; k < kCount; ++k) from[k] = lanes_at<K>(warp, register_of(warp, i, 1, k));
  for (int l = 0; l < kLanes; ++l) {
    if (!has(lanes, l)) continue;
    T values[kCount];
    for (int k = 0; k < kCount; ++k) values[k] = from_kept<T>(static_cast<Kept<T>>(from[k][l]));
    std::memcpy(reinterpret_cast<void*>(pointers[l]), values, sizeof values);
  }
}

template <class T, class R, int kCount, bool kStrong = false>
void load_global(Warp& warp, const Instruction& i, uint32_t lanes) {
  alignas(64) uint64_t addresses[kLanes];
  addresses_of(warp, i, 1, i.immediate, lanes, addresses);
  lanes = prepare_global < Access::kLoad,
  kStrong ? Kind::kAcquire : Kind::kRead > (warp, lanes, addresses, sizeof(T) * kCount);
  if (lanes != 0) load_lanes<T, R, kCount>(warp, i, lanes, addresses);
}
template <class T, int kCount, bool kStrong = false, class K = Kept<T>>
void store_global(Warp& warp, const Instruction& i, uint32_t lanes) {
  alignas(64) uint64_t addresses[kLanes];
  addresses_of(warp, i, 0, i.immediate, lanes, addresses);
  lanes = prepare_global < Access::kStore,
  kStrong ? Kind::kRelease : Kind::kWrite > (warp, lanes, addresses, sizeof(T) * kCount);
  if (lanes != 0) store_lanes<T, kCount, K>(warp, i, lanes, addresses);
}
template <class T, class R, int kCount, bool kCluster, bool kStrong = false>
void load_shared(Warp& warp, const Instruction& i, uint32_t lanes) {
  alignas(64) uint32_t addresses[kLanes];
  alignas(64) uint64_t pointers[kLanes];
  narrow_addresses_of(warp, i, 1, i.immediate, lanes, addresses);
  lanes = prepare_shared<Access::kLoad, kCluster, kStrong>(
      warp, lanes, addresses, sizeof(T) * kCount, pointers, i.used_bytes);
  if (lanes != 0) load_lanes<T, R, kCount>(warp, i, lanes, pointers);
}
template <class T, int kCount, bool kCluster, class K = Kept<T>>
void store_shared(Warp& warp, const Instruction& i, uint32_t lanes) {
  alignas(64) uint32_t addresses[kLanes];
  alignas(64) uint64_t pointers[kLanes];
  narrow_addresses_of(warp, i, 0, i.immediate, lanes, addresses);
  lanes = prepare_shared<Access::kStore, kCluster, false, false>(warp, lanes, addresses,
                                                                 sizeof(T) * kCount, pointers);
  if (lanes == 0) return;
  if (warp.block->races) {
    const uint32_t same = warp.run->options.report_equal_stores
                              ? 0
                              : lanes_that_change_nothing<T, kCount, K>(warp, i, lanes, pointers);
    note_shared(warp, lanes & ~same, addresses, sizeof(T) * kCount, Kind::kWrite);
    note_shared(warp, same, addresses, sizeof(T) * kCount, Kind::kWriteEqual);
  }
  store_lanes<T, kCount, K>(warp, i, lanes, pointers);
}

// Loads parameters: mostly all lanes have the same address.
template <class T, class R, int kCount>
void load_parameter(Warp& warp, const Instruction& i, uint32_t lanes) {
  alignas(64) uint64_t addresses[kLanes];
  addresses_of(warp, i, 1, i.immediate, lanes, addresses);
  const Program& program = *warp.run->program;
  const auto begin = reinterpret_cast<uint64_t>(program.parameters.get());
  uint64_t differs = 0;
  for (int l = 0; l < kLanes; ++l) differs |= addresses[l] ^ addresses[0];
  if (differs == 0 && addresses[0] >= begin &&
      addresses[0] + sizeof(T) * kCount <= begin + program.info.parameter_bytes) {
    T values[kCount];
    std::memcpy(values, reinterpret_cast<const void*>(addresses[0]), sizeof values);
    for (int k = 0; k < kCount; ++k) {
      const Place place = register_of(warp, i, 0, k);
      if (place == kNoPlace) continue;
      Kept<R> kept = to_kept<R>(static_cast<R>(values[k]));
      if (std::is_signed_v<T> && sizeof(T) < sizeof(R) && i.register_bytes == 2) kept &= 0xffff;
      alignas(64) Kept<R> result[kLanes];
      for (int l = 0; l < kLanes; ++l) result[l] = kept;
      put(lanes_to<Kept<R>>(warp, place), result, lanes);
    }
    return;
  }
  lanes = check_global(warp, lanes, addresses, sizeof(T) * kCount, false);
  if (lanes == 0) return;
  fill_others(addresses, lanes);
  load_lanes<T, R, kCount>(warp, i, lanes, addresses);
}

// Returns the lanes whose generic addresses are in the window of shared memory.
inline uint32_t lanes_in_window(const Warp& warp, const Instruction& i, int operand,
                                uint32_t lanes) {
  const uint64_t* base = lanes_at<uint64_t>(warp, i.at[operand]);
  return lanes & mask_of([&](int l) {
           return ((base[l] + static_cast<uint64_t>(i.immediate)) & kSharedWindowMask) ==
                  kSharedWindow;
         });
}
template <class T, class R, int kCount>
void load_generic(Warp& warp, const Instruction& i, uint32_t lanes) {
  const uint32_t shared = lanes_in_window(warp, i, 1, lanes);
  if (shared != 0) load_shared<T, R, kCount, true>(warp, i, shared);
  if (lanes & ~shared) load_global<T, R, kCount>(warp, i, lanes & ~shared);
}
template <class T, int kCount>
void store_generic(Warp& warp, const Instruction& i, uint32_t lanes) {
  const uint32_t shared = lanes_in_window(warp, i, 0, lanes);
  if (shared != 0) store_shared<T, kCount, true>(warp, i, shared);
  if (lanes & ~shared) store_global<T, kCount>(warp, i, lanes & ~shared);
}

// The acquiring and volatile ones may be what a loop waits by: others get their turn. The same
// loads again and again, of which a loop may have a dozen, are no progress. Each that is not new
// sets a bit of last_yield, which begins anew where so many are set that they would tell nothing.
inline void give_way(Warp& warp, const Instruction& i, uint32_t lanes) {
  constexpr int kMost = 32;
  const uint64_t key = lanes_at<uint64_t>(warp, i.at[1])[first_lane(lanes)] + warp.pc;
  const uint64_t bit = uint64_t{1} << (key * 0x9e3779b97f4a7c15u >> 58);
  if ((warp.last_yield & bit) == 0) {
    warp.block->changed = true;
    if (__builtin_popcountll(warp.last_yield) >= kMost) warp.last_yield = 0;
  }
  warp.last_yield |= bit;
  warp.yield = true;
}
template <Execute kExecute>
void and_yield(Warp& warp, const Instruction& i, uint32_t lanes) {
  give_way(warp, i, lanes);
  kExecute(warp, i, lanes);
}
struct AtomicAdd {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      using U = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    } else {
      return a + b;
    }
  }
};
struct AtomicMaximum {
  template <class T>
  static T apply(T a, T b) {
    return a < b ? b : a;
  }
};
struct AtomicMinimum {
  template <class T>
  static T apply(T a, T b) {
    return b < a ? b : a;
  }
};
struct AtomicOr {
  template <class T>
  static T apply(T a, T b) {
    return a | b;
  }
};
struct AtomicAnd {
  template <class T>
  static T apply(T a, T b) {
    return a & b;
  }
};
struct AtomicExchange {
  template <class T>
  static T apply(T, T b) {
    return b;
  }
};

// Runs one lane after the other. With a result this is atom, whose address is operand 1; without,
// it is red.
template <class T, class Operation, bool kResult, int kCount>
inline void update_lanes(Warp& warp, const Instruction& i, uint32_t lanes,
                         const uint64_t* pointers) {
  using K = Kept<T>;
  alignas(64) K before[kLanes] = {};
  for (int k = 0; k < kCount; ++k) {
    const K* with =
        lanes_at<K>(warp, kCount == 1 ? i.at[kResult ? 2 : 1] : register_of(warp, i, 1, k));
    for (int l = 0; l < kLanes; ++l) {
      if (!has(lanes, l)) continue;
      T value;
      auto* pointer = reinterpret_cast<T*>(pointers[l]) + k;
      std::memcpy(&value, pointer, sizeof value);
      before[l] = to_kept<T>(value);
      value = Operation::apply(value, from_kept<T>(with[l]));
      std::memcpy(pointer, &value, sizeof value);
    }
  }
  if constexpr (kResult) put(lanes_to<K>(warp, i.at[0]), before, lanes);
  warp.block->changed = true;
}
template <class T, class Operation, bool kResult, int kCount>
void update_global(Warp& warp, const Instruction& i, uint32_t lanes) {
  alignas(64) uint64_t addresses[kLanes];
  addresses_of(warp, i, kResult ? 1 : 0, i.immediate, lanes, addresses);
  // Without a result nothing is learnt; and sums of floats are for nobody to wait for.
  constexpr Kind kKind = kResult                 ? Kind::kSynchronise
                         : std::is_integral_v<T> ? Kind::kRelease
                                                 : Kind::kAtomic;
  lanes = prepare_global<Access::kAtomic, kKind>(warp, lanes, addresses, sizeof(T) * kCount);
  if (lanes != 0) update_lanes<T, Operation, kResult, kCount>(warp, i, lanes, addresses);
}
template <class T, class Operation, bool kResult, int kCount>
void update_shared(Warp& warp, const Instruction& i, uint32_t lanes) {
  alignas(64) uint32_t addresses[kLanes];
  alignas(64) uint64_t pointers[kLanes];
  narrow_addresses_of(warp, i, kResult ? 1 : 0, i.immediate, lanes, addresses);
  lanes = prepare_shared<Access::kAtomic>(warp, lanes, addresses, sizeof(T) * kCount, pointers);
  if (lanes != 0) update_lanes<T, Operation, kResult, kCount>(warp, i, lanes, pointers);
}
// Executes atom.cas: its operands are the result, the address, what must be there, the new value.
template <class T>
void compare_and_swap(Warp& warp, const Instruction& i, uint32_t lanes) {
  alignas(64) uint64_t addresses[kLanes];
  addresses_of(warp, i, 1, i.immediate, lanes, addresses);
  lanes = prepare_global<Access::kAtomic, Kind::kSynchronise>(warp, lanes, addresses, sizeof(T));
  if (lanes == 0) return;
  const auto* expected = lanes_at<T>(warp, i.at[2]);
  const auto* value = lanes_at<T>(warp, i.at[3]);
  alignas(64) T before[kLanes] = {};
  for (int l = 0; l < kLanes; ++l) {
    if (!has(lanes, l)) continue;
    auto* pointer = reinterpret_cast<T*>(addresses[l]);
    before[l] = *pointer;
    if (before[l] == expected[l]) *pointer = value[l];
  }
  put(lanes_to<T>(warp, i.at[0]), before, lanes);
  warp.yield = true;
  warp.block->changed = true;
}

}  // namespace fk::softgpu
