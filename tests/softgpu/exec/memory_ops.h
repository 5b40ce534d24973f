// Loads, stores and atomics of all memories.
#pragma once

#include "check/access.h"
#include "check/race_hooks.h"
#include "exec/integer.h"
#include "exec/small_floats.h"

namespace fk::softgpu::SOFTGPU_TARGET {

// The addresses of the lanes; those that do not take part get one of a lane that does.
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

// Where the first lane to take part has what nobody else has: see below.
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

// The lanes that may go on. Afterwards the addresses of all lanes can be loaded from.
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
template <Access kAccess, bool kCluster = false>
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
  if (block.races) {
    note_shared(warp, lanes, addresses, bytes,
                kAccess == Access::kLoad    ? Kind::kRead
                : kAccess == Access::kStore ? Kind::kWrite
                                            : Kind::kAtomic);
  }
  return lanes;
}

// The registers of an instruction with one of them or a vector.
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
template <class T, class R, int kCount, bool kCluster>
void load_shared(Warp& warp, const Instruction& i, uint32_t lanes) {
  alignas(64) uint32_t addresses[kLanes];
  alignas(64) uint64_t pointers[kLanes];
  narrow_addresses_of(warp, i, 1, i.immediate, lanes, addresses);
  lanes = prepare_shared<Access::kLoad, kCluster>(warp, lanes, addresses, sizeof(T) * kCount,
                                                  pointers, i.used_bytes);
  if (lanes != 0) load_lanes<T, R, kCount>(warp, i, lanes, pointers);
}
template <class T, int kCount, bool kCluster, class K = Kept<T>>
void store_shared(Warp& warp, const Instruction& i, uint32_t lanes) {
  alignas(64) uint32_t addresses[kLanes];
  alignas(64) uint64_t pointers[kLanes];
  narrow_addresses_of(warp, i, 0, i.immediate, lanes, addresses);
  lanes = prepare_shared<Access::kStore, kCluster>(warp, lanes, addresses, sizeof(T) * kCount,
                                                   pointers);
  if (lanes != 0) store_lanes<T, kCount, K>(warp, i, lanes, pointers);
}

// Parameters: mostly the same address for all lanes.
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

