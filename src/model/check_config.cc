// Checks a decoder's sizes against limits and against each other.
#include "model/check_config.h"

#include <cmath>

#include "model/mapped_file.h"

namespace fk::model {

Status check_config(const std::string& file, const Config& config) {
  const struct {
    const char* name;
    int64_t value, limit;
  } sizes[] = {
      {"embedding size", config.dim, kMaxDim},   {"hidden size", config.hidden, kMaxHidden},
      {"layers", config.layers, kMaxLayers},     {"heads", config.heads, kMaxHeads},
      {"key heads", config.kv_heads, kMaxHeads}, {"head size", config.head_dim, kMaxDim},
      {"vocabulary", config.vocab, kMaxVocab},   {"context length", config.context, kMaxContext},
  };
  for (const auto& size : sizes) {
    if (size.value < 1 || size.value > size.limit) {
      return file_error(file, std::string(size.name) + ": expected from 1 to " +
                                  std::to_string(size.limit) + ", got " +
                                  std::to_string(size.value));
    }
  }
  if (config.heads % config.kv_heads != 0) {
    return file_error(file, "key heads: expected a divisor of the " + std::to_string(config.heads) +
                                " heads, got " + std::to_string(config.kv_heads));
  }
  if (config.rotary_dim % 2 != 0 || config.rotary_dim < 0 || config.rotary_dim > config.head_dim) {
    return file_error(file, "rotary dimensions: expected an even number up to the head size of " +
                                std::to_string(config.head_dim) + ", got " +
                                std::to_string(config.rotary_dim));
  }
  if (!(config.norm_eps >= 0 && std::isfinite(config.norm_eps))) {
    return file_error(file,
                      "norm epsilon: expected 0 or more, got " + std::to_string(config.norm_eps));
  }
  if (config.window < 0) {
    return file_error(file, "window: expected 0 or more, got " + std::to_string(config.window));
  }
  return {};
}

}  // namespace fk::model
