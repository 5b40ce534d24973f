// Takes a call from slots to a kernel: has its arguments taken and checked (core/arguments.h),
// chooses an implementation and runs it.
#include <cstdio>

#include "core/arguments.h"
#include "core/environment.h"
#include "core/op.h"
#include "core/refusal.h"
#include "core/thread_pool.h"
#include "cpu/targets.h"
#if FK_HAVE_CUDA
#include "cuda/indices_on_host.h"
#include "cuda/runtime.h"
#endif

namespace fk {
namespace {

constexpr size_t kMaxArgsBytes = 8192;

// Holds the argument struct of one call, on the stack.
struct Arguments {
  alignas(16) char storage[kMaxArgsBytes];
};

// Does all but run the kernel. `caller` is NULL for a query, which comes without data.
Status prepare(const fk_op& op, const fk_slot* slots, const fk_exec* caller, Arguments* args,
               const fk_op::Implementation** chosen, int* device_id) {
  if (slots == nullptr) return invalid("expected arguments, got NULL");
  if (op.args_bytes > kMaxArgsBytes) {
    return {FK_INTERNAL, "the argument struct is larger than dispatch allows"};
  }
  op.construct_args(args->storage);
  CallArguments call(op.declaration, slots, args->storage);
  FK_RETURN_IF_ERROR(call.unpack(/*needs_data=*/caller != nullptr));
  FK_RETURN_IF_ERROR(call.check());
  if (caller != nullptr) FK_RETURN_IF_ERROR(call.check_outputs());
  if (op.validate != nullptr) FK_RETURN_IF_ERROR(op.validate(args->storage));

  const Device device = call.first_tensor().device;
  *device_id = device == Device::kCuda ? call.first_tensor().device_id : -1;
#if FK_HAVE_CUDA
  if (device == Device::kCuda && caller != nullptr && checks_values_on_gpu()) {
    const cuda::IndicesOnHost on_host(op.declaration, args->storage, *device_id, caller->stream);
    FK_RETURN_IF_ERROR(on_host.status());
    FK_RETURN_IF_ERROR(call.check_values());
    if (op.validate != nullptr) FK_RETURN_IF_ERROR(op.validate(args->storage));
  }
#endif
  const char* device_name = device == Device::kCpu ? "CPU" : "CUDA";
  if (const fk_op::Implementation* forced = op.forced.load(std::memory_order_relaxed)) {
    const RefusalReason reason;
    if (forced->device != device || !forced->accepts(forced->typed.get(), args->storage)) {
      return unsupported("the forced implementation '" + forced->name + "' does not take this " +
                         device_name + " call" + (reason.text().empty() ? "" : ": ") +
                         reason.text());
    }
    *chosen = forced;
  } else {
    *chosen = nullptr;
    for (const fk_op::Implementation& i : op.implementations) {
      if (i.device == device && i.accepts(i.typed.get(), args->storage)) {
        *chosen = &i;
        break;
      }
    }
    if (*chosen == nullptr) {
      return unsupported(std::string("this build has no ") + device_name +
                         " implementation for these arguments");
    }
  }
  return {};
}

}  // namespace

Status call(const fk_op& op, const fk_slot* slots, const fk_exec& caller) {
  Arguments args;
  const fk_op::Implementation* chosen = nullptr;
  int device_id = -1;
  FK_RETURN_IF_ERROR(prepare(op, slots, &caller, &args, &chosen, &device_id));
  const size_t needed = chosen->workspace(chosen->typed.get(), args.storage);
  fk_exec exec = caller;
  if (needed > exec.workspace_bytes && exec.allocate != nullptr) {
    exec.workspace = exec.allocate(exec.allocator, needed);
    exec.workspace_bytes = exec.workspace == nullptr ? 0 : needed;
  }
  if (needed > 0 && (exec.workspace == nullptr || exec.workspace_bytes < needed)) {
    return invalid("workspace: expected at least " + std::to_string(needed) + " bytes, got " +
                   std::to_string(exec.workspace == nullptr ? 0 : exec.workspace_bytes));
  }
  if (needed > 0 && reinterpret_cast<uintptr_t>(exec.workspace) % 64 != 0) {
    return invalid("workspace: expected 64-byte alignment");
  }
  if (exec.parallel_for == nullptr) exec.parallel_for = pool_parallel_for;
  if (deterministic_by_environment()) exec.deterministic = 1;
  op.last.store(chosen, std::memory_order_relaxed);
  if (logs_dispatch()) {
    const bool simd = chosen->device == Device::kCpu && chosen->rank != kReference;
    const char* target = simd ? cpu::active_target() : "";
    std::fprintf(stderr, "flashkernel: %s -> %s (%s%sworkspace %zu bytes)\n",
                 op.declaration.name.c_str(), chosen->name.c_str(), target, *target ? ", " : "",
                 needed);
  }
#if FK_HAVE_CUDA
  if (device_id >= 0) {
    const cuda::DeviceGuard guard(device_id);
    FK_RETURN_IF_ERROR(guard.status());
    return chosen->run(chosen->typed.get(), args.storage, Exec(exec));
  }
#endif
  return chosen->run(chosen->typed.get(), args.storage, Exec(exec));
}

Status query_workspace(const fk_op& op, const fk_slot* slots, size_t* bytes) {
  Arguments args;
  const fk_op::Implementation* chosen = nullptr;
  int device_id = -1;
  FK_RETURN_IF_ERROR(prepare(op, slots, nullptr, &args, &chosen, &device_id));
  *bytes = chosen->workspace(chosen->typed.get(), args.storage);
  return {};
}

Status query_implementation(const fk_op& op, const fk_slot* slots, const char** name) {
  Arguments args;
  const fk_op::Implementation* chosen = nullptr;
  int device_id = -1;
  FK_RETURN_IF_ERROR(prepare(op, slots, nullptr, &args, &chosen, &device_id));
  *name = chosen->name.c_str();
  return {};
}

}  // namespace fk
