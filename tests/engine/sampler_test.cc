#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <vector>

#include "engine/session.h"

namespace fk::engine {
namespace {

std::map<int32_t, double> shares(const SamplingOptions& options, const std::vector<float>& logits) {
  constexpr int kDraws = 20000;
  Sampler sampler(options, static_cast<int64_t>(logits.size()));
  std::map<int32_t, double> found;
  for (int i = 0; i < kDraws; ++i) {
    std::vector<float> copy = logits;
    found[sampler.sample(copy.data())] += 1.0 / kDraws;
  }
  return found;
}

SamplingOptions plain() {
  SamplingOptions options;
  options.temperature = 1;
  options.top_k = 0;
  options.top_p = 1;
  return options;
}

const std::vector<float> kLogits = {std::log(0.5f), std::log(0.3f), std::log(0.15f),
                                    std::log(0.05f)};

TEST(Sampler, DrawsInProportion) {
  const auto found = shares(plain(), kLogits);
  EXPECT_NEAR(found.at(0), 0.5, 0.02);
  EXPECT_NEAR(found.at(1), 0.3, 0.02);
  EXPECT_NEAR(found.at(3), 0.05, 0.01);
}

TEST(Sampler, TemperatureSharpens) {
  SamplingOptions options = plain();
  options.temperature = 0.5f;
  EXPECT_NEAR(shares(options, kLogits).at(0), 0.25 / 0.365, 0.02);
}

TEST(Sampler, ZeroTemperatureTakesTheFirstOfTheLargest) {
  SamplingOptions options = plain();
  options.temperature = 0;
  EXPECT_EQ(shares(options, {1, 3, 3, 2}).at(1), shares(options, {1, 3, 3, 2}).begin()->second);
}

TEST(Sampler, TopKTopPMinPKeepTheLikeliest) {
  SamplingOptions options = plain();
  options.top_k = 2;
  EXPECT_EQ(shares(options, kLogits).size(), 2u);
  options = plain();
  options.top_p = 0.75f;  // 0.5 + 0.3 reach it
  EXPECT_EQ(shares(options, kLogits).size(), 2u);
  options = plain();
  options.min_p = 0.2f;  // 0.15 is 0.3 of the likeliest, 0.05 is 0.1
  EXPECT_EQ(shares(options, kLogits).size(), 3u);
}

TEST(Sampler, RepetitionPenaltyWorksOnBothSigns) {
  SamplingOptions options = plain();
  options.temperature = 0;
  options.repetition_penalty = 2;
  Sampler sampler(options, 3);
  sampler.see(0);
  sampler.see(2);
  std::vector<float> logits = {3, 2, -1};
  EXPECT_EQ(sampler.sample(logits.data()), 1);
  EXPECT_EQ(logits[0], 1.5f);
  EXPECT_EQ(logits[2], -2.0f);
}

TEST(Sampler, NonFiniteLogitsDoNotCrash) {
  std::vector<float> logits = {-INFINITY, -INFINITY};
  Sampler sampler(plain(), 2);
  EXPECT_EQ(sampler.sample(logits.data()), 0);
  logits = {0, INFINITY};
  EXPECT_EQ(sampler.sample(logits.data()), 1);
}

TEST(Sampler, NonFiniteTemperatureDoesNotCrash) {
  SamplingOptions options = plain();
  options.temperature = NAN;
  EXPECT_EQ(shares(options, kLogits).at(0), shares(options, kLogits).begin()->second);
}

TEST(StopFilter, HoldsBackWhatMayBeAStop) {
  StopFilter filter({"END", "stop"});
  EXPECT_EQ(filter.push("an E"), "an ");
  EXPECT_EQ(filter.push("N"), "");
  EXPECT_EQ(filter.push("T s"), "ENT ");
  EXPECT_EQ(filter.push("topped"), "");
  EXPECT_TRUE(filter.stopped());
  EXPECT_EQ(filter.finish(), "");
}

TEST(StopFilter, GivesWhatIsLeft) {
  StopFilter filter({"END"});
  EXPECT_EQ(filter.push("the EN"), "the ");
  EXPECT_EQ(filter.finish(), "EN");
}

}  // namespace
}  // namespace fk::engine
