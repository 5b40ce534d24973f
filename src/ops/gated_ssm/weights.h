// This file computes the weights of the steps, which all backends share: 0.9^(L-1-t), normalised to
// sum to 1.
#pragma once

#include <cmath>
#include <cstdint>

namespace fk::gated_ssm {

constexpr double kDecay = 0.9;

// Returns 1 / (sum of the decays of `length` steps).
inline double weight_scale(int64_t length) {
  return (1 - kDecay) / (1 - std::pow(kDecay, static_cast<double>(length)));
}

inline double step_weight(int64_t t, int64_t length) {
  return std::pow(kDecay, static_cast<double>(length - 1 - t)) * weight_scale(length);
}

}  // namespace fk::gated_ssm
