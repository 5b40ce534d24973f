// Rotary frequencies, with the ways in use of stretching a context.
#pragma once

#include <string>

#include "core/status.h"
#include "model/decoder.h"

namespace fk::model {

struct RopeScaling {
  std::string type;  // "" or "default", "linear", "llama3", "yarn"
  double factor = 1.0;
  double original_context = 0.0;  // 0: the model's own
  double low_freq_factor = 1.0;   // llama3
  double high_freq_factor = 4.0;
  double beta_fast = 32.0;  // yarn
  double beta_slow = 1.0;
  double attention_factor = 0.0;  // yarn; 0: from factor
};

// Fills rope_frequencies, rope_magnitude and rope_scaling from rotary_dim, rope_theta and context.
// The error does not name the file.
Status set_rope(const RopeScaling& scaling, Config* config);

}  // namespace fk::model
