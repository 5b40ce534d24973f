// Calls from Python that need nothing of torch's dispatcher: functions of Python that take a torch
// operator's arguments and, where the dispatcher would hand plain CPU tensors straight to our
// kernel, go there themselves. Parsing by schema, boxing and the copies of tensors on torch's stack
// cost more than a small op. Any other call is passed on to the operator.
//
// Neither where a Python object keeps its tensor nor where a tensor keeps its dispatch keys is part
// of an ABI: the Python side (flashkernel/torch/_plain.py) finds out by looking at tensors whose
// answers it knows, and does without these functions where it cannot tell.
#include <exception>
#include <string>

#include "core/last_error.h"
#include "kernel.h"
#include "python.h"

namespace fk::torch {
namespace {

constexpr int kMaxStates = 4;

struct Layout {
  const void* tensor_types[2] = {};  // torch.Tensor, torch.nn.Parameter
  int64_t handle_offset = 0;         // bytes from a tensor's Python object to its at::Tensor
  int64_t keys_offset = 0;           // bytes from the tensor's implementation to its dispatch keys
  int64_t autograd_offset = 0;       // ... to a pointer, NULL while autograd has not seen it
  uint64_t plain_keys[kMaxStates] = {};  // of CPU tensors without anything special about them
  int num_plain_keys = 0;
  // What a thread includes and excludes of the dispatch keys where no mode is active that asks to
  // see calls.
  uint64_t plain_threads[kMaxStates][2] = {};
  int num_plain_threads = 0;
};

// Exported by torch's libraries, though not as a C ABI.
struct Internals {
  PyObject* (*wrap)(Handle) = nullptr;  // THPVariable_Wrap(at::TensorBase&&), or const &
  bool (*function_mode)() = nullptr;    // at::impl::torch_function_mode_enabled()
  bool (*callbacks)() = nullptr;        // at::hasCallbacks(): somebody records calls

  bool bind() {
    return (find("_Z16THPVariable_WrapON2at10TensorBaseE", &wrap) ||
            find("_Z16THPVariable_WrapRKN2at10TensorBaseE", &wrap)) &&
           find("_ZN2at4impl27torch_function_mode_enabledEv", &function_mode) &&
           find("_ZN2at12hasCallbacksEv", &callbacks);
  }

