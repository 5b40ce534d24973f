// Compiles the including file once per instruction set. A kernel file is laid out as
//
//   #undef HWY_TARGET_INCLUDE
//   #define HWY_TARGET_INCLUDE "ops/norm/cpu/forward.cc"  // this file, as the compiler finds it
//   #include "cpu/foreach_target.h"
//   #include "cpu/simd.h"
//
//   HWY_BEFORE_NAMESPACE();
//   namespace fk::cpu {
//   namespace HWY_NAMESPACE {
//   void sum_rows(const Job& job, int64_t begin, int64_t end) { ... }  // vector code
//   }  // namespace HWY_NAMESPACE
//   }  // namespace fk::cpu
//   HWY_AFTER_NAMESPACE();
//
//   #if HWY_ONCE
//   namespace fk::cpu {
//   FK_CPU_EXPORT(sum_rows);
//   Status run(const Sum& a, const Exec& exec) {
//     const auto kernel = FK_CPU_DISPATCH(sum_rows);  // the active instruction set's version
//     exec.parallel_for(rows, grain, [&](int64_t b, int64_t e) { kernel(job, b, e); });
//   }
//   }  // namespace fk::cpu
//   #endif
//
// Structs that both halves use go above the first include of the block, inside an include guard of
// their own. Lambdas with vector code in them need HWY_ATTR after their parameter list.
//
// The instruction sets are SSE4, AVX2 and AVX-512 on x86-64 and NEON on 64-bit Arm. They are chosen
// by attributes within the file, so no compiler flag is needed, and code outside the vector
// namespaces (inline functions that the linker may share with other files) stays baseline code.
//
// This file has no include guard of its own: Highway's, inside, does what is needed.
#if defined(__x86_64__)
#ifndef HWY_BASELINE_TARGETS
#define HWY_BASELINE_TARGETS HWY_SSE4
#endif
#elif defined(__aarch64__)
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
#else
#error "the CPU kernels are written for x86-64 and 64-bit Arm"
#endif

// Highway's debug checks would call into its library, which we do not link: only its headers are
// used.
#ifndef HWY_IS_DEBUG_BUILD
#define HWY_IS_DEBUG_BUILD 0
#endif

#include "hwy/foreach_target.h"
