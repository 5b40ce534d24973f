// Compiled (never run) by test_jax.py against the header that jaxlib carries:
// bindings/jax/xla_ffi.h must lay out every struct as XLA does, up to the last field it declares.
#include <cstddef>
#include <type_traits>

#include "bindings/jax/xla_ffi.h"
#include "xla/ffi/api/c_api.h"

namespace ours = fk::xla;
// XLA has renamed this struct once.
using TheirExtension = std::remove_pointer_t<decltype(XLA_FFI_Api_Version::extension_start)>;

#define SAME_FIELD(our_type, our_field, their_type, their_field)                           \
  static_assert(offsetof(ours::our_type, our_field) == offsetof(their_type, their_field)); \
  static_assert(sizeof(ours::our_type::our_field) == sizeof(((their_type*)nullptr)->their_field))
#define SAME_HEAD(our_type, their_type)                       \
  SAME_FIELD(our_type, struct_size, their_type, struct_size); \
  SAME_FIELD(our_type, extension_start, their_type, extension_start)
// For structs that we create or that lie inside others: nothing may have been added either.
#define SAME_SIZE(our_type, their_type) static_assert(sizeof(ours::our_type) == sizeof(their_type))
#define SAME_VALUE(our_value, their_value) \
  static_assert(static_cast<int>(ours::our_value) == static_cast<int>(their_value))

SAME_SIZE(Extension, TheirExtension);
SAME_FIELD(Extension, struct_size, TheirExtension, struct_size);
SAME_FIELD(Extension, type, TheirExtension, type);
SAME_FIELD(Extension, next, TheirExtension, next);

SAME_SIZE(ApiVersion, XLA_FFI_Api_Version);
SAME_HEAD(ApiVersion, XLA_FFI_Api_Version);
SAME_FIELD(ApiVersion, major_version, XLA_FFI_Api_Version, major_version);
SAME_FIELD(ApiVersion, minor_version, XLA_FFI_Api_Version, minor_version);

SAME_SIZE(ErrorCreateArgs, XLA_FFI_Error_Create_Args);
SAME_HEAD(ErrorCreateArgs, XLA_FFI_Error_Create_Args);
SAME_FIELD(ErrorCreateArgs, message, XLA_FFI_Error_Create_Args, message);
SAME_FIELD(ErrorCreateArgs, code, XLA_FFI_Error_Create_Args, errc);

SAME_HEAD(Buffer, XLA_FFI_Buffer);
SAME_FIELD(Buffer, dtype, XLA_FFI_Buffer, dtype);
SAME_FIELD(Buffer, data, XLA_FFI_Buffer, data);
SAME_FIELD(Buffer, rank, XLA_FFI_Buffer, rank);
SAME_FIELD(Buffer, dims, XLA_FFI_Buffer, dims);

SAME_SIZE(ByteSpan, XLA_FFI_ByteSpan);
SAME_FIELD(ByteSpan, data, XLA_FFI_ByteSpan, ptr);
SAME_FIELD(ByteSpan, size, XLA_FFI_ByteSpan, len);

SAME_SIZE(Scalar, XLA_FFI_Scalar);
SAME_FIELD(Scalar, dtype, XLA_FFI_Scalar, dtype);
SAME_FIELD(Scalar, value, XLA_FFI_Scalar, value);

SAME_SIZE(Arguments, XLA_FFI_Args);
SAME_HEAD(Arguments, XLA_FFI_Args);
SAME_FIELD(Arguments, size, XLA_FFI_Args, size);
SAME_FIELD(Arguments, types, XLA_FFI_Args, types);
SAME_FIELD(Arguments, values, XLA_FFI_Args, args);

SAME_SIZE(Results, XLA_FFI_Rets);
SAME_HEAD(Results, XLA_FFI_Rets);
SAME_FIELD(Results, size, XLA_FFI_Rets, size);
SAME_FIELD(Results, types, XLA_FFI_Rets, types);
SAME_FIELD(Results, values, XLA_FFI_Rets, rets);

SAME_SIZE(Attributes, XLA_FFI_Attrs);
SAME_HEAD(Attributes, XLA_FFI_Attrs);
SAME_FIELD(Attributes, size, XLA_FFI_Attrs, size);
SAME_FIELD(Attributes, types, XLA_FFI_Attrs, types);
SAME_FIELD(Attributes, names, XLA_FFI_Attrs, names);
SAME_FIELD(Attributes, values, XLA_FFI_Attrs, attrs);

