// This file switches off numbers too small for a normal float: they make some processors a hundred
// times slower.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace fk::cpu {

// While one of these lives, the calling thread takes such numbers for 0, as operands and as
// results. Its end restores the caller's setting.
class FlushDenormals {
 public:
  FlushDenormals() : before_(read()) { write(before_ | kFlush); }
  ~FlushDenormals() { write(before_); }
  FlushDenormals(const FlushDenormals&) = delete;

 private:
#if defined(__x86_64__)
  using Control = unsigned;
  static constexpr Control kFlush = 0x8040;  // of results, of operands
  static Control read() { return _mm_getcsr(); }
  static void write(Control control) { _mm_setcsr(control); }
#else
  using Control = uint64_t;
  static constexpr Control kFlush = uint64_t{1} << 24;
  static Control read() {
    Control control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control;
  }
  static void write(Control control) { asm volatile("msr fpcr, %0" : : "r"(control)); }
#endif

  const Control before_;
};

}  // namespace fk::cpu
