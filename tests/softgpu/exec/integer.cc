// This file executes integer arithmetic, logic, moves, comparisons and conversions among integers.
#include "exec/elementwise.h"
#include "exec/tables.h"

namespace fk::softgpu {

namespace {

template <class T>
T divide(T a, T b) {
  if (b == 0) return static_cast<T>(-1);
  if constexpr (std::is_signed_v<T>) {
    if (b == -1) return static_cast<T>(0 - static_cast<std::make_unsigned_t<T>>(a));
  }
  return static_cast<T>(a / b);
}
template <class T>
T remainder(T a, T b) {
  if (b == 0) return a;
  if constexpr (std::is_signed_v<T>) {
    if (b == -1) return 0;
  }
  return static_cast<T>(a % b);
}
template <class T>
T multiply_high(T a, T b) {
  using Wide =
      std::conditional_t<sizeof(T) == 8,
                         std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
                         std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;
  return static_cast<T>((static_cast<Wide>(a) * static_cast<Wide>(b)) >> (8 * sizeof(T)));
}

template <class U>
U shift_left(U a, uint32_t n) {
  return n >= 8 * sizeof(U) ? U{0} : static_cast<U>(a << (n & (8 * sizeof(U) - 1)));
}
template <class T>
T shift_right(T a, uint32_t n) {
  constexpr uint32_t kBits = 8 * sizeof(T);
  if constexpr (std::is_signed_v<T>) return static_cast<T>(a >> (n < kBits ? n : kBits - 1));
  return n >= kBits ? T{0} : static_cast<T>(a >> (n & (kBits - 1)));
}

template <class T>
T insert_bits(T a, T b, uint32_t position, uint32_t length) {
  constexpr uint32_t kBits = 8 * sizeof(T);
  position &= 255;
  length &= 255;
  if (position >= kBits || length == 0) return b;
  const T mask = static_cast<T>((length >= kBits ? ~T{0} : (T{1} << length) - 1) << position);
  return (b & ~mask) | ((a << position) & mask);
}
template <class T>
T extract_bits(T a, uint32_t position, uint32_t length) {
  constexpr uint32_t kBits = 8 * sizeof(T);
  position &= 255;
  length &= 255;
  using U = std::make_unsigned_t<T>;
  U result = 0;
  const U bits = static_cast<U>(a);
  const bool sign = std::is_signed_v<T> && length != 0 &&
                    ((bits >> std::min(position + length - 1, kBits - 1)) & 1);
  for (uint32_t i = 0; i < kBits; ++i) {
    const bool bit = i < length && position + i < kBits ? (bits >> (position + i)) & 1 : sign;
    if (bit) result |= U{1} << i;
  }
  return static_cast<T>(result);
}

inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = a | (static_cast<uint64_t>(b) << 32);
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t s = (selector >> (4 * i)) & 15;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (s & 7))) & 255;
    if (s & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}
inline uint32_t reverse_bits(uint32_t x) {
  x = ((x >> 1) & 0x55555555) | ((x & 0x55555555) << 1);
  x = ((x >> 2) & 0x33333333) | ((x & 0x33333333) << 2);
  x = ((x >> 4) & 0x0f0f0f0f) | ((x & 0x0f0f0f0f) << 4);
  return __builtin_bswap32(x);
}
inline uint32_t dot_two(uint32_t a, uint32_t b, uint32_t c) {
  return c + (a & 0xffff) * (b & 0xff) + (a >> 16) * ((b >> 8) & 0xff);
}

