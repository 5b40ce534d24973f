// The part of FlashKernel's C ABI that all ops share: status, where a call runs, generic calls.
// Users include flashkernel/flashkernel.h, which adds one struct and two functions per op.
#ifndef FLASHKERNEL_ABI_H_
#define FLASHKERNEL_ABI_H_

#include <stddef.h>
#include <stdint.h>

#include "flashkernel/dlpack.h"

#if defined(__GNUC__)
#define FK_API __attribute__((visibility("default")))
#else
#define FK_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fk_status {
  FK_OK = 0,
  FK_INVALID_ARGUMENT =
      1,               // the message names the op, the argument, what was expected and what came
  FK_UNSUPPORTED = 2,  // valid, but this build or device has no kernel for it
  FK_CUDA_ERROR = 3,
  FK_INTERNAL = 4
} fk_status;

// The message of this thread's last call that did not return FK_OK. Valid until the next such call.
// No function of this library lets an exception out. One that returns no status gives what each
// says below where it fails: NULL, 0, or "" for a text.
FK_API const char* fk_last_error(void);

// body(begin, end, context) over disjoint ranges that cover [0, count), each of at least `grain`
// items except the last. Ranges may run concurrently; the call returns when all have finished.
typedef void (*fk_range_body)(int64_t begin, int64_t end, void* context);
typedef void (*fk_parallel_for_fn)(void* pool, int64_t count, int64_t grain, fk_range_body body,
                                   void* context);

// Where and how a call runs. Zero-initialised is valid: CPU work on FlashKernel's own thread pool,
// CUDA work on the default stream, no workspace.
typedef struct fk_exec {
  void* stream;     // CUstream / cudaStream_t
  void* workspace;  // at least 64-byte aligned, on the tensors' device
  size_t workspace_bytes;
  fk_parallel_for_fn parallel_for;  // NULL: FlashKernel's own pool
  void* parallel_pool;              // first argument of parallel_for
  // Called at most once, when the call needs more than workspace_bytes: returns memory like
  // `workspace` that lives until the call (on CUDA: its work on the stream) is done, or NULL.
  void* (*allocate)(void* allocator, size_t bytes);
  void* allocator;
  int32_t deterministic;  // non-zero: bit-for-bit repeatable, backward too
  int32_t reserved;
} fk_exec;

#ifdef __cplusplus
#define FK_EXEC_DEFAULTS \
  fk_exec {}
#else
#define FK_EXEC_DEFAULTS \
  { 0 }
#endif

// One argument of an op. An op's argument struct is an array of these, in declaration order, so the
// generic calls below serve every op and every language.
typedef union fk_slot {
  const DLTensor* tensor;  // inputs and outputs; NULL where absent: such outputs are not computed
  double number;
  int64_t integer;  // also booleans, and choices by index
} fk_slot;

typedef struct fk_op fk_op;

FK_API const fk_op* fk_find_op(const char* name);  // NULL if there is none
FK_API size_t fk_op_count(void);
FK_API const fk_op* fk_op_at(size_t index);      // NULL from fk_op_count on
FK_API const char* fk_op_name(const fk_op* op);  // "" for NULL

// What the slots of an op hold, for bindings that fill them without knowing the op.
typedef enum fk_slot_kind {
  FK_SLOT_NONE = -1,  // there is no such slot
  FK_SLOT_INPUT = 0,
  FK_SLOT_OUTPUT = 1,
  FK_SLOT_NUMBER = 2,
  FK_SLOT_INTEGER = 3
} fk_slot_kind;
FK_API size_t fk_op_slot_count(const fk_op* op);  // 0 for NULL
FK_API fk_slot_kind fk_op_slot_kind(const fk_op* op, size_t slot);

FK_API fk_status fk_op_call(const fk_op* op, const fk_slot* arguments, const fk_exec* exec);
FK_API fk_status fk_op_workspace(const fk_op* op, const fk_slot* arguments, size_t* bytes);
// The name of the implementation a call with these arguments would take.
FK_API fk_status fk_op_implementation(const fk_op* op, const fk_slot* arguments, const char** name);

// Makes an op take one implementation by name (as FK_IMPL does); NULL restores the ranked choice.
FK_API fk_status fk_force_implementation(const fk_op* op, const char* implementation);

// Every op's declaration as one JSON document; bindings derive their calls from it.
FK_API const char* fk_declarations(void);

FK_API const char* fk_version(void);
// JSON: version, compiler, CPU target in use and available, CUDA architectures compiled in, GPUs.
FK_API const char* fk_build_info(void);

// FlashKernel's own pool. Starts with FK_NUM_THREADS threads, or one per core.
FK_API void fk_set_num_threads(int32_t threads);
FK_API int32_t fk_num_threads(void);

// Restricts CPU kernels to a SIMD target ("sse4", "avx2", "avx3", "avx3_bf16", "neon"); NULL
// restores the best.
FK_API fk_status fk_set_cpu_target(const char* name);

#ifdef __cplusplus
}
#endif

#endif  // FLASHKERNEL_ABI_H_
