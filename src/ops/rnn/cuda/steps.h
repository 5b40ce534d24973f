// The implementation "cuda": a launch for each step (steps.cuh), for every call.
#pragma once

#include "core/exec.h"
#include "ops/rnn/rnn.h"

namespace fk::cuda {

Status run(const LstmFwd& a, const Exec& exec);
Status run(const LstmBwd& a, const Exec& exec);
Status run(const GruFwd& a, const Exec& exec);
Status run(const GruBwd& a, const Exec& exec);
size_t workspace(const LstmFwd& a);
size_t workspace(const LstmBwd& a);
size_t workspace(const GruFwd& a);
size_t workspace(const GruBwd& a);

}  // namespace fk::cuda