SAME_SIZE(StreamGetArgs, XLA_FFI_Stream_Get_Args);
SAME_HEAD(StreamGetArgs, XLA_FFI_Stream_Get_Args);
SAME_FIELD(StreamGetArgs, context, XLA_FFI_Stream_Get_Args, ctx);
SAME_FIELD(StreamGetArgs, stream, XLA_FFI_Stream_Get_Args, stream);

SAME_SIZE(DeviceOrdinalGetArgs, XLA_FFI_DeviceOrdinal_Get_Args);
SAME_HEAD(DeviceOrdinalGetArgs, XLA_FFI_DeviceOrdinal_Get_Args);
SAME_FIELD(DeviceOrdinalGetArgs, context, XLA_FFI_DeviceOrdinal_Get_Args, ctx);
SAME_FIELD(DeviceOrdinalGetArgs, device_ordinal, XLA_FFI_DeviceOrdinal_Get_Args, device_ordinal);

SAME_SIZE(ErrorDestroyArgs, XLA_FFI_Error_Destroy_Args);
SAME_HEAD(ErrorDestroyArgs, XLA_FFI_Error_Destroy_Args);
SAME_FIELD(ErrorDestroyArgs, error, XLA_FFI_Error_Destroy_Args, error);

SAME_SIZE(DeviceMemoryAllocateArgs, XLA_FFI_DeviceMemory_Allocate_Args);
SAME_HEAD(DeviceMemoryAllocateArgs, XLA_FFI_DeviceMemory_Allocate_Args);
SAME_FIELD(DeviceMemoryAllocateArgs, context, XLA_FFI_DeviceMemory_Allocate_Args, ctx);
SAME_FIELD(DeviceMemoryAllocateArgs, size, XLA_FFI_DeviceMemory_Allocate_Args, size);
SAME_FIELD(DeviceMemoryAllocateArgs, alignment, XLA_FFI_DeviceMemory_Allocate_Args, alignment);
SAME_FIELD(DeviceMemoryAllocateArgs, data, XLA_FFI_DeviceMemory_Allocate_Args, data);

SAME_SIZE(DeviceMemoryFreeArgs, XLA_FFI_DeviceMemory_Free_Args);
SAME_HEAD(DeviceMemoryFreeArgs, XLA_FFI_DeviceMemory_Free_Args);
SAME_FIELD(DeviceMemoryFreeArgs, context, XLA_FFI_DeviceMemory_Free_Args, ctx);
SAME_FIELD(DeviceMemoryFreeArgs, size, XLA_FFI_DeviceMemory_Free_Args, size);
SAME_FIELD(DeviceMemoryFreeArgs, data, XLA_FFI_DeviceMemory_Free_Args, data);

SAME_HEAD(Api, XLA_FFI_Api);
SAME_FIELD(Api, error_destroy, XLA_FFI_Api, XLA_FFI_Error_Destroy);
SAME_FIELD(Api, device_memory_allocate, XLA_FFI_Api, XLA_FFI_DeviceMemory_Allocate);
SAME_FIELD(Api, device_memory_free, XLA_FFI_Api, XLA_FFI_DeviceMemory_Free);
SAME_FIELD(Api, api_version, XLA_FFI_Api, api_version);
SAME_FIELD(Api, error_create, XLA_FFI_Api, XLA_FFI_Error_Create);
SAME_FIELD(Api, stream_get, XLA_FFI_Api, XLA_FFI_Stream_Get);
SAME_FIELD(Api, device_ordinal_get, XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get);

SAME_HEAD(CallFrame, XLA_FFI_CallFrame);
SAME_FIELD(CallFrame, api, XLA_FFI_CallFrame, api);
SAME_FIELD(CallFrame, context, XLA_FFI_CallFrame, ctx);
SAME_FIELD(CallFrame, stage, XLA_FFI_CallFrame, stage);
SAME_FIELD(CallFrame, arguments, XLA_FFI_CallFrame, args);
SAME_FIELD(CallFrame, results, XLA_FFI_CallFrame, rets);
SAME_FIELD(CallFrame, attributes, XLA_FFI_CallFrame, attrs);

