// Chooses the next token from a model's logits.
#pragma once

#include <cstdint>
#include <vector>

namespace fk::engine {

// Holds the rules for choosing a token, which are applied in this order, each to what the one
// before has left.
struct SamplingOptions {
  // Divides the positive logits of tokens seen before and multiplies the negative ones; 1 changes
  // nothing.
  float repetition_penalty = 1.0f;
  // Divides all logits; 0 takes the token with the largest one and ignores the rules below.
  float temperature = 0.8f;
  // Keeps this many of the likeliest tokens; 0 keeps all.
  int64_t top_k = 40;
  // Keeps the fewest likeliest tokens that together hold this much probability; 1 keeps all.
  float top_p = 0.95f;
  // Keeps the tokens at least this likely as a share of the likeliest's probability; 0 keeps all.
  float min_p = 0.0f;
  uint64_t seed = 0;
};

// Returns the index of the first of the largest logits; a NaN is never the largest. Returns 0 where
// all are NaN.
int32_t likeliest(const float* logits, int64_t count);

// Draws the tokens of one text; it remembers its random state and which tokens were seen.
class Sampler {
 public:
  Sampler(const SamplingOptions& options, int64_t vocab);

  // Counts `token` as seen, for the repetition penalty; call it for the tokens of the prompt.
  void see(int32_t token);
  // Chooses a token from `vocab` logits, changes them on the way, and counts the token as seen. Of
  // equal logits the one with the lower id comes first.
  int32_t sample(float* logits);

 private:
  struct Candidate {
    float logit;
    int32_t id;
    double weight;  // exp(logit - largest), after temperature
  };

  int32_t choose(float* logits);
  double next_random();  // in [0, 1)

  SamplingOptions options_;
  int64_t vocab_;
  uint64_t state_;
  std::vector<int32_t> seen_;
  std::vector<bool> is_seen_;  // by id
  std::vector<Candidate> candidates_;
};

}  // namespace fk::engine
