// Chooses tokens: the penalty and the temperature change logits, the other rules drop candidates,
// and one of those that are left is drawn.
#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fk::engine {
namespace {

// Tokens whose weight is below exp(-40) of the largest are left out: they vanish in a double's sum.
constexpr float kNegligible = 40.0f;

}  // namespace

int32_t likeliest(const float* logits, int64_t count) {
  constexpr int64_t kLanes = 32;  // enough independent maxima for the compiler to use vectors
  float lanes[kLanes];
  std::fill_n(lanes, kLanes, -std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) {
      lanes[j] = logits[i + j] > lanes[j] ? logits[i + j] : lanes[j];
    }
  }
  float best = *std::max_element(lanes, lanes + kLanes);
  for (; i < count; ++i) best = logits[i] > best ? logits[i] : best;
  const float* found = std::find(logits, logits + count, best);
  return found == logits + count ? 0 : static_cast<int32_t>(found - logits);
}

Sampler::Sampler(const SamplingOptions& options, int64_t vocab)
    : options_(options),
      vocab_(vocab),
      state_(options.seed),
      is_seen_(static_cast<size_t>(vocab), false) {}

void Sampler::see(int32_t token) {
  if (token < 0 || token >= vocab_ || is_seen_[static_cast<size_t>(token)]) return;
  is_seen_[static_cast<size_t>(token)] = true;
  seen_.push_back(token);
}

// This is SplitMix64, which gives the same numbers on every machine.
double Sampler::next_random() {
  uint64_t z = state_ += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  z ^= z >> 31;
  return static_cast<double>(z >> 11) * 0x1p-53;
}

int32_t Sampler::sample(float* logits) {
  if (options_.repetition_penalty != 1.0f) {
    for (const int32_t token : seen_) {
      float& logit = logits[token];
      logit = logit > 0 ? logit / options_.repetition_penalty : logit * options_.repetition_penalty;
    }
  }
  const int32_t token = choose(logits);
  see(token);
  return token;
}

int32_t Sampler::choose(float* logits) {
  const int32_t best = likeliest(logits, vocab_);
  // If the largest logit is infinite or NaN there are no probabilities to draw from.
  if (!(options_.temperature > 0) || !std::isfinite(logits[best])) return best;

  const float largest = logits[best];
  const float lowest = largest - kNegligible * options_.temperature;
  candidates_.clear();
  for (int64_t i = 0; i < vocab_; ++i) {
    if (logits[i] >= lowest) candidates_.push_back({logits[i], static_cast<int32_t>(i), 0});
  }
  const auto likelier = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  };
  const auto keep = static_cast<size_t>(options_.top_k);
  if (options_.top_k > 0 && keep < candidates_.size()) {
    std::nth_element(candidates_.begin(), candidates_.begin() + options_.top_k, candidates_.end(),
                     likelier);
    candidates_.resize(keep);
  }
  std::sort(candidates_.begin(), candidates_.end(), likelier);
  double total = 0;
  for (Candidate& c : candidates_) {
    c.weight = std::exp(static_cast<double>(c.logit - largest) / options_.temperature);
    total += c.weight;
  }
  if (options_.top_p < 1.0f) {
    double sum = 0;
    size_t count = 0;
    while (count < candidates_.size() && (count == 0 || sum < options_.top_p * total)) {
      sum += candidates_[count++].weight;
    }
    candidates_.resize(count);
    total = sum;
  }
  if (options_.min_p > 0) {
    size_t count = 1;
    while (count < candidates_.size() && candidates_[count].weight >= options_.min_p) ++count;
    candidates_.resize(count);
    total = 0;
    for (const Candidate& c : candidates_) total += c.weight;
  }
  double left = next_random() * total;
  for (const Candidate& c : candidates_) {
    left -= c.weight;
    if (left < 0) return c.id;
  }
  return candidates_.back().id;
}

}  // namespace fk::engine