template <class T>
void add_integer_type(Operations& table, const std::string& type, bool is_bits) {
  using U = std::make_unsigned_t<T>;
  const std::string l = letter<T>(), two = "=" + l + " " + l + " " + l;
  const auto add = [&](const std::string& name, const std::string& operands, Execute execute) {
    table[name + "." + type] = {operands, execute, Class::kInteger};
  };
  if (is_bits) {
    add("and", two, SOFTGPU_BINARY(U, U, U, a & b));
    add("or", two, SOFTGPU_BINARY(U, U, U, a | b));
    add("xor", two, SOFTGPU_BINARY(U, U, U, a ^ b));
    add("not", "=" + l + " " + l, SOFTGPU_UNARY(U, U, ~a));
    add("shl", "=" + l + " " + l + " r", SOFTGPU_BINARY(U, U, uint32_t, shift_left<U>(a, b)));
    add("shr", "=" + l + " " + l + " r", SOFTGPU_BINARY(U, U, uint32_t, shift_right<U>(a, b)));
    return;
  }
  add("add", two, SOFTGPU_BINARY(U, U, U, a + b));
  add("sub", two, SOFTGPU_BINARY(U, U, U, a - b));
  add("mul.lo", two, SOFTGPU_BINARY(U, U, U, static_cast<uint64_t>(a) * b));
  add("mul.hi", two, SOFTGPU_BINARY(T, T, T, multiply_high<T>(a, b)));
  add("mad.lo", two + " " + l, SOFTGPU_TERNARY(U, U, U, U, static_cast<uint64_t>(a) * b + c));
  add("mad.hi", two + " " + l,
      SOFTGPU_TERNARY(U, T, T, U, static_cast<U>(multiply_high<T>(a, b)) + c));
  add("div", two, SOFTGPU_BINARY(T, T, T, divide<T>(a, b)));
  add("rem", two, SOFTGPU_BINARY(T, T, T, remainder<T>(a, b)));
  add("min", two, SOFTGPU_BINARY(T, T, T, a < b ? a : b));
  add("max", two, SOFTGPU_BINARY(T, T, T, a < b ? b : a));
  add("abs", "=" + l + " " + l,
      SOFTGPU_UNARY(U, T, a < 0 ? U{0} - static_cast<U>(a) : static_cast<U>(a)));
  add("neg", "=" + l + " " + l, SOFTGPU_UNARY(U, U, U{0} - a));
  add("shr", "=" + l + " " + l + " r", SOFTGPU_BINARY(T, T, uint32_t, shift_right<T>(a, b)));
  if constexpr (sizeof(T) <= 4) {
    using Wide = std::conditional_t<sizeof(T) == 4,
                                    std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                                    std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>>;
    const std::string w = letter<Wide>();
    add("mul.wide", "=" + w + " " + l + " " + l,
        SOFTGPU_BINARY(Wide, T, T, static_cast<Wide>(a) * static_cast<Wide>(b)));
    add("mad.wide", "=" + w + " " + l + " " + l + " " + w,
        SOFTGPU_TERNARY(Wide, T, T, Wide, static_cast<Wide>(a) * static_cast<Wide>(b) + c));
  }
}

template <class T>
void add_comparisons(Operations& table, const std::string& type) {
  const std::string operands = "=p " + letter<T>() + " " + letter<T>();
  const auto add = [&](const char* name, Execute execute) {
    table[std::string("setp.") + name + "." + type] = {operands, execute, Class::kCompare};
  };
  add("eq", SOFTGPU_COMPARE(T, a == b));
  add("ne", SOFTGPU_COMPARE(T, a != b));
  add("lt", SOFTGPU_COMPARE(T, a < b));
  add("le", SOFTGPU_COMPARE(T, a <= b));
  add("gt", SOFTGPU_COMPARE(T, a > b));
  add("ge", SOFTGPU_COMPARE(T, a >= b));
  if constexpr (std::is_unsigned_v<T>) {  // lo, ls, hi and hs are the unsigned ones
    add("lo", SOFTGPU_COMPARE(T, a < b));
    add("ls", SOFTGPU_COMPARE(T, a <= b));
    add("hi", SOFTGPU_COMPARE(T, a > b));
    add("hs", SOFTGPU_COMPARE(T, a >= b));
  }
}

template <class K>
void select_lanes(Warp& warp, const Instruction& i, uint32_t lanes) {
  const K* a = lanes_at<K>(warp, i.at[1]);
  const K* b = lanes_at<K>(warp, i.at[2]);
  const uint32_t chosen = predicate(warp, i, 3);
  alignas(64) K result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = has(chosen, l) ? a[l] : b[l];
  put(lanes_to<K>(warp, i.at[0]), result, lanes);
}

