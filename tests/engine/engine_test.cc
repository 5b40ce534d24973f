// The whole engine on the built-in model: every path of a forward pass, on every instruction set.
#include "engine/engine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <vector>

#include "core/thread_pool.h"
#include "cpu/targets.h"
#include "engine/text_model.h"
#include "model/load.h"

namespace fk::engine {
namespace {

using Logits = Engine::Logits;

class EngineTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(model::load("", {}, &model_).ok());
    for (int i = 0; i < 150; ++i) ids_.push_back((i * 37 + 11) % 1024);
  }

  std::unique_ptr<Engine> make(const EngineOptions& options = {}) {
    std::unique_ptr<Engine> engine;
    const Status status = make_engine(model_.decoder, options, &engine);
    EXPECT_TRUE(status.ok()) << status.message();
    return engine;
  }

  std::vector<float> all_logits(Engine& engine, size_t count) {
    std::vector<float> out(count * static_cast<size_t>(engine.vocab()), NAN);
    engine.rewind(0);
    const Status status =
        engine.forward(ids_.data(), static_cast<int64_t>(count), Logits::kAll, out.data());
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  }

  model::Model model_;
  std::vector<int32_t> ids_;
};

double largest_difference(const float* a, const float* b, size_t n) {
  double largest = 0;
  for (size_t i = 0; i < n; ++i) {
    largest = std::max(largest, std::fabs(static_cast<double>(a[i]) - b[i]));
  }
  return largest;
}

TEST_F(EngineTest, StepsEqualPrefill) {
  for (const std::string& target : cpu::supported_targets()) {
    ASSERT_TRUE(cpu::set_target(target.c_str()));
    const auto engine = make();
    const auto vocab = static_cast<size_t>(engine->vocab());
    const std::vector<float> all = all_logits(*engine, 40);
    std::vector<float> one(vocab);
    engine->rewind(3);  // the first three stay
    for (size_t i = 3; i < 40; ++i) {
      ASSERT_TRUE(engine->forward(&ids_[i], 1, Logits::kLast, one.data()).ok());
      ASSERT_LT(largest_difference(one.data(), &all[i * vocab], vocab), 5e-3) << target << i;
    }
    EXPECT_EQ(engine->position(), 40);
  }
  cpu::set_target(nullptr);
}

TEST_F(EngineTest, ThreadsChangeNothing) {
  const int threads = num_threads();
  set_num_threads(1);
  const auto engine = make();
  const std::vector<float> expected = all_logits(*engine, ids_.size());
  for (const int n : {2, 3, 7}) {
    set_num_threads(n);
    EXPECT_EQ(all_logits(*engine, ids_.size()), expected) << n;
  }
  set_num_threads(threads);
}

TEST_F(EngineTest, LongContextsAreChunked) {
  EngineOptions options;
  options.context = 600;  // more than one batch, more than two chunks of keys
  const auto engine = make(options);
  const auto vocab = static_cast<size_t>(engine->vocab());
  for (int i = 150; i < 560; ++i) ids_.push_back((i * 53) % 1024);
  const std::vector<float> all = all_logits(*engine, ids_.size());
  std::vector<float> one(vocab);
  engine->rewind(559);
  ASSERT_TRUE(engine->forward(&ids_[559], 1, Logits::kLast, one.data()).ok());
  EXPECT_LT(largest_difference(one.data(), &all[559 * vocab], vocab), 5e-3);
}

// More of them than a batch has rows. The keys before are all 0.
TEST_F(EngineTest, ManyChunks) {
  EngineOptions options;
  options.context = 100000;
  const auto engine = make(options);
  const auto vocab = static_cast<size_t>(engine->vocab());
  std::vector<float> two(2 * vocab), one(vocab);
  engine->rewind(99998);
  ASSERT_TRUE(engine->forward(ids_.data(), 2, Logits::kAll, two.data()).ok());
  engine->rewind(99999);
  ASSERT_TRUE(engine->forward(&ids_[1], 1, Logits::kLast, one.data()).ok());
  EXPECT_LT(largest_difference(one.data(), &two[vocab], vocab), 5e-3);
}

TEST_F(EngineTest, MemoryGrowsWithTheTokensThatCome) {
  const auto pages = [] {
    int64_t all = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> all >> resident;
    return resident;
  };
  EngineOptions options;
  options.context = 100'000'000;
  const int64_t before = pages();
  const auto engine = make(options);
  std::vector<float> out(static_cast<size_t>(engine->vocab()));
  ASSERT_TRUE(engine->forward(ids_.data(), 1, Logits::kLast, out.data()).ok());
  EXPECT_LT((pages() - before) * sysconf(_SC_PAGESIZE), 100'000'000);
}

TEST_F(EngineTest, CachesAgree) {
  EngineOptions options;
  options.cache = EngineOptions::Cache::kFloat;
  const std::vector<float> exact = all_logits(*make(options), 60);
  options.cache = EngineOptions::Cache::kHalf;
  const std::vector<float> half = all_logits(*make(options), 60);
  EXPECT_LT(largest_difference(exact.data(), half.data(), exact.size()), 0.5);
}

TEST_F(EngineTest, RefusesWhatDoesNotFit) {
  EngineOptions options;
  options.context = 8;
  const auto engine = make(options);
  std::vector<float> out(static_cast<size_t>(engine->vocab()));
  EXPECT_FALSE(engine->forward(ids_.data(), 9, Logits::kLast, out.data()).ok());
  const int32_t beyond = 1024;
  EXPECT_FALSE(engine->forward(&beyond, 1, Logits::kLast, out.data()).ok());
  EXPECT_TRUE(engine->forward(ids_.data(), 8, Logits::kLast, out.data()).ok());
  EXPECT_FALSE(engine->forward(ids_.data(), 1, Logits::kLast, out.data()).ok());
}

TEST(TextModel, WritesTheSameTextTwice) {
  std::unique_ptr<TextModel> model;
  ASSERT_TRUE(TextModel::open({}, &model).ok());
  std::vector<int32_t> prompt;
  ASSERT_TRUE(model->encode_prompt("ROMEO:", &prompt).ok());
  GenerateOptions options;
  options.max_tokens = 30;
  options.sampling.seed = 5;
  Generated first, second;
  ASSERT_TRUE(model->generate(prompt, options, nullptr, &first).ok());
  ASSERT_TRUE(model->generate(prompt, options, nullptr, &second).ok());
  EXPECT_EQ(first.text, second.text);
  EXPECT_EQ(second.prompt_tokens, 1);  // the rest was there
}

}  // namespace
}  // namespace fk::engine
