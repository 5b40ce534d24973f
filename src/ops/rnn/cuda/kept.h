// The implementations that keep the recurrent weights for all steps: "cuda_persistent", one block
// or blocks that meet in global memory, and "cuda_sm90", the blocks of a cluster.
//
// They take calls of at least two steps without a projection, whose reset gate, if any, meets the
// product with h; in float32 and float16, and in bfloat16 where tensor cores multiply it; whose
// weights fit into the registers of the blocks that the device, or a cluster, holds at once. Other
// calls take a launch for each step ("cuda").
#pragma once

#include "core/exec.h"
#include "ops/rnn/rnn.h"

namespace fk {

#define FK_RNN_KEPT(Args)                      \
  bool accepts(const Args& a);                 \
  Status run(const Args& a, const Exec& exec); \
  size_t workspace(const Args& a);

namespace cuda_persistent {
FK_RNN_KEPT(LstmFwd)
FK_RNN_KEPT(LstmBwd)
FK_RNN_KEPT(GruFwd)
FK_RNN_KEPT(GruBwd)
}  // namespace cuda_persistent

namespace cuda_sm90 {
FK_RNN_KEPT(LstmFwd)
FK_RNN_KEPT(LstmBwd)
FK_RNN_KEPT(GruFwd)
FK_RNN_KEPT(GruBwd)
}  // namespace cuda_sm90

#undef FK_RNN_KEPT

}  // namespace fk
