// This file checks the arguments of rope beyond their types and shapes, and lists what implements
// it.
#include "ops/rope/rope.h"

#include <string>

#include "core/access.h"

namespace fk {

namespace {

Status check(const char* name, const Tensor& x, const Tensor& cos, const Tensor& positions) {
  const int64_t tokens = x.size(1), head = x.size(3), table = cos.size(0), pairs = cos.size(1);
  if (2 * pairs > head) {
    return invalid("cos: expected at most " + std::to_string(head / 2) + " columns (half of " +
                   name + "'s last size " + std::to_string(head) + "), got " +
                   std::to_string(pairs));
  }
  if (!positions) {
    if (tokens <= table) return {};
    return invalid("cos: expected at least " + std::to_string(tokens) + " rows (one per token of " +
                   name + "), got " + std::to_string(table));
  }
  if (!readable(positions)) return {};
  const bool batched = positions.ndim == 2;
  for (int64_t b = 0; b < (batched ? positions.size(0) : 1); ++b) {
    for (int64_t l = 0; l < tokens; ++l) {
      const int64_t batch_offset = batched ? b * positions.stride(0) : 0;
      const int64_t value = load_index(positions, batch_offset + l * positions.stride(-1));
      if (value >= 0 && value < table) continue;
      return invalid("positions: expected values from 0 to " + std::to_string(table - 1) +
                     ", got " + std::to_string(value) + " at " +
                     (batched ? "(" + std::to_string(b) + ", " + std::to_string(l) + ")"
                              : "token " + std::to_string(l)));
    }
  }
  return {};
}

}  // namespace

Status RopeFwd::validate(const RopeFwd& a) { return check("x", a.x, a.cos, a.positions); }

Status RopeBwd::validate(const RopeBwd& a) { return check("dy", a.dy, a.cos, a.positions); }

void register_rope(Registry& registry) {
  registry.add<RopeFwd>(
      {{"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run}});
  registry.add<RopeBwd>(
      {{"reference", kReference, nullptr, reference::run}, {"cpu", kPortable, nullptr, cpu::run}});
#if FK_HAVE_CUDA
  registry.add_cuda<RopeFwd>({{"cuda", kPortable, nullptr, cuda::run}});
  registry.add_cuda<RopeBwd>({{"cuda", kPortable, nullptr, cuda::run}});
#endif
}

}  // namespace fk
