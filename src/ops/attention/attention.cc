// This file checks the arguments of attention beyond their types and shapes, and lists what
// implements it.
#include "ops/attention/attention.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/access.h"
#include "ops/attention/problem.h"

namespace fk {

namespace {

constexpr int64_t kMaxHeadDim = 256;

// Query i sits at i + Lk - Lq, which must be a row of the tables.
Status check_positions(int64_t queries, int64_t keys, int64_t table, const std::string& where) {
  if (queries > keys) {
    return invalid("rotary: expected no more queries than keys" + where +
                   " (query i sits at key i + Lk - Lq), got " + std::to_string(queries) +
                   " queries and " + std::to_string(keys) + " keys");
  }
  if (keys > table) {
    return invalid("rotary: expected at least " + std::to_string(keys) + " rows (one per key" +
                   where + "), got " + std::to_string(table));
  }
  return {};
}

template <class Args>
Status check_rotary(const Args& a) {
  if (!a.rotary_cos && !a.rotary_sin) return {};
  if (!a.rotary_cos || !a.rotary_sin) {
    return invalid("rotary: expected both cosines and sines, got one of them");
  }
  const int64_t table = a.rotary_cos.size(0), pairs = a.rotary_cos.size(1);
  if (2 * pairs > a.q.size(-1)) {
    return invalid("rotary: expected at most " + std::to_string(a.q.size(-1) / 2) +
                   " columns (half of q's last size), got " + std::to_string(pairs));
  }
  if (a.q.ndim == 4) return check_positions(a.q.size(1), a.k.size(1), table, "");
  // Where they cannot be read, kernels stay inside the tables whatever they say.
  if (!readable(a.cu_seqlens_q) || !readable(a.cu_seqlens_k)) return {};
  const attention::Problem p = attention::problem_of(a);
  for (int64_t b = 0; b < p.batch; ++b) {
    const attention::Sequence s = p.sequence(b);
    FK_RETURN_IF_ERROR(
        check_positions(s.q_len, s.k_len, table, " in sequence " + std::to_string(b)));
  }
  return {};
}

// A tensor with a value for each head may have a row of them for each packed sequence.
template <class Args>
Status check_rows(const char* name, const Tensor& t, const Args& a) {
  if (!t || t.ndim != 2 || a.q.ndim != 3 || t.size(0) == a.cu_seqlens_q.size(0) - 1) return {};
  return invalid(std::string(name) + ": expected " + std::to_string(a.cu_seqlens_q.size(0) - 1) +
                 " rows, one per sequence, got " + std::to_string(t.size(0)));
}

// Checks what the forward and the backward ask alike.
template <class Args>
Status check(const Args& a) {
  const int64_t heads = a.q.size(-2), kv_heads = a.k.size(-2);
  const bool packed = a.q.ndim == 3;
  if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0) {
    return invalid("k: expected a number of heads that divides q's " + std::to_string(heads) +
                   ", got " + std::to_string(kv_heads));
  }
  if (a.q.size(-1) > kMaxHeadDim) {
    return invalid("q: expected a last size of at most " + std::to_string(kMaxHeadDim) + ", got " +
                   std::to_string(a.q.size(-1)));
  }
  if (a.v.size(-1) > kMaxHeadDim) {
    return invalid("v: expected a last size of at most " + std::to_string(kMaxHeadDim) + ", got " +
                   std::to_string(a.v.size(-1)));
  }
  for (const auto& [name, t] :
       {std::pair<const char*, const Tensor*>{"q", &a.cu_seqlens_q}, {"k", &a.cu_seqlens_k}}) {
    const std::string argument = std::string("cu_seqlens_") + name;
    if (packed && !*t) {
      return invalid(argument + ": expected offsets, since q has 3 dimensions (packed), got none");
    }
    if (!packed && *t) {
      return invalid(argument + ": expected none, since q has 4 dimensions (a batch), got offsets");
    }
    if (packed && t->size(0) == 0) {
      return invalid(argument + ": expected at least 1 value, got none");
    }
  }
  if (packed && a.bias) return invalid("bias: expected none for packed sequences, got a tensor");
  FK_RETURN_IF_ERROR(check_rows("alibi_slopes", a.alibi_slopes, a));
  return check_rotary(a);
}

}  // namespace

Status AttentionFwd::validate(const AttentionFwd& a) {
  FK_RETURN_IF_ERROR(check(a));
  FK_RETURN_IF_ERROR(check_rows("q_scale", a.q_scale, a));
  FK_RETURN_IF_ERROR(check_rows("k_scale", a.k_scale, a));
  return check_rows("v_scale", a.v_scale, a);
}

Status AttentionBwd::validate(const AttentionBwd& a) { return check(a); }

#if FK_HAVE_CUDA
namespace {

template <class Args>
bool accepts_16_bits(const Args& a) {
  return cuda_sm90::takes(a) && cuda_sm90::aligned(a);
}
bool accepts_float8(const AttentionFwd& a) {
  return cuda_sm90::takes_float8(a) && cuda_sm90::aligned(a);
}

// Which kernel takes a call depends on addresses, which may be unknown, or others, when its
// workspace is asked for: so it is as large as any kernel needs that may take the call.
size_t gpu_workspace(const AttentionFwd& a) {
  const size_t portable = cuda::workspace(a);
  if (cuda_sm90::takes_float8(a)) return std::max(portable, cuda_sm90::float8_workspace(a));
  return cuda_sm90::takes(a) ? std::max(portable, cuda_sm90::workspace(a)) : portable;
}
size_t gpu_workspace(const AttentionBwd& a) {
  const size_t portable = cuda::workspace(a);
  return cuda_sm90::takes(a) ? std::max(portable, cuda_sm90::workspace(a)) : portable;
}

}  // namespace
#endif

void register_attention(Registry& registry) {
  registry.add<AttentionFwd>({{"reference", kReference, nullptr, reference::run},
                              {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
  registry.add<AttentionBwd>({{"reference", kReference, nullptr, reference::run},
                              {"cpu", kPortable, nullptr, cpu::run, cpu::workspace}});
#if FK_HAVE_CUDA
  registry.add_cuda<AttentionFwd>(
      {{"cuda", kPortable, nullptr, cuda::run, gpu_workspace},
       {"cuda_sm90", kTuned, accepts_16_bits<AttentionFwd>, cuda_sm90::run, gpu_workspace},
       {"cuda_sm90_float32", kTuned, cuda_sm90::accepts_float32, cuda_sm90::run_float32,
        gpu_workspace},
       {"cuda_sm90_fp8", kTuned, accepts_float8, cuda_sm90::run_float8, gpu_workspace}});
  registry.add_cuda<AttentionBwd>(
      {{"cuda", kPortable, nullptr, cuda::run, gpu_workspace},
       {"cuda_sm90", kTuned, accepts_16_bits<AttentionBwd>, cuda_sm90::run, gpu_workspace}});
#endif
}

}  // namespace fk
