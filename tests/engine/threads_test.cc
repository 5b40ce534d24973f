// Threads that use one library, for ThreadSanitizer to watch: ops with either pool, settings that
// change meanwhile, and engines. It runs without, too, where results are compared.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "flashkernel/engine.h"

// What bindings and benchmarks call, and no header has.
extern "C" {
const char* fk_op_last_implementation(const fk_op* op);
int fk_cpu_call(const fk_op* op, const fk_slot* slots);
}

namespace {

constexpr int kThreads = 4;

// body(thread) on kThreads threads at once.
template <class Body>
void on_threads(const Body& body) {
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) threads.emplace_back([&body, t] { body(t); });
  for (std::thread& thread : threads) thread.join();
}

// A caller's own threads: two for each call.
void callers_parallel_for(void*, int64_t count, int64_t grain, fk_range_body body, void* context) {
  const int64_t half = std::max<int64_t>(grain, count / 2);
  if (half >= count) return body(0, count, context);
  std::thread other([&] { body(half, count, context); });
  body(0, half, context);
  other.join();
}

// softmax of x (64, 1024), in rows enough for several threads.
class Softmax {
 public:
  Softmax() : x_(64 * 1024), y_(x_.size()) {
    for (size_t i = 0; i < x_.size(); ++i) x_[i] = static_cast<float>(i % 97) * 0.1f;
    tensors_[0] = {x_.data(), {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape_, nullptr, 0};
    tensors_[1] = tensors_[0];
    tensors_[1].data = y_.data();
    slots_[0].tensor = &tensors_[0];
    slots_[1].integer = -1;
    slots_[2].tensor = &tensors_[1];
  }
  Softmax(const Softmax&) = delete;

  const std::vector<float>& operator()(const fk_exec* exec) {
    EXPECT_EQ(fk_op_call(op(), slots_, exec), FK_OK) << fk_last_error();
    return y_;
  }
  // As Python's binding does it, with memory from the heap.
  const std::vector<float>& from_python() {
    EXPECT_EQ(fk_cpu_call(op(), slots_), FK_OK) << fk_last_error();
    return y_;
  }
  static const fk_op* op() { return fk_find_op("softmax_fwd"); }

 private:
  std::vector<float> x_, y_;
  int64_t shape_[2] = {64, 1024};
  DLTensor tensors_[2];
  fk_slot slots_[3];
};

TEST(Threads, CallOps) {
  const std::vector<float> expected = Softmax()(nullptr);
  on_threads([&](int t) {
    Softmax softmax;
    fk_exec exec = FK_EXEC_DEFAULTS;
    if (t % 2 == 1) exec.parallel_for = callers_parallel_for;
    for (int i = 0; i < 30; ++i) {
      EXPECT_EQ(t == 2 ? softmax.from_python() : softmax(&exec), expected);
      EXPECT_NE(fk_op_last_implementation(Softmax::op()), nullptr);
      EXPECT_STREQ(fk_op_name(Softmax::op()), "softmax_fwd");
    }
  });
}

// Each call takes what is set when it begins.
TEST(Threads, CallOpsWhileSettingsChange) {
  const std::vector<float> expected = Softmax()(nullptr);
  const int32_t threads = fk_num_threads();
  std::atomic<bool> done{false};
  std::thread settings([&] {
    for (int i = 0; !done; ++i) {
      fk_set_num_threads(1 + i % 3);
      fk_force_implementation(Softmax::op(), i % 2 == 0 ? "reference" : "cpu");
      fk_force_implementation(Softmax::op(), nullptr);
      fk_set_cpu_target(i % 2 == 0 ? "sse4" : nullptr);
      std::this_thread::yield();
    }
  });
  on_threads([&](int) {
    Softmax softmax;
    for (int i = 0; i < 20; ++i) {
      const std::vector<float>& y = softmax(nullptr);
      for (size_t k = 0; k < y.size(); ++k) ASSERT_NEAR(y[k], expected[k], 1e-5);
    }
  });
  done = true;
  settings.join();
  fk_set_cpu_target(nullptr);
  fk_set_num_threads(threads);
}

// Messages are each thread's own.
TEST(Threads, Fail) {
  on_threads([&](int t) {
    const std::string name(static_cast<size_t>(t + 1), 'x');
    for (int i = 0; i < 50; ++i) {
      EXPECT_EQ(fk_force_implementation(Softmax::op(), name.c_str()), FK_INVALID_ARGUMENT);
      const std::string message = fk_last_error();
      EXPECT_EQ(message.substr(message.rfind(' ') + 1), name);
      EXPECT_EQ(*fk_build_info(), '{');
      EXPECT_EQ(*fk_declarations(), '[');
    }
  });
}

class ThreadsOnAModel : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(fk_model_open("", nullptr, &model_), FK_OK) << fk_last_error();
    int64_t rows = 0;
    ASSERT_EQ(fk_model_weight(model_, 0, nullptr, nullptr, &rows, nullptr), FK_OK);
    vocab_ = static_cast<size_t>(rows);
  }
  void TearDown() override { fk_model_close(model_); }

  fk_engine* open() {
    fk_engine* engine = nullptr;
    EXPECT_EQ(fk_engine_open(model_, 64, nullptr, nullptr, &engine), FK_OK) << fk_last_error();
    return engine;
  }

  // A prompt and a few steps.
  std::vector<float> run(fk_engine* engine) {
    const int32_t ids[] = {11, 48, 85, 122, 159};
    std::vector<float> rows(vocab_ * 5);
    EXPECT_EQ(fk_engine_logits(engine, ids, 5, rows.data()), FK_OK) << fk_last_error();
    for (int32_t id = 0; id < 3; ++id) {
      EXPECT_EQ(fk_engine_step(engine, id, rows.data()), FK_OK) << fk_last_error();
    }
    return rows;
  }

  fk_model* model_ = nullptr;
  size_t vocab_ = 0;
};

