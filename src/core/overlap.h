// Tells how tensors lie in memory, as far as that matters to whoever writes to them.
#pragma once

#include "core/tensor.h"

namespace fk {

// Returns whether two tensors share memory, or might: of each only its lowest and its highest
// address count, not the gaps between.
bool overlap(const Tensor& a, const Tensor& b);

// Returns a dimension along which elements of the tensor repeat, so that two of them may share an
// address, or -1 where each has its own: from the shortest stride to the longest, each must pass
// over all that the shorter ones reach.
int repeated_dim(const Tensor& t);

}  // namespace fk
