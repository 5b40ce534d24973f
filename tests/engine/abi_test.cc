// The C ABI of ops, models and engines with arguments that cannot be meant: each gets a status and
// a message that names it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "../model/files.h"
#include "flashkernel/engine.h"

namespace fk {
namespace {

class Abi : public testing::Test {
 protected:
  void SetUp() override { open(model::GgufFile::llama()); }
  void TearDown() override { close(); }

  void close() {
    fk_engine_close(engine_);
    fk_model_close(model_);
    engine_ = nullptr;
    model_ = nullptr;
  }

  void open(const model::GgufFile& file, const char* quantize = nullptr) {
    open_bytes(file.build(), quantize);
  }
  void open_bytes(const std::string& bytes, const char* quantize) {
    close();
    char path[] = "/tmp/fk_abi_XXXXXX.gguf";
    const int descriptor = mkstemps(path, 5);
    ASSERT_GE(descriptor, 0);
    const auto written = write(descriptor, bytes.data(), bytes.size());
    ::close(descriptor);
    ASSERT_EQ(written, static_cast<ssize_t>(bytes.size()));
    EXPECT_EQ(fk_model_open(path, nullptr, &model_), FK_OK) << fk_last_error();
    std::remove(path);
    EXPECT_EQ(fk_engine_open(model_, 0, nullptr, quantize, &engine_), FK_OK) << fk_last_error();
    int64_t rows = 0;
    EXPECT_EQ(fk_model_weight(model_, 0, nullptr, nullptr, &rows, nullptr), FK_OK);
    logits_.resize(static_cast<size_t>(rows) * 8);
  }

