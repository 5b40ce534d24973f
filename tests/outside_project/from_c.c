/* rms_norm of one row through the C ABI, and the message of a bad call. */
#include <flashkernel/flashkernel.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static DLTensor view(float* data, int64_t* shape) {
  DLTensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = 2;
  t.dtype.code = kDLFloat;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

int main(void) {
  float x[4] = {1, 2, 3, 4}, y[4] = {0};
  int64_t shape[2] = {1, 4}, wrong[2] = {1, 3};
  DLTensor xt = view(x, shape), yt = view(y, shape), bad = view(y, wrong);

  fk_rms_norm_fwd_args args = FK_RMS_NORM_FWD_DEFAULTS;
  args.x = &xt;
  args.y = &yt;
  fk_exec exec = FK_EXEC_DEFAULTS;
  if (fk_rms_norm_fwd_workspace(&args, &exec.workspace_bytes) != FK_OK) return 1;
  void* memory = NULL;
  if (posix_memalign(&memory, 256, exec.workspace_bytes + 1) != 0) return 1;
  exec.workspace = memory;
  if (fk_rms_norm_fwd(&args, &exec) != FK_OK) {
    fprintf(stderr, "%s\n", fk_last_error());
    return 1;
  }
  free(memory);
  const double rms = sqrt((1 + 4 + 9 + 16) / 4.0 + 1e-6);
  for (int i = 0; i < 4; ++i) {
    if (fabs(y[i] - x[i] / rms) > 1e-5) return 1;
  }

  args.y = &bad;
  if (fk_rms_norm_fwd(&args, &exec) != FK_INVALID_ARGUMENT) return 1;
  printf("%s\n%s\n", fk_version(), fk_last_error());
  return 0;
}
