// Computes rotary frequencies as Transformers does, for each kind of scaling.
#include "model/rope.h"

#include <algorithm>
#include <cmath>

namespace fk::model {
namespace {

constexpr double kTurn = 6.283185307179586;  // 2 pi, a full rotation

// Scales a frequency as Llama 3 does: long waves are stretched by the factor, short ones stay, and
// those between are blended.
double llama3(double frequency, double context, const RopeScaling& s) {
  const double wave = kTurn / frequency;
  if (wave > context / s.low_freq_factor) return frequency / s.factor;
  if (wave < context / s.high_freq_factor) return frequency;
  const double blend =
      (context / wave - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
  return (1 - blend) * frequency / s.factor + blend * frequency;
}

// Returns, for YaRN, the index of the pair that makes `turns` full rotations within the context.
double yarn_index(double turns, double dim, double theta, double context) {
  return dim * std::log(context / (turns * kTurn)) / (2 * std::log(theta));
}

}  // namespace

Status set_rope(const RopeScaling& scaling, Config* config) {
  const std::string& type = scaling.type;
  const bool unscaled = type.empty() || type == "default" || type == "none";
  if (!unscaled && type != "linear" && type != "llama3" && type != "yarn") {
    return unsupported("rope scaling: expected linear, llama3 or yarn, got " + type);
  }
  const double theta = config->rope_theta;
  if (!(theta > 1))
    return invalid("rope theta: expected more than 1, got " + std::to_string(theta));
  if (!unscaled && !(scaling.factor >= 1)) {
    return invalid("rope scaling factor: expected at least 1, got " +
                   std::to_string(scaling.factor));
  }
  const double context = scaling.original_context > 0 ? scaling.original_context
                                                      : static_cast<double>(config->context);
  const double dim = static_cast<double>(config->rotary_dim);
  const int64_t pairs = config->rotary_dim / 2;
  if (type == "llama3" && !(scaling.low_freq_factor > 0 &&
                            scaling.high_freq_factor > scaling.low_freq_factor && context > 0)) {
    return invalid("rope scaling: expected 0 < low_freq_factor < high_freq_factor");
  }
  if (type == "yarn" && !(scaling.beta_slow > 0 && scaling.beta_fast > 0 && context > 0)) {
    return invalid("rope scaling: expected beta_fast and beta_slow above 0");
  }
  double low = 0, high = 1;
  if (type == "yarn") {
    low = std::max(0.0, std::floor(yarn_index(scaling.beta_fast, dim, theta, context)));
    high = std::min(dim - 1, std::ceil(yarn_index(scaling.beta_slow, dim, theta, context)));
    if (low == high) high += 0.001;
  }
  config->rope_frequencies.resize(static_cast<size_t>(pairs));
  for (int64_t i = 0; i < pairs; ++i) {
    double frequency = std::pow(theta, -2.0 * static_cast<double>(i) / dim);
    if (type == "linear") {
      frequency /= scaling.factor;
    } else if (type == "llama3") {
      frequency = llama3(frequency, context, scaling);
    } else if (type == "yarn") {
      const double stretched = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
      frequency = frequency / scaling.factor * stretched + frequency * (1 - stretched);
    }
    config->rope_frequencies[static_cast<size_t>(i)] = static_cast<float>(frequency);
  }
  config->rope_magnitude = 1.0f;
  if (type == "yarn") {
    config->rope_magnitude =
        static_cast<float>(scaling.attention_factor > 0 ? scaling.attention_factor
                                                        : 0.1 * std::log(scaling.factor) + 1);
  }
  config->rope_scaling = unscaled ? "" : type;
  return {};
}

}  // namespace fk::model
