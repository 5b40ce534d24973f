// lstm and gru: argument checks beyond types and shapes, and what implements them.
#include "ops/rnn/rnn.h"

#include <string>

#include "core/sequences.h"
#include "core/staged.h"
#include "cpu/output_stage.h"
#if FK_HAVE_CUDA
#include "cuda/output_stage.h"
#include "ops/rnn/cuda/kept.h"
#include "ops/rnn/cuda/steps.h"
#endif

namespace fk {

namespace {

// What a forward and its backward check alike.
template <class Args>
Status check_lstm(const Args& a) {
  const int64_t hidden = a.w_ih.size(0) / 4;
  if (!a.w_hr && a.w_hh.size(1) != hidden) {
    return invalid("w_hh: expected " + std::to_string(hidden) +
                   " columns, one per hidden unit (there is no w_hr), got " +
                   std::to_string(a.w_hh.size(1)));
  }
  FK_RETURN_IF_ERROR(check_sequences(a.x, a.cu_seqlens));
  FK_RETURN_IF_ERROR(check_state_rows("h0", a.h0, a.x, a.cu_seqlens));
  return check_state_rows("c0", a.c0, a.x, a.cu_seqlens);
}

template <class Args>
Status check_gru(const Args& a) {
  FK_RETURN_IF_ERROR(check_sequences(a.x, a.cu_seqlens));
  return check_state_rows("h0", a.h0, a.x, a.cu_seqlens);
}

template <class Args>
void add_cpu(Registry& registry) {
  registry.add<Args>(
      {{"reference", kReference, nullptr, reference::run_staged<Args, reference::run>},
       staged<Args, cpu::Stage, cpu::run, cpu::workspace>("cpu", kPortable)});
}

#if FK_HAVE_CUDA
template <class Args>
void add_cuda(Registry& registry) {
  registry.add_cuda<Args>(
      {staged<Args, cuda::Stage, cuda::run, cuda::workspace>("cuda", kPortable),
       staged<Args, cuda::Stage, cuda_persistent::run, cuda_persistent::workspace, false,
              cuda_persistent::accepts>("cuda_persistent", kTuned),
       staged<Args, cuda::Stage, cuda_sm90::run, cuda_sm90::workspace, false, cuda_sm90::accepts>(
           "cuda_sm90", kTunedForChip)});
}
#endif

}  // namespace

Status LstmFwd::validate(const LstmFwd& a) {
  FK_RETURN_IF_ERROR(check_stage(a));
  return check_lstm(a);
}

Status LstmBwd::validate(const LstmBwd& a) {
  FK_RETURN_IF_ERROR(check_stage(a));
  FK_RETURN_IF_ERROR(check_lstm(a));
  FK_RETURN_IF_ERROR(check_state_rows("dh", a.dh, a.x, a.cu_seqlens));
  return check_state_rows("dc", a.dc, a.x, a.cu_seqlens);
}

Status GruFwd::validate(const GruFwd& a) {
  FK_RETURN_IF_ERROR(check_stage(a));
  return check_gru(a);
}

Status GruBwd::validate(const GruBwd& a) {
  FK_RETURN_IF_ERROR(check_stage(a));
  FK_RETURN_IF_ERROR(check_gru(a));
  return check_state_rows("dh", a.dh, a.x, a.cu_seqlens);
}

void register_rnn(Registry& registry) {
  add_cpu<LstmFwd>(registry);
  add_cpu<LstmBwd>(registry);
  add_cpu<GruFwd>(registry);
  add_cpu<GruBwd>(registry);
#if FK_HAVE_CUDA
  add_cuda<LstmFwd>(registry);
  add_cuda<LstmBwd>(registry);
  add_cuda<GruFwd>(registry);
  add_cuda<GruBwd>(registry);
#endif
}

}  // namespace fk
