// Torch's kernels for all ops are one boxed function, which takes a call's arguments from torch's
// stack. Which op it is, and which of its outputs are wanted, is registered with the name; the
// Python side (flashkernel/torch) derives the names and schemas from the declarations.
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/last_error.h"
#include "kernel.h"
#include "layout.h"

namespace fk::torch {
namespace {

constexpr int kMaxKernels = 512;

Kernel kernels[kMaxKernels];
int num_kernels = 0;

// Refuses tensors with tangents, since torch takes the tangents of a kernel's results to be 0.
void refuse_tangents(const Kernel& kernel, const Call& call) {
  for (const Kernel::Argument& argument : kernel.arguments) {
    if (!argument.is_tensor || call.handles[argument.field] == nullptr) continue;
    if (!shim->has_tangent(call.handles[argument.field])) continue;
    throw std::runtime_error(kernel.op->public_name() + ": " +
                             kernel.op->declaration.fields[argument.field].name +
                             ": expected a tensor without a tangent (this op defines no "
                             "derivative in forward mode), got one with");
  }
}

void run(const Kernel& kernel, StableIValue* stack) {
  Owned inputs;
  Call call;
  // Everything on the stack is ours from here on, so it is all taken before anything may throw.
  const StableIValue* next = stack;
  for (const Kernel::Argument& argument : kernel.arguments) {
    StableIValue value = *next++;
    const bool given = !argument.boxed || value != 0;
    if (argument.boxed && given) {
      auto* box = reinterpret_cast<StableIValue*>(value);
      value = *box;
      delete box;
    }
    if (!argument.is_tensor) {
      fk_slot& slot = call.slots[argument.field];
      slot.integer = static_cast<int64_t>(value);  // any attribute's bits
      if (!given) slot.number = kLeftOut;
      continue;
    }
    call.handles[argument.field] = reinterpret_cast<Handle>(value);
    if (value != 0) inputs.add(call.handles[argument.field]);
  }
  call.wanted = kernel.wanted_on_stack ? *next : kernel.wanted;
  refuse_tangents(kernel, call);
  compute(kernel, &call);
  for (int i = 0; i < call.num_results; ++i) {
    const Handle result = call.results[i];
    stack[i] =
        reinterpret_cast<StableIValue>(result != nullptr ? result : empty_result(kernel, call));
  }
}

// Torch calls a boxed kernel without saying which, so each registered name gets a function of its
// own.
template <int index>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  run(kernels[index], stack);
}

template <int... indices>
constexpr std::array<BoxedKernel, sizeof...(indices)> make_table(
    std::integer_sequence<int, indices...>) {
  return {boxed<indices>...};
}

constexpr auto kTable = make_table(std::make_integer_sequence<int, kMaxKernels>());

const char* register_kernel(const char* name, Kernel kernel) {
  if (num_kernels == kMaxKernels) return "the torch binding's table of kernels is full";
  static LibraryHandle libraries[2] = {};  // never deleted: the kernels stay registered
  static constexpr const char* kKeys[2] = {"CPU", "CUDA"};
  kernels[num_kernels] = std::move(kernel);
  for (int i = 0; i < 2; ++i) {
    if (libraries[i] == nullptr &&
        // The name is not __FILE__, which would tell where the library was built.
        shim->aoti_torch_library_init_impl("flashkernel", kKeys[i], "bindings/torch/ops.cc",
                                           __LINE__, &libraries[i]) != 0) {
      return "torch could not open the flashkernel namespace";
    }
    if (shim->torch_library_impl(libraries[i], name, kTable[num_kernels], kBuildVersion) != 0) {
      return "torch refused the kernel";
    }
  }
  ++num_kernels;
  return nullptr;
}

const char* register_op(const char* name, const fk_op* op, int64_t outputs, uint64_t in_place,
                        uint64_t absent, uint64_t boxed) {
  const char* error = nullptr;
  shim = load_shim(&error);
  if (shim == nullptr) return error;
  const OpDeclaration& declaration = op->declaration;
  if (declaration.fields.size() > kMaxSlots) {
    return "the op has more arguments than the torch binding allows";
  }
  Kernel kernel;
  kernel.op = op;
  kernel.wanted_on_stack = outputs < 0;
  kernel.wanted = static_cast<uint64_t>(outputs);
  int tensors = 0;
  for (size_t i = 0; i < declaration.fields.size(); ++i) {
    const Field& f = declaration.fields[i];
    const int field = static_cast<int>(i);
    if (f.kind == Kind::kOutput) {
      ++tensors;
      const bool written_over = (in_place >> kernel.outputs.size() & 1) != 0;
      const int over =
          written_over ? declaration.find(f.updates.empty() ? f.may_alias : f.updates) : -1;
      kernel.outputs.push_back(
          {field, input_like(declaration, f), input_of_layout(declaration, f), over});
    } else if ((absent >> i & 1) != 0) {
      kernel.absent.push_back(field);
    } else {
      const bool is_tensor = f.kind == Kind::kInput;
      tensors += is_tensor ? 1 : 0;
      const bool may_be_left_out = f.kind == Kind::kNumber && f.nullable;
      const bool is_boxed = (boxed >> i & 1) != 0 || may_be_left_out;
      kernel.arguments.push_back({field, is_tensor, is_boxed, false});
    }
  }
  if (tensors > kMaxTensors) {
    return "the op has more tensors than the torch binding allows";
  }
  for (Kernel::Argument& argument : kernel.arguments) {
    for (const Kernel::Output& output : kernel.outputs) {
      if (output.over == argument.field) argument.writable = true;
    }
  }
  return register_kernel(name, std::move(kernel));
}

}  // namespace
}  // namespace fk::torch

extern "C" {

// Returns the function by which calls of the C ABI share work among torch's threads, for callers
// that have torch's tensors: two pools whose threads wait spinning would take the processor from
// each other. There must be an operator already.
FK_API fk_parallel_for_fn fk_torch_parallel_for() { return fk::torch::parallel_for; }

// Names the input that an output (counted among the outputs) lies in memory as; NULL where there is
// none.
FK_API const char* fk_torch_layout_of(const fk_op* op, int32_t output) {
  for (const fk::Field& f : op->declaration.fields) {
    if (f.kind != fk::Kind::kOutput || output-- > 0) continue;
    const int input = fk::torch::input_of_layout(op->declaration, f);
    return input < 0 ? nullptr : op->declaration.fields[input].name.c_str();
  }
  return nullptr;
}

// Registers CPU and CUDA kernels for the torch op `flashkernel::<name>`, whose schema exists
// already. `outputs` says which of the op's outputs it returns (bit i: output i); -1 means that a
// last argument of each call does. `in_place` are the outputs (bit i: output i) that are written
// over their inputs. The schema leaves out the inputs `absent` (bit i: field i) and has the inputs
// `boxed` as `Tensor?`; numbers that may be left out it has as `float?`. Returns NULL, or what went
// wrong.
FK_API const char* fk_torch_register(const char* name, const fk_op* op, int64_t outputs,
                                     uint64_t in_place, uint64_t absent, uint64_t boxed) {
  return fk::without_exceptions(
      [&]() -> const char* {
        return fk::torch::register_op(name, op, outputs, in_place, absent, boxed);
      },
      [](const char* why) {
        fk::set_last_error(FK_INTERNAL, "register", why);
        return fk_last_error();
      });
}

}  // extern "C"