SAME_FIELD(Metadata, struct_size, XLA_FFI_Metadata, struct_size);
SAME_FIELD(Metadata, api_version, XLA_FFI_Metadata, api_version);
SAME_FIELD(Metadata, traits, XLA_FFI_Metadata, traits);
SAME_FIELD(MetadataExtension, base, XLA_FFI_Metadata_Extension, extension_base);
SAME_FIELD(MetadataExtension, metadata, XLA_FFI_Metadata_Extension, metadata);

SAME_VALUE(ExtensionType::kMetadata, XLA_FFI_Extension_Metadata);
SAME_VALUE(ErrorCode::kInvalidArgument, XLA_FFI_Error_Code_INVALID_ARGUMENT);
SAME_VALUE(ErrorCode::kUnimplemented, XLA_FFI_Error_Code_UNIMPLEMENTED);
SAME_VALUE(ErrorCode::kInternal, XLA_FFI_Error_Code_INTERNAL);
SAME_VALUE(DataType::kPred, XLA_FFI_DataType_PRED);
SAME_VALUE(DataType::kS8, XLA_FFI_DataType_S8);
SAME_VALUE(DataType::kS32, XLA_FFI_DataType_S32);
SAME_VALUE(DataType::kS64, XLA_FFI_DataType_S64);
SAME_VALUE(DataType::kU8, XLA_FFI_DataType_U8);
SAME_VALUE(DataType::kF8E4M3FN, XLA_FFI_DataType_F8E4M3FN);
SAME_VALUE(DataType::kF16, XLA_FFI_DataType_F16);
SAME_VALUE(DataType::kF32, XLA_FFI_DataType_F32);
SAME_VALUE(DataType::kF64, XLA_FFI_DataType_F64);
SAME_VALUE(DataType::kBF16, XLA_FFI_DataType_BF16);
SAME_VALUE(ArgumentType::kBuffer, XLA_FFI_ArgType_BUFFER);
SAME_VALUE(ResultType::kBuffer, XLA_FFI_RetType_BUFFER);
SAME_VALUE(AttributeType::kScalar, XLA_FFI_AttrType_SCALAR);
SAME_VALUE(AttributeType::kString, XLA_FFI_AttrType_STRING);
SAME_VALUE(Stage::kInstantiate, XLA_FFI_ExecutionStage_INSTANTIATE);
SAME_VALUE(Stage::kPrepare, XLA_FFI_ExecutionStage_PREPARE);
SAME_VALUE(Stage::kInitialize, XLA_FFI_ExecutionStage_INITIALIZE);
SAME_VALUE(Stage::kExecute, XLA_FFI_ExecutionStage_EXECUTE);
SAME_VALUE(kCommandBufferCompatible, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
static_assert(ours::kApiMajor == XLA_FFI_API_MAJOR && ours::kApiMinor <= XLA_FFI_API_MINOR);

SAME_SIZE(Array, XLA_FFI_Array);
SAME_FIELD(Array, dtype, XLA_FFI_Array, dtype);
SAME_FIELD(Array, size, XLA_FFI_Array, size);
SAME_FIELD(Array, data, XLA_FFI_Array, data);
SAME_VALUE(AttributeType::kArray, XLA_FFI_AttrType_ARRAY);

SAME_SIZE(ErrorGetMessageArgs, XLA_FFI_Error_GetMessage_Args);
SAME_HEAD(ErrorGetMessageArgs, XLA_FFI_Error_GetMessage_Args);
SAME_FIELD(ErrorGetMessageArgs, error, XLA_FFI_Error_GetMessage_Args, error);
SAME_FIELD(ErrorGetMessageArgs, message, XLA_FFI_Error_GetMessage_Args, message);

SAME_SIZE(HandlerBundle, XLA_FFI_Handler_Bundle);
SAME_FIELD(HandlerBundle, execute, XLA_FFI_Handler_Bundle, execute);
SAME_SIZE(HandlerRegisterArgs, XLA_FFI_Handler_Register_Args);
SAME_HEAD(HandlerRegisterArgs, XLA_FFI_Handler_Register_Args);
SAME_FIELD(HandlerRegisterArgs, name, XLA_FFI_Handler_Register_Args, name);
SAME_FIELD(HandlerRegisterArgs, platform, XLA_FFI_Handler_Register_Args, platform);
SAME_FIELD(HandlerRegisterArgs, bundle, XLA_FFI_Handler_Register_Args, bundle);
SAME_FIELD(HandlerRegisterArgs, traits, XLA_FFI_Handler_Register_Args, traits);
