// Serves XLA's custom call of every op, on CPU and on CUDA. Its attributes tell what is called:
//   op        the op's name
//   present   bit i is set where slot i holds a tensor
//   the op's own attributes by name (choices by index); those left out take their default
// Operands are the inputs that are present, results the outputs that are present, both in slot
// order; one more result, if there is one, is the workspace. A program whose sizes are symbols has
// none and calls another target on CUDA, which asks XLA for the workspace.
#include <cstdint>
#include <cstring>
#include <string>

#include "core/environment.h"
#include "core/heap_workspace.h"
#include "core/integers.h"
#include "core/last_error.h"
#include "core/op.h"
#include "flashkernel/abi.h"
#include "xla_ffi.h"

namespace fk::xla {
namespace {

constexpr int kMaxSlots = 64;
constexpr uintptr_t kWorkspaceAlignment = 256;

Error* fail(const CallFrame& frame, ErrorCode code, const std::string& message) {
  ErrorCreateArgs args{sizeof(ErrorCreateArgs), nullptr, message.c_str(), code};
  return frame.api->error_create(&args);
}

Error* malformed(const CallFrame& frame, const std::string& message) {
  return fail(frame, ErrorCode::kInvalidArgument, "flashkernel call: " + message);
}

ErrorCode code_of(fk_status status) {
  switch (status) {
    case FK_INVALID_ARGUMENT:
      return ErrorCode::kInvalidArgument;
    case FK_UNSUPPORTED:
      return ErrorCode::kUnimplemented;
    default:
      return ErrorCode::kInternal;
  }
}

// Finds an attribute; -1 if it is not there.
int64_t find(const Attributes& attributes, const char* name) {
  const size_t length = std::strlen(name);
  for (int64_t i = 0; i < attributes.size; ++i) {
    const ByteSpan& n = *attributes.names[i];
    if (n.size == length && std::memcmp(n.data, name, length) == 0) return i;
  }
  return -1;
}

bool read_integer(const Attributes& attributes, int64_t i, int64_t* out) {
  if (attributes.types[i] != AttributeType::kScalar) return false;
  const auto& scalar = *static_cast<const Scalar*>(attributes.values[i]);
  switch (scalar.dtype) {
    case DataType::kS64:
      *out = *static_cast<const int64_t*>(scalar.value);
      return true;
    case DataType::kS32:
      *out = *static_cast<const int32_t*>(scalar.value);
      return true;
    case DataType::kPred:
      *out = *static_cast<const bool*>(scalar.value);
      return true;
    default:
      return false;
  }
}

bool read_number(const Attributes& attributes, int64_t i, double* out) {
  if (attributes.types[i] != AttributeType::kScalar) return false;
  const auto& scalar = *static_cast<const Scalar*>(attributes.values[i]);
  switch (scalar.dtype) {
    case DataType::kF64:
      *out = *static_cast<const double*>(scalar.value);
      return true;
    case DataType::kF32:
      *out = *static_cast<const float*>(scalar.value);
      return true;
    default:
      return false;
  }
}

// Translates a dtype. One that no op takes becomes an opaque one, which the op's own checks then
// refuse by name.
DLDataType dlpack_type(DataType t) {
  switch (t) {
    case DataType::kF32:
      return {kDLFloat, 32, 1};
    case DataType::kF16:
      return {kDLFloat, 16, 1};
    case DataType::kBF16:
      return {kDLBfloat, 16, 1};
    case DataType::kF64:
      return {kDLFloat, 64, 1};
    case DataType::kS32:
      return {kDLInt, 32, 1};
    case DataType::kS64:
      return {kDLInt, 64, 1};
    case DataType::kS8:
      return {kDLInt, 8, 1};
    case DataType::kU8:
      return {kDLUInt, 8, 1};
    case DataType::kPred:
      return {kDLBool, 8, 1};
    case DataType::kF8E4M3FN:
      return {FLASHKERNEL_DL_FLOAT8_E4M3FN, 8, 1};
  }
  return {kDLOpaqueHandle, 8, 1};
}

// Describes XLA's row-major buffer; DLPack reads NULL strides as row-major.
DLTensor describe(const Buffer& buffer, DLDevice device) {
  DLTensor t{};
  t.data = buffer.data;
  t.device = device;
  t.ndim = static_cast<int32_t>(buffer.rank);
  t.dtype = dlpack_type(buffer.dtype);
  t.shape = buffer.dims;
  return t;
}

uintptr_t aligned(const void* memory) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  return round_up(address, kWorkspaceAlignment);
}

// Takes workspace on a GPU from XLA, for a program whose sizes were symbols when it was traced. XLA
// hands memory that is given back only to work that follows on the same stream.
struct DeviceWorkspace {
  const CallFrame& frame;
  void* memory = nullptr;
  size_t bytes = 0;
  Error* error = nullptr;  // what XLA said when it had no memory; the handler returns it