TEST_F(ThreadsOnAModel, HaveAnEngineEach) {
  fk_engine* first = open();
  const std::vector<float> expected = run(first);
  fk_engine_close(first);
  on_threads([&](int) {
    fk_engine* engine = open();
    for (int i = 0; i < 3; ++i) EXPECT_EQ(run(engine), expected);
    fk_engine_close(engine);
  });
}

TEST_F(ThreadsOnAModel, TakeTurnsOnOneEngine) {
  fk_engine* engine = open();
  const std::vector<float> expected = run(engine);
  std::mutex turn;
  on_threads([&](int t) {
    for (int i = 0; i < 3; ++i) {
      std::lock_guard<std::mutex> lock(turn);
      fk_set_num_threads(1 + (t + i) % 3);
      EXPECT_EQ(run(engine), expected);
      EXPECT_NE(*fk_engine_info(engine), '\0');
    }
  });
  fk_engine_close(engine);
}

TEST_F(ThreadsOnAModel, ShareATokenizer) {
  const fk_tokenizer* tokenizer = fk_model_tokenizer(model_);
  const std::string text = "To be, or not to be: that is the question.";
  const auto round_trip = [&] {
    int32_t ids[64];
    char back[256];
    size_t count = 0, bytes = 0;
    EXPECT_EQ(fk_tokenizer_encode(tokenizer, text.data(), text.size(), 0, 1, ids, 64, &count),
              FK_OK);
    EXPECT_EQ(fk_tokenizer_decode(tokenizer, ids, count, 1, back, sizeof back, &bytes), FK_OK);
    EXPECT_GE(fk_tokenizer_find(tokenizer, "e"), -1);
    return std::string(back, bytes);
  };
  const std::string expected = round_trip();
  on_threads([&](int) {
    for (int i = 0; i < 20; ++i) EXPECT_EQ(round_trip(), expected);
  });
}

}  // namespace