  fk_model* model_ = nullptr;
  fk_engine* engine_ = nullptr;
  std::vector<float> logits_;
  int32_t ids_[4] = {1, 2, 3, 4};
};

struct Refused {
  std::function<fk_status()> call;
  const char* message;
};

void expect_refused(const std::vector<Refused>& all) {
  for (const Refused& each : all) {
    EXPECT_EQ(each.call(), FK_INVALID_ARGUMENT) << each.message;
    EXPECT_NE(std::string(fk_last_error()).find(each.message), std::string::npos)
        << fk_last_error() << "\nwithout: " << each.message;
  }
}

TEST_F(Abi, Engine) {
  fk_sampling s{};
  s.max_tokens = 4;
  s.top_p = 1;
  s.repetition_penalty = 1;
  const auto with = [&](auto change) {
    return [this, s, change]() mutable {
      change(s);
      return fk_engine_begin(engine_, ids_, 4, &s);
    };
  };
  static const char* kStops[] = {"a", nullptr};
  const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
  fk_engine* opened = nullptr;
  const char* text = nullptr;
  size_t bytes = 0;
  int32_t more = 0;
  char path[4];
  expect_refused({
      {[&] { return fk_engine_open(nullptr, 0, nullptr, nullptr, &opened); },
       "model: expected one"},
      {[&] { return fk_engine_open(model_, 0, nullptr, nullptr, nullptr); },
       "engine: expected one"},
      {[&] { return fk_engine_open(model_, -1, nullptr, nullptr, &opened); }, "context"},
      {[&] { return fk_engine_open(model_, INT64_MAX, nullptr, nullptr, &opened); }, "context"},
      {[&] { return fk_engine_open(model_, 0, "f64", nullptr, &opened); }, "cache"},
      {[&] { return fk_engine_open(model_, 0, nullptr, "q3", &opened); }, "quantize"},
      {[&] { return fk_engine_logits(nullptr, ids_, 1, logits_.data()); }, "engine"},
      {[&] { return fk_engine_logits(engine_, nullptr, 1, logits_.data()); }, "token_ids"},
      {[&] { return fk_engine_logits(engine_, ids_, 1, nullptr); }, "out"},
      {[&] { return fk_engine_logits(engine_, ids_, SIZE_MAX, logits_.data()); },
       "token_ids: expected at most"},
      {[&] { return fk_engine_logits(engine_, ids_, SIZE_MAX / 2 + 1, logits_.data()); },
       "token_ids: expected at most"},
      {[&] { return fk_engine_step(nullptr, 1, logits_.data()); }, "engine"},
      {[&] { return fk_engine_step(engine_, 1, nullptr); }, "out"},
      {[&] { return fk_engine_step(engine_, -1, logits_.data()); }, "expected an id"},
      {[&] { return fk_engine_begin(nullptr, ids_, 4, &s); }, "engine"},
      {[&] { return fk_engine_begin(engine_, nullptr, 4, &s); }, "prompt"},
      {[&] { return fk_engine_begin(engine_, ids_, 4, nullptr); }, "sampling"},
      {[&] { return fk_engine_begin(engine_, ids_, SIZE_MAX, &s); }, "prompt: expected at most"},
      {[&] { return fk_engine_begin(engine_, ids_, 0, &s); }, "prompt"},
      {with([](auto& x) { x.stop_count = 1; }), "stop: expected one, got NULL"},
      {with([](auto& x) { x.stop = kStops, x.stop_count = 2; }), "stop 1: expected one"},
      {with([](auto& x) { x.max_tokens = -1; }), "max_tokens"},
      {with([&](auto& x) { x.temperature = nan; }), "temperature"},
      {with([](auto& x) { x.temperature = 1e300; }), "temperature"},
      {with([](auto& x) { x.top_k = -1; }), "top_k"},
      {with([&](auto& x) { x.top_p = nan; }), "top_p"},
      {with([&](auto& x) { x.min_p = nan; }), "min_p"},
      {with([&](auto& x) { x.repetition_penalty = infinity; }), "repetition_penalty"},
      {[&] { return fk_engine_next(nullptr, &text, &bytes, &more); }, "engine"},
      {[&] { return fk_engine_next(engine_, nullptr, &bytes, &more); }, "output"},
      {[&] { return fk_engine_next(engine_, &text, nullptr, &more); }, "output"},
      {[&] { return fk_engine_next(engine_, &text, &bytes, nullptr); }, "output"},
      {[&] { return fk_find_model(nullptr, path, 4, &bytes); }, "path_or_name"},
  });
  EXPECT_STREQ(fk_engine_info(nullptr), "");
  EXPECT_STREQ(fk_engine_result(nullptr), "");
  fk_engine_close(nullptr);
  EXPECT_EQ(fk_engine_logits(engine_, ids_, 4, logits_.data()), FK_OK) << "and nothing changed";
  EXPECT_EQ(fk_engine_logits(engine_, nullptr, 0, nullptr), FK_OK);
}

TEST_F(Abi, Models) {
  const fk_tokenizer* t = fk_model_tokenizer(model_);
  ASSERT_NE(t, nullptr);
  fk_model* model = nullptr;
  fk_tokenizer* tokenizer = nullptr;
  const char* roles[] = {"user", nullptr};
  char data[64] = {};
  float out[32];
  int32_t ids[8];
  size_t n = 0;
  expect_refused({
      {[&] { return fk_model_open(nullptr, nullptr, &model); }, "path"},
      {[&] { return fk_model_open("x", nullptr, nullptr); }, "model"},
      {[&] { return fk_model_weight(nullptr, 0, nullptr, nullptr, nullptr, nullptr); },
       "model: expected one"},
      {[&] { return fk_model_weight(model_, SIZE_MAX, nullptr, nullptr, nullptr, nullptr); },
       "index: expected one below"},
      {[&] { return fk_model_read_weight(nullptr, 0, out); }, "model"},
      {[&] { return fk_model_read_weight(model_, SIZE_MAX, out); }, "index"},
      {[&] { return fk_model_read_weight(model_, 0, nullptr); }, "out"},
      {[&] { return fk_tokenizer_open(nullptr, &tokenizer); }, "path"},
      {[&] { return fk_tokenizer_open("x", nullptr); }, "tokenizer"},
      {[&] { return fk_tokenizer_encode(nullptr, "a", 1, 0, 0, ids, 8, &n); }, "tokenizer"},
      {[&] { return fk_tokenizer_encode(t, nullptr, 1, 0, 0, ids, 8, &n); }, "text"},
      {[&] { return fk_tokenizer_decode(nullptr, ids_, 1, 0, data, 8, &n); }, "tokenizer"},
      {[&] { return fk_tokenizer_decode(t, nullptr, 1, 0, data, 8, &n); }, "ids"},
      {[&] { return fk_tokenizer_chat(nullptr, roles, roles, 1, 0, ids, 8, &n, data, 8, &n); },
       "tokenizer"},
      {[&] { return fk_tokenizer_chat(t, nullptr, roles, 1, 0, ids, 8, &n, data, 8, &n); }, "role"},
      {[&] { return fk_tokenizer_chat(t, roles, nullptr, 1, 0, ids, 8, &n, data, 8, &n); },
       "content"},
      {[&] { return fk_tokenizer_chat(t, roles, roles, 2, 0, ids, 8, &n, data, 8, &n); }, "role"},
      {[&] { return fk_dequantize(nullptr, data, 64, 1, out); }, "type"},
      {[&] { return fk_dequantize("F32", nullptr, 64, 1, out); }, "data"},
      {[&] { return fk_dequantize("F32", data, 64, 1, nullptr); }, "out"},
      {[&] { return fk_dequantize("F32", data, 64, -1, out); }, "count"},
      {[&] { return fk_dequantize("F32", data, 64, INT64_MAX, out); }, "data"},
      {[&] { return fk_dequantize("Q8_0", data, 33, 32, out); }, "data"},
  });
  EXPECT_EQ(fk_model_weight_count(nullptr), 0u);
  EXPECT_EQ(fk_model_tokenizer(nullptr), nullptr);
  EXPECT_STREQ(fk_model_info(nullptr), "");
  EXPECT_STREQ(fk_tokenizer_info(nullptr), "");
  EXPECT_EQ(fk_tokenizer_find(nullptr, "a"), -1);
  EXPECT_EQ(fk_tokenizer_find(t, nullptr), -1);
  fk_model_close(nullptr);
  fk_tokenizer_close(nullptr);
}

TEST_F(Abi, Ops) {
  EXPECT_EQ(fk_find_op(nullptr), nullptr);
  EXPECT_EQ(fk_find_op(std::string(100, 'x').c_str()), nullptr);
  EXPECT_EQ(fk_op_at(SIZE_MAX), nullptr);
  EXPECT_STREQ(fk_op_name(nullptr), "");
  const fk_op* op = fk_find_op("softmax_fwd");
  fk_slot slots[3] = {};
  size_t bytes = 0;
  const char* name = nullptr;
  expect_refused({
      {[&] { return fk_op_call(nullptr, slots, nullptr); }, "op"},
      {[&] { return fk_op_call(op, nullptr, nullptr); }, "arguments"},
      {[&] { return fk_op_call(op, slots, nullptr); }, "x: expected a tensor"},
      {[&] { return fk_op_workspace(op, nullptr, &bytes); }, "arguments"},
      {[&] { return fk_op_workspace(op, slots, nullptr); }, "bytes"},
      {[&] { return fk_op_implementation(op, nullptr, &name); }, "arguments"},
      {[&] { return fk_op_implementation(op, slots, nullptr); }, "name"},
      {[&] { return fk_force_implementation(nullptr, nullptr); }, "op"},
      {[&] { return fk_force_implementation(op, ""); }, "implementation"},
      {[&] { return fk_set_cpu_target(""); }, "cpu target"},
  });
  const int32_t threads = fk_num_threads();
  for (const int32_t wrong : {0, -1, INT32_MIN}) {
    fk_set_num_threads(wrong);
    EXPECT_EQ(fk_num_threads(), 1);
  }
  fk_set_num_threads(threads);
}

// Numbers that nobody computes with: an error says so, and no integer overflows on the way.
class UnreasonableModel : public Abi {
 protected:
  // The last weights of a file become this value.
  static std::string spoiled(float value, const model::GgufFile& file = model::GgufFile::llama(),
                             size_t count = 64) {
    std::string bytes = file.build();
    for (size_t i = 1; i <= count; ++i) std::memcpy(&bytes[bytes.size() - 4 * i], &value, 4);
    return bytes;
  }
  std::string refusal(fk_status status) {
    EXPECT_EQ(status, FK_INVALID_ARGUMENT);
    return fk_last_error();
  }
};

TEST_F(UnreasonableModel, WeightsThatAreNotFinite) {
  for (const char* quantize : {static_cast<const char*>(nullptr), "q8_0", "q4_0", "q4_1"}) {
    for (const float value :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      open_bytes(spoiled(value), quantize);
      const std::string expected = "the model's logits are not finite: its weight ";
      EXPECT_NE(refusal(fk_engine_logits(engine_, ids_, 4, logits_.data())).find(expected),
                std::string::npos)
          << fk_last_error();
      EXPECT_NE(refusal(fk_engine_step(engine_, 1, logits_.data())).find(expected),
                std::string::npos);
      fk_sampling s{};
      s.max_tokens = 4;
      s.top_p = s.repetition_penalty = 1;
      EXPECT_NE(refusal(fk_engine_begin(engine_, ids_, 4, &s)).find(expected), std::string::npos);
      const char* text = nullptr;
      size_t bytes = 0;
      int32_t more = 1;
      EXPECT_EQ(fk_engine_next(engine_, &text, &bytes, &more), FK_OK);
      EXPECT_EQ(more, 0);
    }
  }
}

TEST_F(UnreasonableModel, WeightsThatAreTooLarge) {
  // All of the last layer, whose sums become infinite.
  float large;  // 3.4e38, at any alignment
  std::memset(&large, 0x7f, sizeof large);
  open_bytes(spoiled(large, model::GgufFile::gpt2(), 5000), nullptr);
  EXPECT_EQ(
      refusal(fk_engine_logits(engine_, ids_, 4, logits_.data())),
      "logits: the model's logits are not finite, though its weights are: they are too large");
}

TEST_F(UnreasonableModel, NormOfHugeEps) {
  // Of activations so small, the factor to int8 is not finite.
  model::GgufFile file = model::GgufFile::llama();
  file.number("llama.attention.layer_norm_rms_epsilon", 1e38f);
  open_bytes(spoiled(0.05f, file, 28000), "q8_0");
  ASSERT_EQ(fk_engine_logits(engine_, ids_, 4, logits_.data()), FK_OK) << fk_last_error();
  for (size_t i = 0; i < logits_.size() / 2; ++i) ASSERT_TRUE(std::isfinite(logits_[i]));
}

}  // namespace
}  // namespace fk
