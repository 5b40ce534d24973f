// Chooses a token from logits.
#pragma once

#include <cstdint>
#include <vector>

namespace fk::engine {

// Applied in this order, each to what the one before left.
struct SamplingOptions {
  float repetition_penalty = 1.0f;  // logits of tokens seen before: > 0 divided by it, < 0 times it
  float temperature = 0.8f;         // 0: the largest logit, whatever the rest says
  int64_t top_k = 40;               // so many of the likeliest; 0: all
  float top_p = 0.95f;              // the fewest that hold this much probability; 1: all
  float min_p = 0.0f;               // those at least so likely, times the likeliest's probability
  uint64_t seed = 0;
};

// The first of the largest; numbers that are none do not count.
int32_t likeliest(const float* logits, int64_t count);

class Sampler {
 public:
  Sampler(const SamplingOptions& options, int64_t vocab);

  // Tokens of the prompt, for the repetition penalty.
  void see(int32_t token);
  // Changes `logits`. Equal logits: the lower id. The chosen token counts as seen.
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
  std::vector<bool> is_seen_;
  std::vector<Candidate> candidates_;
};

}  // namespace fk::engine
