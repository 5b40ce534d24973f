// DLPack's tensor struct. The system's own header is used where there is one; otherwise the few
// declarations FlashKernel needs, with the same layout (DLPack ABI version 1).
#ifndef FLASHKERNEL_DLPACK_H_
#define FLASHKERNEL_DLPACK_H_

#if defined(__has_include)
#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#define FLASHKERNEL_HAS_SYSTEM_DLPACK 1
#endif
#endif

#if !defined(FLASHKERNEL_HAS_SYSTEM_DLPACK) && !defined(DLPACK_DLPACK_H_)
#define DLPACK_DLPACK_H_
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3 } DLDeviceType;

typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;

typedef enum {
  kDLInt = 0U,
  kDLUInt = 1U,
  kDLFloat = 2U,
  kDLOpaqueHandle = 3U,
  kDLBfloat = 4U,
  kDLComplex = 5U,
  kDLBool = 6U
} DLDataTypeCode;

typedef struct {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DLDataType;

typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; NULL means row-major contiguous
  uint64_t byte_offset;
} DLTensor;

#ifdef __cplusplus
}
#endif
#endif  // no system dlpack

// kDLFloat8_e4m3fn, which headers before DLPack 1.1 lack.
#define FLASHKERNEL_DL_FLOAT8_E4M3FN 10

#endif  // FLASHKERNEL_DLPACK_H_
