// FlashKernel's header and a whole DLPack header in one file, in either order (FIRST, SECOND): the
// same names with the same layout.
#include FIRST
#include SECOND

#include <cstddef>

static_assert(DLPACK_MAJOR_VERSION == 1 && DLPACK_MINOR_VERSION >= 1);
static_assert(sizeof(DLPackVersion) == 8 && offsetof(DLPackVersion, minor) == 4);
static_assert(sizeof(DLDevice) == 8 && sizeof(DLDataType) == 4);
static_assert(sizeof(DLTensor) == 48 && offsetof(DLTensor, byte_offset) == 40);
static_assert(sizeof(DLManagedTensor) == 64);
static_assert(offsetof(DLManagedTensor, manager_ctx) == 48);
static_assert(offsetof(DLManagedTensor, deleter) == 56);
static_assert(sizeof(DLManagedTensorVersioned) == 80);
static_assert(offsetof(DLManagedTensorVersioned, manager_ctx) == 8);
static_assert(offsetof(DLManagedTensorVersioned, deleter) == 16);
static_assert(offsetof(DLManagedTensorVersioned, flags) == 24);
static_assert(offsetof(DLManagedTensorVersioned, dl_tensor) == 32);
static_assert(DLPACK_FLAG_BITMASK_READ_ONLY == 1 && DLPACK_FLAG_BITMASK_IS_COPIED == 2);
static_assert(DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED == 4);
static_assert(kDLOpenCL == 4 && kDLVulkan == 7 && kDLMetal == 8 && kDLVPI == 9 && kDLROCM == 10);
static_assert(kDLROCMHost == 11 && kDLExtDev == 12 && kDLCUDAManaged == 13 && kDLOneAPI == 14);
static_assert(kDLWebGPU == 15 && kDLHexagon == 16 && kDLMAIA == 17);
static_assert(kDLBool == 6 && kDLFloat8_e3m4 == 7 && kDLFloat8_e4m3 == 8);
static_assert(kDLFloat8_e4m3b11fnuz == 9 && kDLFloat8_e4m3fn == FLASHKERNEL_DL_FLOAT8_E4M3FN);
static_assert(kDLFloat8_e4m3fnuz == 11 && kDLFloat8_e5m2 == 12 && kDLFloat8_e5m2fnuz == 13);
static_assert(kDLFloat8_e8m0fnu == 14 && kDLFloat6_e2m3fn == 15 && kDLFloat6_e3m2fn == 16);
static_assert(kDLFloat4_e2m1fn == 17);
