// Linear layers whose weight is packed once, as FlashKernel's C ABI. They run on the CPU.
#ifndef FLASHKERNEL_LINEAR_H_
#define FLASHKERNEL_LINEAR_H_

#include "flashkernel/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fk_packed_linear fk_packed_linear;

// Copies `weight` (out, in) and `bias` (out), which may be NULL, into memory of the layer. dtype:
// how the weight is kept, "float32", "bfloat16" or "int8"; NULL: bfloat16 if it is that, else
// float32. activation: as linear's names, "" or NULL for none.
FK_API fk_status fk_packed_linear_open(const DLTensor* weight, const DLTensor* bias,
                                       const char* dtype, const char* activation,
                                       fk_packed_linear** packed);
FK_API void fk_packed_linear_close(fk_packed_linear* packed);
// Bytes of the packed weight.
FK_API int64_t fk_packed_linear_bytes(const fk_packed_linear* packed);
// y = act(x weight^T + bias) for x (..., in) and y (..., out), of one dtype and in different
// memory. Any number of threads may call at once. Of `exec`, which may be NULL, only the threads
// count.
FK_API fk_status fk_packed_linear_call(const fk_packed_linear* packed, const DLTensor* x,
                                       DLTensor* y, const fk_exec* exec);

#ifdef __cplusplus
}
#endif

#endif  // FLASHKERNEL_LINEAR_H_