  ~DeviceWorkspace() {
    if (memory == nullptr) return;
    DeviceMemoryFreeArgs args{sizeof(DeviceMemoryFreeArgs), nullptr, frame.context, bytes, memory};
    if (Error* failed = frame.api->device_memory_free(&args)) {
      ErrorDestroyArgs destroyed{sizeof(ErrorDestroyArgs), nullptr, failed};
      frame.api->error_destroy(&destroyed);
    }
  }

  static void* allocate(void* self, size_t needed) {
    auto* workspace = static_cast<DeviceWorkspace*>(self);
    const CallFrame& frame = workspace->frame;
    workspace->bytes = needed + kWorkspaceAlignment;
    DeviceMemoryAllocateArgs args{
        sizeof(DeviceMemoryAllocateArgs), nullptr, frame.context, workspace->bytes, 1, nullptr};
    workspace->error = frame.api->device_memory_allocate(&args);
    if (workspace->error != nullptr) return nullptr;
    workspace->memory = args.data;
    return reinterpret_cast<void*>(aligned(args.data));
  }
};

void use_workspace(const Buffer& buffer, fk_exec* exec) {
  const auto begin = reinterpret_cast<uintptr_t>(buffer.data);
  const uintptr_t first = aligned(buffer.data);
  size_t bytes = 1;
  for (int64_t i = 0; i < buffer.rank; ++i) bytes *= static_cast<size_t>(buffer.dims[i]);
  if (bytes < first - begin) return;
  exec->workspace = reinterpret_cast<void*>(first);
  exec->workspace_bytes = bytes - (first - begin);
}

// Asks for the stream and the GPU of this call.
Error* locate(const CallFrame& frame, fk_exec* exec, DLDevice* device) {
  StreamGetArgs stream{sizeof(StreamGetArgs), nullptr, frame.context, nullptr};
  if (Error* error = frame.api->stream_get(&stream)) return error;
  exec->stream = stream.stream;
  // Runtimes from before this function existed drive one GPU per process in practice.
  const size_t known = offsetof(Api, device_ordinal_get) + sizeof(Api::device_ordinal_get);
  if (frame.api->struct_size < known) return nullptr;
  DeviceOrdinalGetArgs ordinal{sizeof(DeviceOrdinalGetArgs), nullptr, frame.context, 0};
  if (Error* error = frame.api->device_ordinal_get(&ordinal)) return error;
  device->device_id = ordinal.device_ordinal;
  return nullptr;
}

Error* execute(const CallFrame& frame, DLDevice device, bool allocates) {
  const Attributes& attributes = frame.attributes;
  const int64_t name = find(attributes, "op");
  if (name < 0 || attributes.types[name] != AttributeType::kString) {
    return malformed(frame, "expected the attribute 'op', a string");
  }
  const auto& span = *static_cast<const ByteSpan*>(attributes.values[name]);
  const std::string op_name(span.data, span.size);
  const fk_op* op = fk_find_op(op_name.c_str());
  if (op == nullptr) return malformed(frame, "there is no op '" + op_name + "'");
  const auto& fields = op->declaration.fields;
  if (fields.size() > kMaxSlots) return malformed(frame, op_name + " has too many arguments");

  int64_t present = 0;
  const int64_t mask = find(attributes, "present");
  if (mask < 0 || !read_integer(attributes, mask, &present)) {
    return malformed(frame, "expected the attribute 'present', an integer");
  }

  fk_exec exec = FK_EXEC_DEFAULTS;
  if (device.device_type == kDLCUDA) {
    if (Error* error = locate(frame, &exec, &device)) return error;
  }

  fk_slot slots[kMaxSlots];
  DLTensor tensors[kMaxSlots];
  int64_t operands = 0, results = 0;
  for (size_t i = 0; i < fields.size(); ++i) {
    const Field& f = fields[i];
    if (f.kind == Kind::kInput || f.kind == Kind::kOutput) {
      slots[i].tensor = nullptr;
      if ((present >> i & 1) == 0) continue;
      const bool input = f.kind == Kind::kInput;
      int64_t& next = input ? operands : results;
      if (next >= (input ? frame.arguments.size : frame.results.size)) {
        return malformed(frame, op_name + " was given fewer buffers than 'present' names");
      }
      void* buffer = input ? frame.arguments.values[next] : frame.results.values[next];
      ++next;
      tensors[i] = describe(*static_cast<const Buffer*>(buffer), device);
      slots[i].tensor = &tensors[i];
      continue;
    }
    const int64_t attribute = find(attributes, f.name.c_str());
    bool understood = true;
    if (f.kind == Kind::kNumber) {
      slots[i].number = f.number_default;
      if (attribute >= 0) understood = read_number(attributes, attribute, &slots[i].number);
    } else {
      slots[i].integer = f.integer_default;
      if (attribute >= 0) understood = read_integer(attributes, attribute, &slots[i].integer);
    }
    if (!understood) return malformed(frame, op_name + ": " + f.name + ": unexpected type");
  }
  if (operands != frame.arguments.size || frame.results.size - results > 1) {
    return malformed(frame, op_name + " was given more buffers than 'present' names");
  }
  if (results < frame.results.size) {
    use_workspace(*static_cast<const Buffer*>(frame.results.values[results]), &exec);
  }
  HeapWorkspace heap;
  DeviceWorkspace on_device{frame};
  if (device.device_type == kDLCPU) {
    // The workspace was measured when the call was traced. Settings changed since then (threads, a
    // forced implementation) may ask for more.
    heap.serve(&exec);
  } else if (allocates) {
    exec.allocate = DeviceWorkspace::allocate;
    exec.allocator = &on_device;
  }
  const fk_status status = fk_op_call(op, slots, &exec);
  if (on_device.error != nullptr) return on_device.error;
  return status == FK_OK ? nullptr : fail(frame, code_of(status), fk_last_error());
}

// XLA asks for a handler's version and traits by calling it with this extension.
bool answer_metadata(const CallFrame& frame, uint32_t traits) {
  for (Extension* e = frame.extension_start; e != nullptr; e = e->next) {
    if (e->type != ExtensionType::kMetadata) continue;
    Metadata& metadata = *reinterpret_cast<MetadataExtension*>(e)->metadata;
    metadata.api_version.major_version = kApiMajor;
    metadata.api_version.minor_version = kApiMinor;
    metadata.traits = traits;
    return true;
  }
  return false;
}

Error* handle(const CallFrame& frame, DLDevice device, uint32_t traits, bool allocates = false) {
  if (answer_metadata(frame, traits) || frame.stage != Stage::kExecute) return nullptr;
  return without_exceptions(
      [&] { return execute(frame, device, allocates); },
      [&](const char* why) {
        ErrorCreateArgs args{sizeof(ErrorCreateArgs), nullptr, why, ErrorCode::kInternal};
        return frame.api->error_create(&args);
      });
}

}  // namespace
}  // namespace fk::xla

extern "C" {

FK_API fk::xla::Error* fk_xla_call_cpu(fk::xla::CallFrame* frame) {
  return fk::xla::handle(*frame, {kDLCPU, 0}, 0);
}

FK_API fk::xla::Error* fk_xla_call_cuda(fk::xla::CallFrame* frame) {
  // Reading back index tensors to check them would break a capture.
  return fk::xla::handle(*frame, {kDLCUDA, 0},
                         fk::checks_values_on_gpu() ? 0 : fk::xla::kCommandBufferCompatible);
}

// Serves programs whose workspace is not among the results. Allocated by the call, it would be
// other memory in each replay of a captured graph, so that these calls are not captured.
FK_API fk::xla::Error* fk_xla_call_cuda_allocating(fk::xla::CallFrame* frame) {
  return fk::xla::handle(*frame, {kDLCUDA, 0}, 0, /*allocates=*/true);
}

}  // extern "C"
