// Computes the frequencies of the rotary embedding, with the known ways to stretch a model's
// context.
#pragma once

#include <string>

#include "core/status.h"
#include "model/decoder.h"

namespace fk::model {

// Says how the frequencies are scaled, with the names of Hugging Face's config.json.
struct RopeScaling {
  std::string type;               // "", "default" or "none"; "linear", "llama3" or "yarn"
  double factor = 1.0;            // how much longer the context becomes
  double original_context = 0.0;  // in positions, before the scaling; 0: the model's context
  double low_freq_factor = 1.0;   // of llama3
  double high_freq_factor = 4.0;  // of llama3
  double beta_fast = 32.0;        // of yarn
  double beta_slow = 1.0;         // of yarn
  double attention_factor = 0.0;  // of yarn; 0: computed from `factor`
};

// Fills rope_frequencies, rope_magnitude and rope_scaling from rotary_dim, rope_theta and context.
// The error does not name the file.
Status set_rope(const RopeScaling& scaling, Config* config);

}  // namespace fk::model