// Executes mov.b32 {a, b}, c and the like: `Part` and `Whole` are the kept types of registers,
// kBits the bits of a part.
template <class Part, class Whole, int kBits>
void unpack(Warp& warp, const Instruction& i, uint32_t lanes) {
  const Whole* whole = lanes_at<Whole>(warp, i.at[1]);
  Whole kept[kLanes];
  std::memcpy(kept, whole, sizeof kept);
  for (int part = 0; part < i.list_size; ++part) {
    const Place place = warp.run->program->lists[i.list + static_cast<uint32_t>(part)];
    if (place == kNoPlace) continue;
    alignas(64) Part result[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      constexpr Whole kMask = (Whole{1} << kBits) - 1;
      result[l] = static_cast<Part>((kept[l] >> (kBits * part)) & kMask);
    }
    put(lanes_to<Part>(warp, place), result, lanes);
  }
}
template <class Part, class Whole, int kBits>
void pack(Warp& warp, const Instruction& i, uint32_t lanes) {
  alignas(64) Whole result[kLanes] = {};
  for (int part = 0; part < i.list_size; ++part) {
    const Part* from =
        lanes_at<Part>(warp, warp.run->program->lists[i.list + static_cast<uint32_t>(part)]);
    for (int l = 0; l < kLanes; ++l) {
      // The rest of a register that was never written is not zero.
      constexpr Whole kMask = (Whole{1} << kBits) - 1;
      result[l] |= (static_cast<Whole>(from[l]) & kMask) << (kBits * part);
    }
  }
  put(lanes_to<Whole>(warp, i.at[0]), result, lanes);
}

template <class D, class S>
void convert_integer(Warp& warp, const Instruction& i, uint32_t lanes) {
  unary<D, S>(warp, i, lanes, [](S a) { return static_cast<D>(a); });
}

// cvt to an 8-bit type leaves the number extended to the register's width.
template <class S>
void add_integer_conversions(Operations& table, const std::string& source) {
  const auto add = [&](const std::string& to, const std::string& d, Execute execute) {
    table["cvt." + to + "." + source] = {"=" + d + " " + letter<S>(), execute, Class::kConvert};
  };
  add("u16", "h", convert_integer<uint16_t, S>);
  add("s16", "h", convert_integer<uint16_t, S>);
  add("u32", "r", convert_integer<uint32_t, S>);
  add("s32", "r", convert_integer<int32_t, S>);
  add("u64", "q", convert_integer<uint64_t, S>);
  add("s64", "q", convert_integer<int64_t, S>);
  add("u8", "r", SOFTGPU_UNARY(uint32_t, S, static_cast<uint8_t>(a)));
  add("s8", "r", SOFTGPU_UNARY(int32_t, S, static_cast<int8_t>(a)));
}

// Adds conversions from 32 bits whose source is a register of 64: the decoder asks for them by
// name.
template <class S>
void add_wide_conversions(Operations& table, const std::string& source) {
  const std::string end = "64." + source + " wide";
  table["cvt.s" + end] = {"=q q",
                          SOFTGPU_UNARY(int64_t, uint64_t, static_cast<int64_t>(static_cast<S>(a))),
                          Class::kConvert};
  table["cvt.u" + end] = {
      "=q q", SOFTGPU_UNARY(uint64_t, uint64_t, static_cast<uint64_t>(static_cast<S>(a))),
      Class::kConvert};
}

}  // namespace

