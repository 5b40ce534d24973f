// This file executes float arithmetic, comparisons and conversions. Results are exactly those of
// the GPU, apart from the .approx instructions, which are about as good as the GPU's; 2^x is nearly
// always the same.
#include <cfenv>

#include "exec/elementwise.h"
#include "exec/exp2_table.h"
#include "exec/small_floats.h"
#include "exec/tables.h"

namespace fk::softgpu {

namespace {

// Does what .ftz says: a number too small to be normal becomes zero, of the same sign.
inline float flushed(float x) {
  const uint32_t bits = bits_of(x);
  return (bits & 0x7f800000) == 0 ? float_of(bits & 0x80000000) : x;
}
inline float saturated(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }  // NaN becomes 0

inline float smaller(float a, float b) {
  if (a != a) return b != b ? float_of(kNan) : b;
  if (b != b) return a;
  if (a == b) return float_of(bits_of(a) | bits_of(b));  // -0 is less than 0
  return a < b ? a : b;
}
inline float larger(float a, float b) {
  if (a != a) return b != b ? float_of(kNan) : b;
  if (b != b) return a;
  if (a == b) return float_of(bits_of(a) & bits_of(b));
  return a < b ? b : a;
}

inline float log2_approximately(float x) {
  const bool tiny = std::fabs(x) < 0x1p-126f;
  const uint32_t bits = bits_of(tiny ? x * 0x1p24f : x);
  // Splits x into 2^e m, with m from sqrt(1/2) on.
  const int32_t shifted = static_cast<int32_t>(bits) - 0x3f3504f3;
  const int32_t e = shifted >> 23;
  const float f = float_of(bits - (static_cast<uint32_t>(e) << 23)) - 1.0f;
  float p = 7.0376836292e-2f;
  p = __builtin_fmaf(p, f, -1.1514610310e-1f);
  p = __builtin_fmaf(p, f, 1.1676998740e-1f);
  p = __builtin_fmaf(p, f, -1.2420140846e-1f);
  p = __builtin_fmaf(p, f, 1.4249322787e-1f);
  p = __builtin_fmaf(p, f, -1.6668057665e-1f);
  p = __builtin_fmaf(p, f, 2.0000714765e-1f);
  p = __builtin_fmaf(p, f, -2.4999993993e-1f);
  p = __builtin_fmaf(p, f, 3.3333331174e-1f);
  const float square = f * f;
  const float log = f + (square * f * p - 0.5f * square);
  float result = __builtin_fmaf(log, 1.44269504088896f, static_cast<float>(e - (tiny ? 24 : 0)));
  result = x == INFINITY ? x : result;
  result = x == 0 ? -INFINITY : result;
  return x < 0 || x != x ? float_of(kNan) : result;
}

// Computes a b + c with a rounding mode, such as down to the float below the exact result. The
// host's mode is set for the moment; the barriers keep the compiler from moving the arithmetic out
// of it.
__attribute__((noinline)) inline void fma_in_mode(Warp& warp, const Instruction& i, uint32_t lanes,
                                                  int mode) {
  const int before = std::fegetround();
  std::fesetround(mode);
  const auto* a = lanes_at(warp, i.at[1]);
  const auto* b = lanes_at(warp, i.at[2]);
  const auto* c = lanes_at(warp, i.at[3]);
  alignas(64) uint32_t result[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    volatile float x = float_of(a[l]), y = float_of(b[l]), z = float_of(c[l]);
    volatile float r = __builtin_fmaf(x, y, z);
    result[l] = bits_of(r);
  }
  std::fesetround(before);
  for (uint32_t& r : result) r = bits_of(canonical(float_of(r)));
  put(lanes_to<uint32_t>(warp, i.at[0]), result, lanes);
}

template <class F>
F not_a_number_made_canonical(F x) {
  if constexpr (sizeof(F) == 4) return canonical(x);
  return x;
}

// `F` is float or double. Where `F` is float, each of these comes with .ftz and .sat, too.
template <class F, class Operation>
struct Arithmetic {
  template <bool kFlush, bool kSaturate>
  static F finish(F x) {
    x = not_a_number_made_canonical(x);
    if constexpr (kFlush) x = flushed(x);
    if constexpr (kSaturate) x = saturated(x);
    return x;
  }
  template <bool kFlush>
  static F prepare(F x) {
    if constexpr (kFlush) return flushed(x);
    return x;
  }
  template <int kOperands, bool kFlush, bool kSaturate>
  static void execute(Warp& w, const Instruction& i, uint32_t m) {
    if constexpr (kOperands == 1) {
      unary<F, F>(w, i, m, [](F a) {
        return finish<kFlush, kSaturate>(Operation::apply(prepare<kFlush>(a)));
      });
    } else if constexpr (kOperands == 2) {
      binary<F, F, F>(w, i, m, [](F a, F b) {
        return finish<kFlush, kSaturate>(Operation::apply(prepare<kFlush>(a), prepare<kFlush>(b)));
      });
    } else {
      ternary<F, F, F, F>(w, i, m, [](F a, F b, F c) {
        return finish<kFlush, kSaturate>(
            Operation::apply(prepare<kFlush>(a), prepare<kFlush>(b), prepare<kFlush>(c)));
      });
    }
  }
};

template <class F, class Operation, int kOperands>
void add_arithmetic(Operations& table, std::initializer_list<const char*> names, Class kind) {
  const std::string l = sizeof(F) == 8 ? "q" : "r";
  std::string operands = "=" + l;
  for (int k = 0; k < kOperands; ++k) operands += " " + l;
  using A = Arithmetic<F, Operation>;
  for (const std::string name : names) {
    if constexpr (sizeof(F) == 8) {
      table[name + ".f64"] = {operands, A::template execute<kOperands, false, false>, kind};
    } else {
      table[name + ".f32"] = {operands, A::template execute<kOperands, false, false>, kind};
      table[name + ".ftz.f32"] = {operands, A::template execute<kOperands, true, false>, kind};
      table[name + ".sat.f32"] = {operands, A::template execute<kOperands, false, true>, kind};
      table[name + ".ftz.sat.f32"] = {operands, A::template execute<kOperands, true, true>, kind};
    }
  }
}

#define SOFTGPU_APPLY(name, parameters, expression) \
  struct name {                                     \
    template <class F>                              \
    static F apply parameters {                     \
      return static_cast<F>(expression);            \
    }                                               \
  }
SOFTGPU_APPLY(Add, (F a, F b), a + b);
SOFTGPU_APPLY(Subtract, (F a, F b), a - b);
SOFTGPU_APPLY(Multiply, (F a, F b), a* b);
SOFTGPU_APPLY(Divide, (F a, F b), a / b);
SOFTGPU_APPLY(Minimum, (F a, F b), smaller(a, b));
SOFTGPU_APPLY(Maximum, (F a, F b), larger(a, b));
SOFTGPU_APPLY(MinimumOrNan, (F a, F b), a != a || b != b ? float_of(kNan) : smaller(a, b));
SOFTGPU_APPLY(MaximumOrNan, (F a, F b), a != a || b != b ? float_of(kNan) : larger(a, b));
SOFTGPU_APPLY(Reciprocal, (F a), 1 / a);
SOFTGPU_APPLY(SquareRoot, (F a), std::sqrt(a));
SOFTGPU_APPLY(ReciprocalSquareRoot, (F a), 1 / std::sqrt(a));
SOFTGPU_APPLY(Log2, (F a), log2_approximately(a));
SOFTGPU_APPLY(Sine, (F a), std::sin(a));
SOFTGPU_APPLY(Cosine, (F a), std::cos(a));
SOFTGPU_APPLY(HyperbolicTangent, (F a), std::tanh(a));
struct MultiplyAdd {
  static float apply(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static double apply(double a, double b, double c) { return __builtin_fma(a, b, c); }
};

// Computes 2^x as the chip's special function unit makes it: it cuts the exponent after 23 bits
// behind the point, takes a parabola for each of 64 parts of what lies behind the point, and cuts
// the result. So results are too small on average, by 0.8 of 2^-24. A kernel may rely on that (the
// scan's backward asks for 0.4 more) and would be off to the other side with results rounded to
// nearest. Of its three loops the compiler vectorises all but the one that reads the table.
template <bool kFlush>
void exp2_approximately(Warp& warp, const Instruction& i, uint32_t lanes) {
  const uint32_t* from = lanes_at(warp, i.at[1]);
  alignas(64) float rest[kLanes];
  alignas(64) int32_t part[kLanes], whole[kLanes], mantissa[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    const float x = kFlush ? flushed(float_of(from[l])) : float_of(from[l]);
    // A NaN must name a part, too.
    const float above = x > -160.0f ? x : -160.0f;
    const float clamped = above < 130.0f ? above : 130.0f;
    const float cut = std::trunc(clamped * 0x1p23f) * 0x1p-23f;
    const float floor = std::floor(cut);
    const float scaled = (cut - floor) * kExp2Parts;
    whole[l] = static_cast<int32_t>(floor);
    part[l] = static_cast<int32_t>(scaled);
    rest[l] = scaled - static_cast<float>(part[l]);
  }
  for (int l = 0; l < kLanes; ++l) {
    const double d = rest[l];
    const int32_t p = part[l];
    mantissa[l] = static_cast<int32_t>(kExp2Parabolas[0][p] +
                                       d * (kExp2Parabolas[1][p] + d * kExp2Parabolas[2][p]));
  }
  alignas(64) uint32_t result[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    // In two steps, since a result may be too small for a normal number.
    const int32_t half = whole[l] >> 1;
    const float power = static_cast<float>(mantissa[l]) * 0x1p-23f *
                        float_of(static_cast<uint32_t>(half + 127) << 23) *
                        float_of(static_cast<uint32_t>(whole[l] - half + 127) << 23);
    const uint32_t bits = bits_of(kFlush ? flushed(power) : power);
    const uint32_t nan = (from[l] & 0x7fffffff) > 0x7f800000 ? ~0u : 0u;
    result[l] = (bits & ~nan) | (kNan & nan);
  }
  put(lanes_to<uint32_t>(warp, i.at[0]), result, lanes);
}

template <class F>
void add_float_comparisons(Operations& table, const std::string& type) {
  const std::string l = sizeof(F) == 8 ? "q" : "r", operands = "=p " + l + " " + l;
  const auto add = [&](const char* name, Execute execute) {
    table[std::string("setp.") + name + "." + type] = {operands, execute, Class::kCompare};
  };
  add("eq", SOFTGPU_COMPARE(F, a == b));
  add("ne", SOFTGPU_COMPARE(F, a < b || a > b));
  add("lt", SOFTGPU_COMPARE(F, a < b));
  add("le", SOFTGPU_COMPARE(F, a <= b));
  add("gt", SOFTGPU_COMPARE(F, a > b));
  add("ge", SOFTGPU_COMPARE(F, a >= b));
  add("equ", SOFTGPU_COMPARE(F, !(a < b || a > b)));
  add("neu", SOFTGPU_COMPARE(F, !(a == b)));
  add("ltu", SOFTGPU_COMPARE(F, !(a >= b)));
  add("leu", SOFTGPU_COMPARE(F, !(a > b)));
  add("gtu", SOFTGPU_COMPARE(F, !(a <= b)));
  add("geu", SOFTGPU_COMPARE(F, !(a < b)));
  add("num", SOFTGPU_COMPARE(F, a == a && b == b));
  add("nan", SOFTGPU_COMPARE(F, a != a || b != b));
}

// Converts to an integer: the nearest one where the value does not fit, and 0 for what is no
// number.
template <class D, class F>
D to_integer(F x) {
  if (!(x == x)) return 0;
  // The float next to the largest integer may be one too large.
  constexpr F kEnd = static_cast<F>(D{1} << (8 * sizeof(D) - 2)) * (std::is_signed_v<D> ? 2 : 4);
  if (x >= kEnd) return std::numeric_limits<D>::max();
  if (x < static_cast<F>(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
  return static_cast<D>(x);
}
template <class D, class F>
void add_to_integer(Operations& table, const std::string& to, const std::string& from) {
  const std::string operands = "=" + letter<D>() + (sizeof(F) == 8 ? " q" : " r");
  const auto add = [&](const char* mode, Execute execute) {
    table[std::string("cvt.") + mode + "." + to + "." + from] = {operands, execute,
                                                                 Class::kConvert};
  };
  add("rzi", SOFTGPU_UNARY(D, F, (to_integer<D, F>(std::trunc(a)))));
  add("rni", SOFTGPU_UNARY(D, F, (to_integer<D, F>(std::nearbyint(a)))));
  add("rmi", SOFTGPU_UNARY(D, F, (to_integer<D, F>(std::floor(a)))));
  add("rpi", SOFTGPU_UNARY(D, F, (to_integer<D, F>(std::ceil(a)))));
}

inline void add_float_conversions(Operations& table) {
  const auto add = [&](const char* name, const char* operands, Execute execute) {
    table[name] = {operands, execute, Class::kConvert};
  };
  add_to_integer<int32_t, float>(table, "s32", "f32");
  add_to_integer<uint32_t, float>(table, "u32", "f32");
  add_to_integer<int64_t, float>(table, "s64", "f32");
  add_to_integer<uint64_t, float>(table, "u64", "f32");
  add_to_integer<int32_t, double>(table, "s32", "f64");
  add_to_integer<int64_t, double>(table, "s64", "f64");
  add("cvt.rn.f32.s32", "=r r", SOFTGPU_UNARY(float, int32_t, a));
  add("cvt.rn.f32.u32", "=r r", SOFTGPU_UNARY(float, uint32_t, a));
  add("cvt.rn.f32.s64", "=r q", SOFTGPU_UNARY(float, int64_t, a));
  add("cvt.rn.f32.u64", "=r q", SOFTGPU_UNARY(float, uint64_t, a));
  add("cvt.rn.f32.s16", "=r h", SOFTGPU_UNARY(float, int16_t, a));
  add("cvt.rn.f32.u16", "=r h", SOFTGPU_UNARY(float, uint16_t, a));
  add("cvt.rn.f32.u8", "=r r", SOFTGPU_UNARY(float, uint8_t, a));
  add("cvt.rn.f32.s8", "=r r", SOFTGPU_UNARY(float, int8_t, a));
  add("cvt.rn.f64.s32", "=q r", SOFTGPU_UNARY(double, int32_t, a));
  add("cvt.rn.f64.u32", "=q r", SOFTGPU_UNARY(double, uint32_t, a));
  add("cvt.rn.f64.s64", "=q q", SOFTGPU_UNARY(double, int64_t, a));
  add("cvt.rn.f64.u64", "=q q", SOFTGPU_UNARY(double, uint64_t, a));
  add("cvt.f64.f32", "=q r", SOFTGPU_UNARY(double, float, a));
  add("cvt.rn.f32.f64", "=r q", SOFTGPU_UNARY(float, double, canonical(static_cast<float>(a))));
  add("cvt.sat.f32.f32", "=r r", SOFTGPU_UNARY(float, float, saturated(a)));
  add("cvt.rni.f32.f32", "=r r", SOFTGPU_UNARY(float, float, canonical(std::nearbyint(a))));
  add("cvt.rmi.f32.f32", "=r r", SOFTGPU_UNARY(float, float, canonical(std::floor(a))));
  add("cvt.rpi.f32.f32", "=r r", SOFTGPU_UNARY(float, float, canonical(std::ceil(a))));
  add("cvt.rzi.f32.f32", "=r r", SOFTGPU_UNARY(float, float, canonical(std::trunc(a))));
  add("cvt.f32.f16", "=r h", SOFTGPU_UNARY(float, uint32_t, half_to_float(a)));
  add("cvt.f32.bf16", "=r h", SOFTGPU_UNARY(float, uint32_t, bfloat16_to_float(a)));
  add("cvt.rn.f16.f32", "=h r", SOFTGPU_UNARY(uint32_t, float, float_to_half(a)));
  add("cvt.rn.bf16.f32", "=h r", SOFTGPU_UNARY(uint32_t, float, float_to_bfloat16(a)));
  // The first operand goes to the upper half.
  add("cvt.rn.f16x2.f32", "=r r r",
      SOFTGPU_BINARY(uint32_t, float, float, (float_to_half(a) << 16) | float_to_half(b)));
  add("cvt.rn.bf16x2.f32", "=r r r",
      SOFTGPU_BINARY(uint32_t, float, float, (float_to_bfloat16(a) << 16) | float_to_bfloat16(b)));
  add("cvt.rn.satfinite.e4m3x2.f32", "=h r r",
      SOFTGPU_BINARY(uint32_t, float, float, (float_to_e4m3(a) << 8) | float_to_e4m3(b)));
}

// Takes the larger half of each of two pairs.
inline uint32_t larger_halves(uint32_t a, uint32_t b) {
  const auto half = [](uint32_t x, uint32_t y) {
    return float_to_half(larger(half_to_float(x), half_to_float(y)));
  };
  return (half(a >> 16, b >> 16) << 16) | half(a & 0xffff, b & 0xffff);
}

}  // namespace

void add_float_operations(Operations& table) {
  table["abs.f16x2"] = {"=r r", SOFTGPU_UNARY(uint32_t, uint32_t, a & 0x7fff7fffu), Class::kFloat};
  table["max.f16x2"] = {"=r r r", SOFTGPU_BINARY(uint32_t, uint32_t, uint32_t, larger_halves(a, b)),
                        Class::kFloat};
  add_arithmetic<float, Add, 2>(table, {"add", "add.rn"}, Class::kFloat);
  add_arithmetic<float, Subtract, 2>(table, {"sub", "sub.rn"}, Class::kFloat);
  add_arithmetic<float, Multiply, 2>(table, {"mul", "mul.rn"}, Class::kFloat);
  add_arithmetic<float, MultiplyAdd, 3>(table, {"fma.rn"}, Class::kFma);
  add_arithmetic<float, Minimum, 2>(table, {"min"}, Class::kFloat);
  add_arithmetic<float, Maximum, 2>(table, {"max"}, Class::kFloat);
  add_arithmetic<float, MinimumOrNan, 2>(table, {"min.NaN"}, Class::kFloat);
  add_arithmetic<float, MaximumOrNan, 2>(table, {"max.NaN"}, Class::kFloat);
  add_arithmetic<float, Divide, 2>(table, {"div.rn", "div.approx", "div.full"}, Class::kSpecial);
  add_arithmetic<float, Reciprocal, 1>(table, {"rcp.rn", "rcp.approx"}, Class::kSpecial);
  add_arithmetic<float, SquareRoot, 1>(table, {"sqrt.rn", "sqrt.approx"}, Class::kSpecial);
  add_arithmetic<float, ReciprocalSquareRoot, 1>(table, {"rsqrt.approx"}, Class::kSpecial);
  table["ex2.approx.f32"] = {"=r r", exp2_approximately<false>, Class::kSpecial};
  table["ex2.approx.ftz.f32"] = {"=r r", exp2_approximately<true>, Class::kSpecial};
  add_arithmetic<float, Log2, 1>(table, {"lg2.approx"}, Class::kSpecial);
  add_arithmetic<float, Sine, 1>(table, {"sin.approx"}, Class::kSpecial);
  add_arithmetic<float, Cosine, 1>(table, {"cos.approx"}, Class::kSpecial);
  add_arithmetic<float, HyperbolicTangent, 1>(table, {"tanh.approx"}, Class::kSpecial);
  add_arithmetic<double, Add, 2>(table, {"add", "add.rn"}, Class::kFloat);
  add_arithmetic<double, Subtract, 2>(table, {"sub", "sub.rn"}, Class::kFloat);
  add_arithmetic<double, Multiply, 2>(table, {"mul", "mul.rn"}, Class::kFloat);
  add_arithmetic<double, MultiplyAdd, 3>(table, {"fma.rn"}, Class::kFma);
  add_arithmetic<double, Divide, 2>(table, {"div.rn"}, Class::kSpecial);
  add_arithmetic<double, SquareRoot, 1>(table, {"sqrt.rn"}, Class::kSpecial);
  add_float_comparisons<float>(table, "f32");
  add_float_comparisons<double>(table, "f64");
  add_float_conversions(table);
  // These move bits: what is no number stays as it is.
  table["neg.f32"] = {"=r r", SOFTGPU_UNARY(uint32_t, uint32_t, a ^ 0x80000000u), Class::kFloat};
  table["abs.f32"] = {"=r r", SOFTGPU_UNARY(uint32_t, uint32_t, a & 0x7fffffffu), Class::kFloat};
  table["copysign.f32"] = {
      "=r r r", SOFTGPU_BINARY(uint32_t, uint32_t, uint32_t, (a & 0x80000000u) | (b & 0x7fffffffu)),
      Class::kFloat};
  table["fma.rm.f32"] = {
      "=r r r r",
      [](Warp& w, const Instruction& i, uint32_t m) { fma_in_mode(w, i, m, FE_DOWNWARD); },
      Class::kFma};
  table["fma.rp.f32"] = {
      "=r r r r",
      [](Warp& w, const Instruction& i, uint32_t m) { fma_in_mode(w, i, m, FE_UPWARD); },
      Class::kFma};
  table["fma.rz.f32"] = {
      "=r r r r",
      [](Warp& w, const Instruction& i, uint32_t m) { fma_in_mode(w, i, m, FE_TOWARDZERO); },
      Class::kFma};
}

}  // namespace fk::softgpu
