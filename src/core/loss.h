// What the cross-entropy ops share: how losses are reduced, and checks of their targets.
#pragma once

#include <cstdint>

#include "core/status.h"
#include "core/tensor.h"

namespace fk {

enum Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };

// Each target is a column or `ignore_index`; where the CPU cannot read them, they are not checked.
Status check_targets(const Tensor& targets, int64_t columns, int64_t ignore_index);

// A backward gets the gradients of `losses` without a reduction and that of `loss` with one.
Status check_loss_gradients(int64_t reduction, const Tensor& dlosses, const Tensor& dloss);

}  // namespace fk