  template <class Function>
  static bool find(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(find_symbol(name));
    return *function != nullptr;
  }
};

Layout layout;
Python python;
Internals internals;

// The dispatch keys that this thread includes and excludes: c10::impl::raw_local_dispatch_key_set.
const uint64_t* thread_keys() {
  static thread_local const auto* keys =
      static_cast<const uint64_t*>(find_symbol("_ZN3c104impl26raw_local_dispatch_key_setE"));
  return keys;
}

bool is_plain_thread() {
  const uint64_t* keys = thread_keys();
  for (int i = 0; i < layout.num_plain_threads; ++i) {
    const uint64_t* plain = layout.plain_threads[i];
    if (keys[0] == plain[0] && keys[1] == plain[1]) {
      return !internals.function_mode() && !internals.callbacks();
    }
  }
  return false;
}

const char* implementation_of(Handle handle) { return *reinterpret_cast<char**>(handle); }

// The tensor of a Python object, borrowed; NULL where it is anything else than a plain CPU tensor.
Handle plain_tensor(PyObject* object) {
  if (object->type != layout.tensor_types[0] && object->type != layout.tensor_types[1]) {
    return nullptr;
  }
  auto handle = reinterpret_cast<Handle>(reinterpret_cast<char*>(object) + layout.handle_offset);
  const uint64_t keys =
      *reinterpret_cast<const uint64_t*>(implementation_of(handle) + layout.keys_offset);
  for (int i = 0; i < layout.num_plain_keys; ++i) {
    if (keys == layout.plain_keys[i]) return handle;
  }
  return nullptr;
}

// Whether forward mode follows a tensor, or autograd may where it keeps a graph of the call.
bool may_be_followed(Handle handle, bool keeps_graph) {
  const void* autograd =
      *reinterpret_cast<void* const*>(implementation_of(handle) + layout.autograd_offset);
  return autograd != nullptr && (keeps_graph || shim->has_tangent(handle));
}

// An attribute in the type that the schema has it in; false for any other.
bool plain_attribute(Kind kind, PyObject* object, fk_slot* slot) {
  if (kind == Kind::kNumber) {
    if (object->type != python.PyFloat_Type) return false;
    slot->number = python.PyFloat_AsDouble(object);
    return true;
  }
  if (kind == Kind::kBoolean) {
    if (object->type != python.PyBool_Type) return false;
    slot->integer = object == python._Py_TrueStruct ? 1 : 0;
    return true;
  }
  if (object->type != python.PyLong_Type) return false;
  slot->integer = python.PyLong_AsLongLong(object);
  if (slot->integer != -1 || python.PyErr_Occurred() == nullptr) return true;
  python.PyErr_Clear();  // too large for 64 bits
  return false;
}

struct PlainFunction {
  const Kernel* kernel;
  PyObject* otherwise;     // what takes a call that is not plain
  bool without_gradients;  // a call that may need a gradient is not
  PyMethodDef definition;
};

// False where the call is not plain.
bool take_arguments(const PlainFunction& function, PyObject* const* given, int64_t count,
                    Call* call) {
  const Kernel& kernel = *function.kernel;
  const auto expected =
      static_cast<int64_t>(kernel.arguments.size()) + (kernel.wanted_on_stack ? 1 : 0);
  // Of a tensor that is written over, torch's kernel for views counts the versions.
  if (count != expected || kernel.in_place >= 0 || !is_plain_thread()) return false;
  const bool gradients = function.without_gradients && shim->aoti_torch_grad_mode_is_enabled();
  const auto& fields = kernel.op->declaration.fields;
  for (const Kernel::Argument& argument : kernel.arguments) {
    PyObject* object = *given++;
    if (!argument.is_tensor) {
      if (argument.boxed && object == python._Py_NoneStruct) {
        call->slots[argument.field].number = kLeftOut;
      } else if (!plain_attribute(fields[argument.field].kind, object,
                                  &call->slots[argument.field])) {
        return false;
      }
    } else if (argument.boxed && object == python._Py_NoneStruct) {
      call->handles[argument.field] = nullptr;
    } else {
      const Handle handle = plain_tensor(object);
      if (handle == nullptr || may_be_followed(handle, gradients)) return false;
      call->handles[argument.field] = handle;
    }
  }
  call->wanted = kernel.wanted;
  if (kernel.wanted_on_stack) {
    fk_slot wanted;
    if (!plain_attribute(Kind::kInteger, *given, &wanted)) return false;
    call->wanted = static_cast<uint64_t>(wanted.integer);
  }
  return true;
}

PyObject* wrap(Handle handle) {
  if (handle == nullptr) {
    python.Py_IncRef(python._Py_NoneStruct);
    return python._Py_NoneStruct;
  }
  PyObject* object = internals.wrap(handle);
  shim->aoti_torch_delete_tensor_object(handle);
  return object;
}

// One result, or a tuple of any other number, in which None stands for those not computed.
PyObject* wrap_results(const Call& call) {
  if (call.num_results == 1) return wrap(call.results[0]);
  PyObject* tuple = python.PyTuple_New(call.num_results);
  for (int i = 0; i < call.num_results; ++i) {
    PyObject* result = wrap(call.results[i]);
    if (tuple != nullptr) python.PyTuple_SetItem(tuple, i, result);
  }
  return tuple;
}

// Lets other Python threads run, unless a call is over before one could.
class WithoutInterpreter {
 public:
  explicit WithoutInterpreter(bool release)
      : state_(release ? python.PyEval_SaveThread() : nullptr) {}
  ~WithoutInterpreter() {
    if (state_ != nullptr) python.PyEval_RestoreThread(state_);
  }
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  void* state_;
};

bool is_short(const Kernel& kernel, const Call& call) {
  constexpr int64_t kElements = 4096;
  for (const Kernel::Argument& argument : kernel.arguments) {
    int64_t elements = 0;
    if (!argument.is_tensor || call.handles[argument.field] == nullptr) continue;
    shim->aoti_torch_get_numel(call.handles[argument.field], &elements);
    if (elements > kElements) return false;
  }
  return true;
}

// False where the call failed.
bool try_compute(const Kernel& kernel, Call* call) {
  try {
    const WithoutInterpreter released(!is_short(kernel, *call));
    compute(kernel, call);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

const PlainFunction& function_of(PyObject* self) {
  return *static_cast<const PlainFunction*>(python.PyCapsule_GetPointer(self, nullptr));
}

PyObject* hand_on(const PlainFunction& function, PyObject* const* arguments, int64_t count) {
  return python.PyObject_Vectorcall(function.otherwise, arguments, count, nullptr);
}

PyObject* call_plain(PyObject* self, PyObject* const* arguments, int64_t count) {
  const PlainFunction& function = function_of(self);
  Call call;
  if (take_arguments(function, arguments, count, &call) && try_compute(*function.kernel, &call)) {
    return wrap_results(call);
  }
  // A call that failed fails again there, and is told with the words of that function.
  return hand_on(function, arguments, count);
}

// (tensor, axis, size): a view that repeats the tensor along an axis that it does not have yet.
PyObject* repeat_plain(PyObject* self, PyObject* const* arguments, int64_t count) {
  const PlainFunction& function = function_of(self);
  const Handle handle = count == 3 && is_plain_thread() ? plain_tensor(arguments[0]) : nullptr;
  int64_t ndim = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
  fk_slot axis, size;
  if (handle == nullptr || shim->aoti_torch_grad_mode_is_enabled() ||
      may_be_followed(handle, false) || !plain_attribute(Kind::kInteger, arguments[1], &axis) ||
      !plain_attribute(Kind::kInteger, arguments[2], &size) ||
      shim->aoti_torch_get_dim(handle, &ndim) != 0 ||
      shim->aoti_torch_get_sizes(handle, &sizes) != 0 ||
      shim->aoti_torch_get_strides(handle, &strides) != 0 || ndim >= kMaxDims) {
    return hand_on(function, arguments, count);
  }
  const int64_t place = axis.integer < 0 ? axis.integer + ndim + 1 : axis.integer;
  int64_t new_sizes[kMaxDims], new_strides[kMaxDims];
  for (int64_t i = 0; i <= ndim; ++i) {
    const int64_t from = i < place ? i : i - 1;
    new_sizes[i] = i == place ? size.integer : sizes[from];
    new_strides[i] = i == place ? 0 : strides[from];
  }
  Handle result = nullptr;
  if (place < 0 || place > ndim ||
      shim->aoti_torch__reinterpret_tensor(handle, ndim + 1, new_sizes, new_strides, 0, &result) !=
          0) {
    return hand_on(function, arguments, count);
  }
  return wrap(result);
}

// A new reference, or NULL.
PyObject* make_function(const char* name, PyFastFunction code, PlainFunction function) {
  // Never deleted: of each there is one for the life of the process.
  auto* kept = new PlainFunction(function);
  kept->definition = {name, code, kMethFastCall, nullptr};
  python.Py_IncRef(kept->otherwise);
  PyObject* self = python.PyCapsule_New(kept, nullptr, nullptr);
  if (self == nullptr) return nullptr;
  PyObject* result = python.PyCFunction_NewEx(&kept->definition, self, nullptr);
  python.Py_DecRef(self);
  return result;
}

}  // namespace
}  // namespace fk::torch

extern "C" {

// Says how torch's tensors are laid out in this process. Returns false where functions that make
// calls by themselves cannot be had.
FK_API bool fk_torch_set_layout(const void* tensor, const void* parameter, int64_t handle_offset,
                                int64_t keys_offset, int64_t autograd_offset) {
  using namespace fk::torch;
  const char* error = nullptr;
  shim = load_shim(&error);
  if (shim == nullptr || !python.bind() || !internals.bind() || thread_keys() == nullptr) {
    return false;
  }
  layout.tensor_types[0] = tensor;
  layout.tensor_types[1] = parameter;
  layout.handle_offset = handle_offset;
  layout.keys_offset = keys_offset;
  layout.autograd_offset = autograd_offset;
  return true;
}

// Adds the dispatch keys of a plain CPU tensor, and this thread's, to those that are plain.
FK_API void fk_torch_add_plain(uint64_t keys) {
  using namespace fk::torch;
  if (layout.num_plain_keys == kMaxStates) return;
  layout.plain_keys[layout.num_plain_keys++] = keys;
  layout.plain_threads[layout.num_plain_threads][0] = thread_keys()[0];
  layout.plain_threads[layout.num_plain_threads++][1] = thread_keys()[1];
}

// A new reference to a function that takes the arguments of the operator of this name, by position.
// `otherwise` takes the calls that are not plain or have a tangent, and where `without_gradients`
// those that may need a gradient too. NULL where there is no such operator. To be called, as the
// next one, with the interpreter's lock held.
FK_API void* fk_torch_plain_function(const char* name, void* otherwise, bool without_gradients) {
  using namespace fk::torch;
  void* const none = nullptr;
  return fk::guarded_or("plain", none, [&]() -> void* {
    const Kernel* kernel = find_kernel(name);
    if (kernel == nullptr) return nullptr;
    return make_function(kernel->name.c_str(), call_plain,
                         {kernel, static_cast<PyObject*>(otherwise), without_gradients, {}});
  });
}

// A new reference to a function (tensor, axis, size) that gives a view which repeats the tensor
// along an axis that it does not have yet; as `otherwise`, which takes the calls that need a
// gradient or are not plain. NULL where torch has no such views.
FK_API void* fk_torch_repeat_function(void* otherwise) {
  using namespace fk::torch;
  if (shim->aoti_torch__reinterpret_tensor == nullptr) return nullptr;
  void* const none = nullptr;
  return fk::guarded_or("repeat", none, [&]() -> void* {
    return make_function("repeat", repeat_plain,
                         {nullptr, static_cast<PyObject*>(otherwise), true, {}});
  });
}

}  // extern "C"