void add_integer_operations(Operations& table) {
  add_wide_conversions<int32_t>(table, "s32");
  add_wide_conversions<uint32_t>(table, "u32");
  add_integer_type<int16_t>(table, "s16", false);
  add_integer_type<uint16_t>(table, "u16", false);
  add_integer_type<int32_t>(table, "s32", false);
  add_integer_type<uint32_t>(table, "u32", false);
  add_integer_type<int64_t>(table, "s64", false);
  add_integer_type<uint64_t>(table, "u64", false);
  add_integer_type<uint16_t>(table, "b16", true);
  add_integer_type<uint32_t>(table, "b32", true);
  add_integer_type<uint64_t>(table, "b64", true);
  add_comparisons<int16_t>(table, "s16");
  add_comparisons<uint16_t>(table, "u16");
  add_comparisons<uint16_t>(table, "b16");
  add_comparisons<int32_t>(table, "s32");
  add_comparisons<uint32_t>(table, "u32");
  add_comparisons<uint32_t>(table, "b32");
  add_comparisons<int64_t>(table, "s64");
  add_comparisons<uint64_t>(table, "u64");
  add_comparisons<uint64_t>(table, "b64");
  add_integer_conversions<int8_t>(table, "s8");
  add_integer_conversions<uint8_t>(table, "u8");
  add_integer_conversions<int16_t>(table, "s16");
  add_integer_conversions<uint16_t>(table, "u16");
  add_integer_conversions<int32_t>(table, "s32");
  add_integer_conversions<uint32_t>(table, "u32");
  add_integer_conversions<int64_t>(table, "s64");
  add_integer_conversions<uint64_t>(table, "u64");
  for (const char* type : {"b32", "u32", "s32", "f32"}) {
    table[std::string("mov.") + type] = {"=r r", move<uint32_t>, Class::kMove};
    table[std::string("selp.") + type] = {"=r r r p", select_lanes<uint32_t>, Class::kMove};
  }
  for (const char* type : {"b16", "u16", "s16", "f16"}) {
    table[std::string("mov.") + type] = {"=h h", move<uint32_t>, Class::kMove};
    table[std::string("selp.") + type] = {"=h h h p", select_lanes<uint32_t>, Class::kMove};
  }
  for (const char* type : {"b64", "u64", "s64", "f64"}) {
    table[std::string("mov.") + type] = {"=q q", move<uint64_t>, Class::kMove};
    table[std::string("selp.") + type] = {"=q q q p", select_lanes<uint64_t>, Class::kMove};
  }
  // These have a vector on one side; the decoder asks for them by name.
  table["mov.b32 unpack"] = {"=v r", unpack<uint32_t, uint32_t, 16>, Class::kMove};
  table["mov.b32 pack"] = {"=r v", pack<uint32_t, uint32_t, 16>, Class::kMove};
  table["mov.b64 unpack"] = {"=v q", unpack<uint32_t, uint64_t, 32>, Class::kMove};
  table["mov.b64 pack"] = {"=q v", pack<uint32_t, uint64_t, 32>, Class::kMove};
  table["mov.b64 unpack 4"] = {"=v q", unpack<uint32_t, uint64_t, 16>, Class::kMove};
  table["mov.b64 pack 4"] = {"=q v", pack<uint32_t, uint64_t, 16>, Class::kMove};
  for (const char* type : {"b32", "u32", "s32"}) {
    table[std::string("bfi.") + type] = {"=r r r r r",
                                         [](Warp& w, const Instruction& i, uint32_t m) {
                                           const auto* e = lanes_at(w, i.at[4]);
                                           int l = 0;
                                           ternary<uint32_t, uint32_t, uint32_t, uint32_t>(
                                               w, i, m, [&](uint32_t a, uint32_t b, uint32_t c) {
                                                 return insert_bits<uint32_t>(a, b, c, e[l++]);
                                               });
                                         },
                                         Class::kInteger};
  }
  table["bfi.b64"] = {"=q q q r r",
                      [](Warp& w, const Instruction& i, uint32_t m) {
                        const auto* e = lanes_at(w, i.at[4]);
                        int l = 0;
                        ternary<uint64_t, uint64_t, uint64_t, uint32_t>(
                            w, i, m, [&](uint64_t a, uint64_t b, uint32_t c) {
                              return insert_bits<uint64_t>(a, b, c, e[l++]);
                            });
                      },
                      Class::kInteger};
  const auto add = [&](const char* name, const char* operands, Execute execute) {
    table[name] = {operands, execute, Class::kInteger};
  };
  add("bfe.u32", "=r r r r",
      SOFTGPU_TERNARY(uint32_t, uint32_t, uint32_t, uint32_t, extract_bits<uint32_t>(a, b, c)));
  add("bfe.s32", "=r r r r",
      SOFTGPU_TERNARY(int32_t, int32_t, uint32_t, uint32_t, extract_bits<int32_t>(a, b, c)));
  add("bfe.u64", "=q q r r",
      SOFTGPU_TERNARY(uint64_t, uint64_t, uint32_t, uint32_t, extract_bits<uint64_t>(a, b, c)));
  add("bfe.s64", "=q q r r",
      SOFTGPU_TERNARY(int64_t, int64_t, uint32_t, uint32_t, extract_bits<int64_t>(a, b, c)));
  add("prmt.b32", "=r r r r",
      SOFTGPU_TERNARY(uint32_t, uint32_t, uint32_t, uint32_t, permute(a, b, c)));
  add("brev.b32", "=r r", SOFTGPU_UNARY(uint32_t, uint32_t, reverse_bits(a)));
  add("popc.b32", "=r r", SOFTGPU_UNARY(uint32_t, uint32_t, __builtin_popcount(a)));
  add("popc.b64", "=r q", SOFTGPU_UNARY(uint32_t, uint64_t, __builtin_popcountll(a)));
  add("clz.b32", "=r r", SOFTGPU_UNARY(uint32_t, uint32_t, a ? __builtin_clz(a) : 32));
  add("clz.b64", "=r q", SOFTGPU_UNARY(uint32_t, uint64_t, a ? __builtin_clzll(a) : 64));
  add("bfind.u32", "=r r", SOFTGPU_UNARY(uint32_t, uint32_t, a ? 31 - __builtin_clz(a) : -1));
  add("bfind.shiftamt.u32", "=r r", SOFTGPU_UNARY(uint32_t, uint32_t, a ? __builtin_clz(a) : -1));
  add("dp2a.lo.u32.u32", "=r r r r",
      SOFTGPU_TERNARY(uint32_t, uint32_t, uint32_t, uint32_t, dot_two(a, b, c)));
  add("shf.l.wrap.b32", "=r r r r",
      SOFTGPU_TERNARY(uint32_t, uint32_t, uint32_t, uint32_t,
                      (((static_cast<uint64_t>(b) << 32) | a) << (c & 31)) >> 32));
  add("shf.r.wrap.b32", "=r r r r",
      SOFTGPU_TERNARY(uint32_t, uint32_t, uint32_t, uint32_t,
                      ((static_cast<uint64_t>(b) << 32) | a) >> (c & 31)));
  table["lop3.b32"] = {"=r r r r i",
                       [](Warp& w, const Instruction& i, uint32_t m) {
                         const auto look_up = static_cast<uint32_t>(i.number);
                         ternary<uint32_t, uint32_t, uint32_t, uint32_t>(
                             w, i, m, [&](uint32_t a, uint32_t b, uint32_t c) {
                               uint32_t r = 0;
                               for (uint32_t k = 0; k < 8; ++k) {
                                 if ((look_up >> k) & 1) {
                                   r |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
                                 }
                               }
                               return r;
                             });
                       },
                       Class::kInteger};
  // These work on predicates.
  const auto logic = [&](const char* name, const char* operands, Execute execute) {
    table[name] = {operands, execute, Class::kCompare};
  };
  logic("and.pred", "=p p p", [](Warp& w, const Instruction& i, uint32_t m) {
    put_predicate(w, i.at[0], predicate(w, i, 1) & predicate(w, i, 2), m);
  });
  logic("or.pred", "=p p p", [](Warp& w, const Instruction& i, uint32_t m) {
    put_predicate(w, i.at[0], predicate(w, i, 1) | predicate(w, i, 2), m);
  });
  logic("xor.pred", "=p p p", [](Warp& w, const Instruction& i, uint32_t m) {
    put_predicate(w, i.at[0], predicate(w, i, 1) ^ predicate(w, i, 2), m);
  });
  logic("not.pred", "=p p", [](Warp& w, const Instruction& i, uint32_t m) {
    put_predicate(w, i.at[0], ~predicate(w, i, 1), m);
  });
  logic("mov.pred", "=p p", [](Warp& w, const Instruction& i, uint32_t m) {
    put_predicate(w, i.at[0], predicate(w, i, 1), m);
  });
}

}  // namespace fk::softgpu
