// Takes NumPy arrays without NumPy's or CPython's headers: `fk_numpy_call` reads the few leading
// words of the array object whose layout has been the same since NumPy 1.0 and is checked by the
// Python side when it is imported (flashkernel/_numpy.py falls back to ordinary DLPack structs if
// it differs). It saves the microseconds that describing each array through Python attributes would
// cost.
#include <cstdint>

#include "core/heap_workspace.h"
#include "core/op.h"
#include "flashkernel/abi.h"

namespace {

struct ArrayObject {
  int64_t reference_count;
  const void* type;
  void* data;
  int32_t ndim;
  const int64_t* shape;
  const int64_t* byte_strides;
  const void* base;
  const void* dtype;
};

constexpr int kMaxDTypes = 16;

struct Layout {
  const void* array_type = nullptr;
  const void* none = nullptr;
  int count = 0;
  const void* dtypes[kMaxDTypes] = {};  // dtype objects are unique for NumPy's own types
  DLDataType dlpack[kMaxDTypes] = {};
};

Layout layout;

struct ArrayTensor {
  DLTensor tensor;
  int64_t strides[fk::kMaxDims];
};

// Describes an array. Returns false where the object is no array of NumPy's own type and a known
// dtype.
bool describe(const ArrayObject* array, ArrayTensor* out) {
  if (array->type != layout.array_type || array->ndim > fk::kMaxDims) return false;
  int i = 0;
  while (i < layout.count && layout.dtypes[i] != array->dtype) ++i;
  if (i == layout.count) return false;
  DLTensor& t = out->tensor;
  t.data = array->data;
  t.device = {kDLCPU, 0};
  t.ndim = array->ndim;
  t.dtype = layout.dlpack[i];
  t.shape = const_cast<int64_t*>(array->shape);
  t.strides = out->strides;
  t.byte_offset = 0;
  const int64_t item = t.dtype.bits / 8;
  for (int d = 0; d < array->ndim; ++d) {
    if (array->byte_strides[d] % item != 0) return false;
    out->strides[d] = array->byte_strides[d] / item;
  }
  return reinterpret_cast<uintptr_t>(array->data) % item == 0;
}

constexpr int kMaxTensors = 24;
constexpr int kMaxSlots = 64;
constexpr int kUseSlowPath = -1;

}  // namespace

extern "C" {

FK_API void fk_numpy_set_layout(const void* array_type, const void* none) {
  layout = Layout();
  layout.array_type = array_type;
  layout.none = none;
}

FK_API void fk_numpy_add_dtype(const void* dtype, int code, int bits) {
  if (layout.count == kMaxDTypes) return;
  layout.dtypes[layout.count] = dtype;
  layout.dlpack[layout.count] = {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  ++layout.count;
}

// Does as fk_op_call on CPU tensors, with workspace from the heap.
FK_API int fk_cpu_call(const fk_op* op, const fk_slot* slots) {
  fk::HeapWorkspace workspace;
  fk_exec exec = FK_EXEC_DEFAULTS;
  workspace.serve(&exec);
  return fk_op_call(op, slots, &exec);
}

// Does as fk_op_call, with the addresses of array objects (or of None) in the tensors' slots.
// Returns -1, having done nothing, where it cannot describe an argument.
FK_API int fk_numpy_call(const fk_op* op, const void* packed) {
  // The call itself says what is wrong with these.
  if (op == nullptr || packed == nullptr) return fk_op_call(op, nullptr, nullptr);
  const uint64_t* values = static_cast<const uint64_t*>(packed);
  const auto& fields = op->declaration.fields;
  fk_slot slots[kMaxSlots];
  ArrayTensor tensors[kMaxTensors];
  int used = 0;
  if (fields.size() > kMaxSlots) return kUseSlowPath;
  for (size_t i = 0; i < fields.size(); ++i) {
    if (fields[i].kind != fk::Kind::kInput && fields[i].kind != fk::Kind::kOutput) {
      slots[i].integer = static_cast<int64_t>(values[i]);
      continue;
    }
    const auto* array = reinterpret_cast<const ArrayObject*>(values[i]);
    if (array == layout.none || array == nullptr) {
      slots[i].tensor = nullptr;
      continue;
    }
    if (used == kMaxTensors || !describe(array, &tensors[used])) return kUseSlowPath;
    slots[i].tensor = &tensors[used++].tensor;
  }
  return fk_cpu_call(op, slots);
}

}  // extern "C"
