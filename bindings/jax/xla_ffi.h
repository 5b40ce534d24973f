// This file declares the part of XLA's FFI C API that FlashKernel uses, so that the build needs no
// JAX. Layouts are those of xla/ffi/api/c_api.h; tests/bindings/test_jax.py checks them against the
// header that the installed jaxlib carries. XLA only ever adds fields at the end of a struct, and
// `struct_size` says how much of it the runtime knows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fk::xla {

struct Error;             // opaque
struct ExecutionContext;  // opaque
struct Future;            // opaque

enum class ExtensionType : int32_t { kMetadata = 1 };

struct Extension {
  size_t struct_size;
  ExtensionType type;
  Extension* next;
};

struct ApiVersion {
  size_t struct_size;
  Extension* extension_start;
  int major_version;
  int minor_version;
};

// This is the oldest version that has everything below; a runtime takes all versions up to its own.
constexpr int kApiMajor = 0;
constexpr int kApiMinor = 1;

enum class ErrorCode : int32_t {
  kInvalidArgument = 3,
  kUnimplemented = 12,
  kInternal = 13,
};

struct ErrorCreateArgs {
  size_t struct_size;
  Extension* extension_start;
  const char* message;
  ErrorCode code;
};

enum class DataType : int32_t {
  kPred = 1,
  kS8 = 2,
  kS32 = 4,
  kS64 = 5,
  kU8 = 6,
  kF16 = 10,
  kF32 = 11,
  kF64 = 12,
  kBF16 = 16,
  kF8E4M3FN = 20,
};

struct Buffer {
  size_t struct_size;
  Extension* extension_start;
  DataType dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

enum class ArgumentType : int32_t { kBuffer = 1 };
enum class ResultType : int32_t { kBuffer = 1 };
enum class AttributeType : int32_t { kArray = 1, kScalar = 3, kString = 4 };

struct ByteSpan {
  const char* data;
  size_t size;
};

struct Scalar {
  DataType dtype;
  void* value;
};

struct Array {
  DataType dtype;
  size_t size;
  void* data;
};

enum class Stage : int32_t { kInstantiate = 0, kPrepare = 1, kInitialize = 2, kExecute = 3 };

struct Arguments {
  size_t struct_size;
  Extension* extension_start;
  int64_t size;
  ArgumentType* types;
  void** values;
};

struct Results {
  size_t struct_size;
  Extension* extension_start;
  int64_t size;
  ResultType* types;
  void** values;
};

struct Attributes {
  size_t struct_size;
  Extension* extension_start;
  int64_t size;
  AttributeType* types;
  ByteSpan** names;
  void** values;
};

struct StreamGetArgs {
  size_t struct_size;
  Extension* extension_start;
  ExecutionContext* context;
  void* stream;  // out
};

struct DeviceOrdinalGetArgs {
  size_t struct_size;
  Extension* extension_start;
  ExecutionContext* context;
  int32_t device_ordinal;  // out
};

struct ErrorGetMessageArgs {
  size_t struct_size;
  Extension* extension_start;
  Error* error;
  const char* message;  // out
};

struct ErrorDestroyArgs {
  size_t struct_size;
  Extension* extension_start;
  Error* error;
};

struct DeviceMemoryAllocateArgs {
  size_t struct_size;
  Extension* extension_start;
  ExecutionContext* context;
  size_t size;
  size_t alignment;
  void* data;  // out
};

struct DeviceMemoryFreeArgs {
  size_t struct_size;
  Extension* extension_start;
  ExecutionContext* context;
  size_t size;
  void* data;
};

struct CallFrame;
using Handler = Error* (*)(CallFrame*);

// Lists the functions of a handler, one for each stage; all but the last may be NULL.
struct HandlerBundle {
  Handler instantiate, prepare, initialize, execute;
};

struct HandlerRegisterArgs {
  size_t struct_size;
  Extension* extension_start;
  ByteSpan name;
  ByteSpan platform;
  HandlerBundle bundle;
  uint32_t traits;
};

using Unused = void (*)();

struct Api {
  size_t struct_size;
  Extension* extension_start;
  ApiVersion api_version;
  const void* internal_api;
  Error* (*error_create)(ErrorCreateArgs*);
  void (*error_get_message)(ErrorGetMessageArgs*);
  void (*error_destroy)(ErrorDestroyArgs*);
  Error* (*handler_register)(HandlerRegisterArgs*);
  Error* (*stream_get)(StreamGetArgs*);
  Unused type_register;
  Unused execution_context_get;
  Unused state_set;
  Unused state_get;
  Error* (*device_memory_allocate)(DeviceMemoryAllocateArgs*);
  Error* (*device_memory_free)(DeviceMemoryFreeArgs*);
  Unused thread_pool_schedule;
  Unused thread_pool_num_threads;
  Unused future_create;
  Unused future_set_available;
  Unused future_set_error;
  Unused run_id_get;
  Error* (*device_ordinal_get)(DeviceOrdinalGetArgs*);
};

struct CallFrame {
  size_t struct_size;
  Extension* extension_start;
  const Api* api;
  ExecutionContext* context;
  Stage stage;
  Arguments arguments;
  Results results;
  Attributes attributes;
  Future* future;
};

// Calls launch the same device work every time, so that they may be captured in a CUDA graph.
constexpr uint32_t kCommandBufferCompatible = 1u << 0;

struct Metadata {
  size_t struct_size;
  ApiVersion api_version;
  uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

}  // namespace fk::xla
