// This file lists the mnemonics of loads, stores and atomics, and who executes them.
#include "exec/elementwise.h"
#include "exec/memory_ops.h"
#include "exec/tables.h"

namespace fk::softgpu {

namespace {

// Adds all loads and stores of a type and a count, with what may stand between "ld" and the type.
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
  constexpr Execute kLoadSharedStrong = load_shared<T, R, kCount, false, true>;
  add("ld.volatile.shared", kLoadSharedStrong, false, Class::kLoadShared);
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

// Adds loads and stores of words from and to registers of 64 bits: the decoder asks for these by
// name.
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

}  // namespace

void add_memory_operations(Operations& table) {
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

}  // namespace fk::softgpu
