// FlashKernel's C ABI.
//
// Every op is called the same way: fill the op's argument struct (flashkernel/ops.h, generated from
// the op declarations), ask for its workspace, pass both in:
//
//   fk_rms_norm_fwd_args args = FK_RMS_NORM_FWD_DEFAULTS;
//   args.x = &x;
//   args.y = &y;
//   fk_exec exec = FK_EXEC_DEFAULTS;
//   fk_rms_norm_fwd_workspace(&args, &exec.workspace_bytes);
//   exec.workspace = aligned_alloc(64, exec.workspace_bytes);
//   if (fk_rms_norm_fwd(&args, &exec) != FK_OK) puts(fk_last_error());
//
// Tensors are borrowed for the duration of the call. On CUDA a call only enqueues work on
// exec.stream: it neither allocates nor synchronises, so it can be captured in a CUDA graph.
#ifndef FLASHKERNEL_H_
#define FLASHKERNEL_H_

#include "flashkernel/abi.h"
#include "flashkernel/ops.h"

#endif  // FLASHKERNEL_H_