// Generic addresses: shared memory has a window of its own.
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
// load again and again is no progress.
inline void give_way(Warp& warp, const Instruction& i, uint32_t lanes) {
  const uint64_t key = lanes_at<uint64_t>(warp, i.at[1])[first_lane(lanes)] + warp.pc;
  if (key != warp.last_yield) warp.block->changed = true;
  warp.last_yield = key;
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

// One lane after the other. With a result: atom, whose address is operand 1; without: red.
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
// atom.cas: operands are the result, the address, what must be there, the new value.
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

// All loads and stores of a type and a count, with what may stand between "ld" and the type.
template <class T, class R, int kCount>
void add_memory(Operations& table, const std::string& type) {
  const std::string count = kCount == 1 ? "" : ".v" + std::to_string(kCount);
  const std::string end = count + "." + type;
  const std::string load = kCount == 1 ? "=" + letter<R>() + " a" : "=v a";
  const std::string store = kCount == 1 ? "a " + letter<R>() : "a v";
  const auto add = [&](const std::string& name, Execute execute, bool is_store, Class kind,
                       Control control = Control::kNone) {
    table[name + end] = {is_store ? store : load, execute, kind, control};
  };
  constexpr Execute kLoad = load_global<T, R, kCount>;
  constexpr Execute kStore = store_global<T, kCount>;
  for (const char* hint : {"", ".nc", ".cg", ".ca", ".cs", ".lu", ".L1::no_allocate",
                           ".nc.L1::no_allocate", ".L1::evict_last", ".nc.L1::evict_last"}) {
    add(std::string("ld.global") + hint, kLoad, false, Class::kLoadGlobal);
  }
  for (const char* hint : {"", ".cg", ".cs", ".wb", ".wt", ".L1::no_allocate"}) {
    add(std::string("st.global") + hint, kStore, true, Class::kStoreGlobal);
  }
  constexpr Execute kLoadStrong = and_yield<load_global<T, R, kCount, true>>;
  constexpr Execute kStoreStrong = store_global<T, kCount, true>;
  for (const char* order : {"volatile", "relaxed.gpu", "acquire.gpu"}) {
    add(std::string("ld.") + order + ".global", kLoadStrong, false, Class::kLoadGlobal,
        Control::kMayYield);
  }
  for (const char* order : {"volatile", "relaxed.gpu", "release.gpu"}) {
    add(std::string("st.") + order + ".global", kStoreStrong, true, Class::kStoreGlobal);
  }
  constexpr Execute kLoadShared = load_shared<T, R, kCount, false>;
  constexpr Execute kLoadCluster = load_shared<T, R, kCount, true>;
  add("ld.shared", kLoadShared, false, Class::kLoadShared);
  add("ld.volatile.shared", kLoadShared, false, Class::kLoadShared);
  add("ld.shared::cta", kLoadShared, false, Class::kLoadShared);
  add("ld.shared::cluster", kLoadCluster, false, Class::kLoadShared);
  constexpr Execute kStoreShared = store_shared<T, kCount, false>;
  constexpr Execute kStoreCluster = store_shared<T, kCount, true>;
  add("st.shared", kStoreShared, true, Class::kStoreShared);
  add("st.volatile.shared", kStoreShared, true, Class::kStoreShared);
  add("st.shared::cta", kStoreShared, true, Class::kStoreShared);
  add("st.shared::cluster", kStoreCluster, true, Class::kStoreShared);
  add("ld.param", load_parameter<T, R, kCount>, false, Class::kLoadParameter);
  add("ld.const", kLoad, false, Class::kLoadParameter);
  add("ld", load_generic<T, R, kCount>, false, Class::kLoadGlobal);
  add("st", store_generic<T, kCount>, true, Class::kStoreGlobal);
}
template <class T, class R>
void add_memory_type(Operations& table, const std::string& type) {
  add_memory<T, R, 1>(table, type);
  add_memory<T, R, 2>(table, type);
  if constexpr (sizeof(T) <= 4) add_memory<T, R, 4>(table, type);
}

// Words from and to registers of 64 bits: the decoder asks for these by name.
template <class T, class R>
void add_wide_memory(Operations& table, const std::string& type) {
  const std::string end = "." + type + " wide";
  for (const char* hint : {"", ".nc", ".cs", ".cg"}) {
    table[std::string("ld.global") + hint + end] = {"=q a", load_global<T, R, 1>,
                                                    Class::kLoadGlobal};
  }
  table["ld" + end] = {"=q a", load_generic<T, R, 1>, Class::kLoadGlobal};
  table["ld.param" + end] = {"=q a", load_parameter<T, R, 1>, Class::kLoadParameter};
  table["st.global" + end] = {"a q", store_global<T, 1, false, uint64_t>, Class::kStoreGlobal};
  for (const char* way : {"", ".volatile"}) {
    table[std::string("ld") + way + ".shared" + end] = {"=q a", load_shared<T, R, 1, false>,
                                                        Class::kLoadShared};
    table[std::string("st") + way + ".shared" + end] = {"a q", store_shared<T, 1, false, uint64_t>,
                                                        Class::kStoreShared};
  }
}

template <class T, class Operation>
void add_atomic(Operations& table, const std::string& operation, const std::string& type) {
  const std::string l = letter<T>();
  for (const char* order : {"", ".relaxed.gpu", ".release.gpu", ".acq_rel.gpu"}) {
    const std::string atom = std::string("atom") + order, red = std::string("red") + order;
    table[atom + ".global." + operation + "." + type] = {
        "=" + l + " a " + l, update_global<T, Operation, true, 1>, Class::kAtomic};
    table[red + ".global." + operation + "." + type] = {
        "a " + l, update_global<T, Operation, false, 1>, Class::kAtomic};
  }
  table["atom.shared." + operation + "." + type] = {
      "=" + l + " a " + l, update_shared<T, Operation, true, 1>, Class::kAtomic};
  table["red.shared." + operation + "." + type] = {"a " + l, update_shared<T, Operation, false, 1>,
                                                   Class::kAtomic};
}

inline void add_memory_operations(Operations& table) {
  add_memory_type<uint8_t, uint32_t>(table, "u8");
  add_memory_type<uint8_t, uint32_t>(table, "b8");
  add_memory_type<int8_t, int32_t>(table, "s8");
  add_memory_type<uint16_t, uint32_t>(table, "u16");
  add_memory_type<uint16_t, uint32_t>(table, "b16");
  add_memory_type<int16_t, int32_t>(table, "s16");
  add_memory_type<uint32_t, uint32_t>(table, "u32");
  add_memory_type<uint32_t, uint32_t>(table, "b32");
  add_memory_type<uint32_t, uint32_t>(table, "s32");
  add_memory_type<uint32_t, uint32_t>(table, "f32");
  add_wide_memory<uint32_t, uint64_t>(table, "u32");
  add_wide_memory<uint32_t, uint64_t>(table, "b32");
  add_wide_memory<int32_t, int64_t>(table, "s32");
  add_wide_memory<uint16_t, uint64_t>(table, "u16");
  add_wide_memory<int16_t, int64_t>(table, "s16");
  for (const char* type : {"u64", "b64", "s64", "f64"}) {
    add_memory_type<uint64_t, uint64_t>(table, type);
  }
  add_atomic<float, AtomicAdd>(table, "add", "f32");
  add_atomic<double, AtomicAdd>(table, "add", "f64");
  add_atomic<uint32_t, AtomicAdd>(table, "add", "u32");
  add_atomic<int32_t, AtomicAdd>(table, "add", "s32");
  add_atomic<uint64_t, AtomicAdd>(table, "add", "u64");
  add_atomic<uint32_t, AtomicMaximum>(table, "max", "u32");
  add_atomic<int32_t, AtomicMaximum>(table, "max", "s32");
  add_atomic<uint32_t, AtomicMinimum>(table, "min", "u32");
  add_atomic<int32_t, AtomicMinimum>(table, "min", "s32");
  add_atomic<uint32_t, AtomicOr>(table, "or", "b32");
  add_atomic<uint32_t, AtomicAnd>(table, "and", "b32");
  add_atomic<uint32_t, AtomicExchange>(table, "exch", "b32");
  for (const char* order : {"", ".relaxed.gpu"}) {
    table[std::string("red") + order + ".global.add.v4.f32"] = {
        "a v", update_global<float, AtomicAdd, false, 4>, Class::kAtomic};
    table[std::string("red") + order + ".global.v4.f32.add"] =
        table[std::string("red") + order + ".global.add.v4.f32"];
    table[std::string("red") + order + ".global.add.v2.f32"] = {
        "a v", update_global<float, AtomicAdd, false, 2>, Class::kAtomic};
  }
  table["atom.global.cas.b32"] = {"=r a r r", compare_and_swap<uint32_t>, Class::kAtomic,
                                  Control::kMayYield};
  table["atom.global.cas.b64"] = {"=q a q q", compare_and_swap<uint64_t>, Class::kAtomic,
                                  Control::kMayYield};
  // Addresses change their space by their window alone.
  for (const char* space : {"global", "param", "const", "local"}) {
    table[std::string("cvta.to.") + space + ".u64"] = {"=q q", move<uint64_t>, Class::kInteger};
    table[std::string("cvta.") + space + ".u64"] = {"=q q", move<uint64_t>, Class::kInteger};
  }
  table["cvta.to.shared.u64"] = {
      "=q q", SOFTGPU_UNARY(uint64_t, uint64_t, static_cast<uint32_t>(a)), Class::kInteger};
  table["cvta.shared.u64"] = {
      "=q q", SOFTGPU_UNARY(uint64_t, uint64_t, kSharedWindow | static_cast<uint32_t>(a)),
      Class::kInteger};
  for (const char* name :
       {"prefetch.global.L2", "prefetch.global.L1", "prefetch.tensormap", "prefetchu.L1"}) {
    table[name] = {"a", [](Warp&, const Instruction&, uint32_t) {}, Class::kOther};
  }
}

}  // namespace fk::softgpu::SOFTGPU_TARGET
