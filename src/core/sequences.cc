#include "core/sequences.h"

#include <string>

namespace fk {

Status check_sequences(const Tensor& x, const Tensor& cu_seqlens) {
  if (!cu_seqlens) return {};
  if (cu_seqlens.size(0) == 0) return invalid("cu_seqlens: expected at least 1 value, got none");
  if (x.size(0) == 1) return {};
  return invalid("cu_seqlens: expected a batch of 1, sequences being packed along L, got " +
                 std::to_string(x.size(0)));
}

Status check_state_rows(const char* name, const Tensor& state, const Tensor& x,
                        const Tensor& cu_seqlens) {
  const int64_t sequences = cu_seqlens ? cu_seqlens.size(0) - 1 : x.size(0);
  if (!state || state.size(0) == sequences) return {};
  return invalid(std::string(name) + ": expected " + std::to_string(sequences) +
                 " rows, one per sequence, got " + std::to_string(state.size(0)));
}

}  // namespace fk
