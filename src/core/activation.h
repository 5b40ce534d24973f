// Ops apply these activation functions to what they computed. They stand in the order in which the
// `activation` attribute counts them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fk {

enum class Activation : int64_t {
  kNone,
  kGeluTanh,  // x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))
  kGelu,      // x (1 + erf(x / sqrt(2))) / 2
  kSilu,      // x sigmoid(x)
  kRelu,      // max(x, 0)
  kRelu2,     // max(x, 0)^2
  kTanh,
  kSigmoid,
};

inline std::vector<std::string> activation_names() {
  return {"", "gelu_tanh", "gelu", "silu", "relu", "relu2", "tanh", "sigmoid"};
}

}  // namespace fk
