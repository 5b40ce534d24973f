// Calls of the engine's and the models' ABI.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>

#include "../model/files.h"
#include "flashkernel/engine.h"
#include "fuzz_abi.h"

namespace fk::fuzz {
namespace {

constexpr float kWild[] = {1e38f,
                           -3e38f,
                           1e-40f,
                           0.0f,
                           -1.0f,
                           std::numeric_limits<float>::infinity(),
                           -std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::quiet_NaN()};

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fk_fuzz_abi: %s\n", what);
  std::abort();
}

void write(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  require(file.good(), "a file could not be written");
}

// A good status from a call that may fail, with its message.
bool ok(fk_status status) {
  require_message(status);
  return status == FK_OK;
}

}  // namespace

struct EngineFuzzer::Handles {
  fk_model* model = nullptr;
  fk_engine* engine = nullptr;
  int32_t vocab = 0;

  ~Handles() {
    fk_engine_close(engine);
    fk_model_close(model);
  }
};

EngineFuzzer::EngineFuzzer(uint64_t seed) : random_(seed), handles_(new Handles) {
  char folder[] = "/tmp/fk_fuzz_abi_XXXXXX";
  require(mkdtemp(folder) != nullptr, "there is no room for files");
  folder_ = folder;
  good_file_ = folder_ + "/good.gguf";
  write(good_file_, model::GgufFile::llama().build());
  require(fk_model_open(good_file_.c_str(), nullptr, &handles_->model) == FK_OK, fk_last_error());
  require(fk_engine_open(handles_->model, 0, nullptr, nullptr, &handles_->engine) == FK_OK,
          fk_last_error());
  int64_t rows = 0;
  require(fk_model_weight(handles_->model, 0, nullptr, nullptr, &rows, nullptr) == FK_OK,
          fk_last_error());
  handles_->vocab = static_cast<int32_t>(rows);
}

EngineFuzzer::~EngineFuzzer() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

bool EngineFuzzer::call() {
  if (random_.one_in(64)) return open_spoiled();
  switch (random_.below(3)) {
    case 0:
      return engine_call();
    case 1:
      return model_call();
    default:
      return tokenizer_call();
  }
}

// A file whose weights or settings are numbers that nobody computes with: it is refused, or its
// logits are numbers.
bool EngineFuzzer::open_spoiled() {
  model::GgufFile made = random_.one_in(3) ? model::GgufFile::gpt2() : model::GgufFile::llama();
  if (random_.one_in(4)) {
    made.number("llama.attention.layer_norm_rms_epsilon", random_.pick(kWild));
  }
  std::string bytes = made.build();
  // The files' weights are 0, which would hide much.
  for (size_t i = 1; i <= std::min<size_t>(28000, bytes.size() / 8); ++i) {
    const float weight = static_cast<float>(random_.between(-1000, 1000)) * 1e-4f;
    std::memcpy(&bytes[bytes.size() - 4 * i], &weight, 4);
  }
  for (size_t n = random_.below(4); n > 0; --n) {
    const float value = random_.pick(kWild);
    const size_t at = bytes.size() - 4 * (1 + random_.below(bytes.size() / 8));
    std::memcpy(&bytes[at], &value, 4);
  }
  const std::string path = folder_ + "/spoiled.gguf";
  write(path, bytes);
  Handles spoiled;
  if (!ok(fk_model_open(path.c_str(), nullptr, &spoiled.model))) return false;
  static constexpr const char* kQuantize[] = {nullptr, "q8_0", "q4_0", "q4_1", "q5_0", "f16", "x"};
  static constexpr const char* kCache[] = {nullptr, "f16", "f32", "f64"};
  if (!ok(fk_engine_open(spoiled.model, random_.between(-1, 40), random_.pick(kCache),
                         random_.pick(kQuantize), &spoiled.engine))) {
    return false;
  }
  std::vector<int32_t> ids(1 + random_.below(4));
  for (int32_t& id : ids) id = static_cast<int32_t>(random_.below(16));
  int64_t vocab = 0;
  require(fk_model_weight(spoiled.model, 0, nullptr, nullptr, &vocab, nullptr) == FK_OK,
          fk_last_error());
  std::vector<float> logits(ids.size() * static_cast<size_t>(vocab));
  if (!ok(fk_engine_logits(spoiled.engine, ids.data(), ids.size(), logits.data()))) return false;
  for (const float logit : logits) require(std::isfinite(logit), "a logit is no number");
  return true;
}

bool EngineFuzzer::engine_call() {
  fk_engine* engine = random_.one_in(8) ? nullptr : handles_->engine;
  static constexpr size_t kCounts[] = {0, 1, 2, 7, 33, SIZE_MAX, SIZE_MAX / 2, size_t{1} << 40};
  std::vector<int32_t> ids(40);
  for (int32_t& id : ids) {
    id = static_cast<int32_t>(random_.below(static_cast<size_t>(handles_->vocab)));
    if (random_.one_in(200)) id = random_.one_in(2) ? -1 : INT32_MAX;
  }
  const size_t count = random_.pick(kCounts);
  const int32_t* given = random_.one_in(8) ? nullptr : ids.data();
  std::vector<float> row(static_cast<size_t>(handles_->vocab) *
                         (count < ids.size() ? std::max<size_t>(count, 1) : 1));
  float* out = random_.one_in(8) ? nullptr : row.data();
  switch (random_.below(6)) {
    case 0:
      return ok(fk_engine_logits(engine, given, count, out));
    case 1:
      return ok(fk_engine_step(engine, ids[0], out));
    case 2: {
      fk_sampling s{};
      static constexpr double kNumbers[] = {0, 0.5, 1, 2, -1, 1e300, 1e-300, HUGE_VAL, NAN};
      s.max_tokens = random_.one_in(4) ? random_.between(-1, 3) : INT64_MAX;
      s.temperature = random_.pick(kNumbers);
      s.top_k = random_.one_in(4) ? INT64_MAX : random_.between(-1, 50);
      s.top_p = random_.one_in(2) ? 1 : random_.pick(kNumbers);
      s.min_p = random_.one_in(2) ? 0 : random_.pick(kNumbers);
      s.repetition_penalty = random_.one_in(2) ? 1 : random_.pick(kNumbers);
      s.ignore_eos = static_cast<int32_t>(random_.below(2));
      const char* stops[] = {"a", random_.one_in(2) ? nullptr : "", "lo"};
      s.stop = random_.one_in(2) ? nullptr : stops;
      s.stop_count = random_.below(4);
      return ok(fk_engine_begin(engine, given, count, random_.one_in(8) ? nullptr : &s));
    }
    case 3: {
      const char* text = nullptr;
      size_t bytes = 0;
      int32_t more = 0;
      const bool fine = ok(fk_engine_next(engine, random_.one_in(8) ? nullptr : &text,
                                          random_.one_in(8) ? nullptr : &bytes,
                                          random_.one_in(8) ? nullptr : &more));
      return fine && std::string(text, bytes).size() == bytes;
    }
    case 4:
      require(fk_engine_info(engine) != nullptr && fk_engine_result(engine) != nullptr,
              "a text is NULL");
      return true;
    default: {
      fk_engine* opened = nullptr;
      static constexpr const char* kNames[] = {nullptr, "", "f16", "q4_0", "\xff", "f32"};
      static constexpr int64_t kContexts[] = {0, 1, 7, -1, INT64_MAX, INT64_MIN, int64_t{1} << 40};
      const bool fine = ok(fk_engine_open(
          random_.one_in(8) ? nullptr : handles_->model, random_.pick(kContexts),
          random_.pick(kNames), random_.pick(kNames), random_.one_in(8) ? nullptr : &opened));
      fk_engine_close(opened);
      return fine;
    }
  }
}

bool EngineFuzzer::model_call() {
  const fk_model* model = random_.one_in(8) ? nullptr : handles_->model;
  const size_t weights = fk_model_weight_count(model);
  const size_t index = random_.one_in(4) ? SIZE_MAX : random_.below(weights + 2);
  switch (random_.below(5)) {
    case 0: {
      const char *name = nullptr, *type = nullptr;
      int64_t rows = 0, columns = 0;
      return ok(fk_model_weight(
          model, index, random_.one_in(2) ? &name : nullptr, random_.one_in(2) ? &type : nullptr,
          random_.one_in(2) ? &rows : nullptr, random_.one_in(2) ? &columns : nullptr));
    }
    case 1: {
      int64_t rows = 0, columns = 0;
      if (!ok(fk_model_weight(model, index, nullptr, nullptr, &rows, &columns))) {
        return ok(fk_model_read_weight(model, index, nullptr));
      }
      std::vector<float> values(static_cast<size_t>(rows * columns));
      return ok(fk_model_read_weight(model, index, random_.one_in(8) ? nullptr : values.data()));
    }
    case 2: {
      static constexpr const char* kTypes[] = {nullptr, "",     "F32",  "F16",  "BF16", "Q8_0",
                                               "Q4_0",  "Q4_K", "Q6_K", "Q5_1", "int8", "\xff"};
      static constexpr int64_t kCounts[] = {0, 1, 32, 256, -1, INT64_MAX, INT64_MIN};
      std::vector<char> data(random_.below(700) + 1);
      for (char& c : data) c = static_cast<char>(random_.below(256));
      const int64_t count = random_.pick(kCounts);
      std::vector<float> out(count > 0 && count < 1000 ? static_cast<size_t>(count) : 1);
      return ok(fk_dequantize(random_.pick(kTypes), random_.one_in(8) ? nullptr : data.data() + 1,
                              data.size() - 1, count, random_.one_in(8) ? nullptr : out.data()));
    }
    case 3: {
      static constexpr const char* kPaths[] = {nullptr, "", "/", "/nowhere", "smollm2", "\xff"};
      char path[16];
      size_t bytes = 0;
      const bool given = random_.one_in(2);
      return ok(fk_find_model(random_.pick(kPaths), given ? path : nullptr,
                              random_.one_in(2) ? sizeof path : 0,
                              random_.one_in(2) ? &bytes : nullptr));
    }
    default: {
      static constexpr const char* kPaths[] = {nullptr, "", "/", "/nowhere", "/dev/null", "\xff"};
      fk_model* opened = nullptr;
      require(fk_model_info(model) != nullptr, "a text is NULL");
      const bool accepted = ok(fk_model_open(random_.pick(kPaths), random_.pick(kPaths),
                                             random_.one_in(2) ? &opened : nullptr));
      fk_model_close(opened);
      return accepted;
    }
  }
}

bool EngineFuzzer::tokenizer_call() {
  const fk_tokenizer* tokenizer = fk_model_tokenizer(random_.one_in(8) ? nullptr : handles_->model);
  char text[33];
  for (char& c : text) c = static_cast<char>(random_.below(random_.one_in(4) ? 256 : 128));
  text[32] = '\0';
  static constexpr size_t kSizes[] = {0, 1, 2, 8, 32};
  int32_t ids[64];
  char written[256];
  size_t count = 0, bytes = 0;
  switch (random_.below(5)) {
    case 0:
      return ok(fk_tokenizer_encode(tokenizer, random_.one_in(8) ? nullptr : text,
                                    random_.one_in(16) ? SIZE_MAX : random_.pick(kSizes),
                                    random_.one_in(2), random_.one_in(2),
                                    random_.one_in(2) ? ids : nullptr, random_.pick(kSizes),
                                    random_.one_in(2) ? &count : nullptr));
    case 1:
      for (int32_t& id : ids) {
        id = static_cast<int32_t>(random_.between(random_.one_in(50) ? -2 : 0, handles_->vocab));
      }
      return ok(fk_tokenizer_decode(tokenizer, random_.one_in(8) ? nullptr : ids,
                                    random_.pick(kSizes), random_.one_in(2),
                                    random_.one_in(2) ? written : nullptr, random_.pick(kSizes),
                                    random_.one_in(2) ? &bytes : nullptr));
    case 2: {
      static constexpr const char* kRoles[] = {"user", "assistant", "system", "", "\xff"};
      const char* roles[2] = {random_.pick(kRoles), random_.one_in(8) ? nullptr : "user"};
      const char* contents[2] = {text, random_.one_in(8) ? nullptr : "hello"};
      return ok(fk_tokenizer_chat(tokenizer, random_.one_in(8) ? nullptr : roles,
                                  random_.one_in(8) ? nullptr : contents, random_.below(3),
                                  random_.one_in(2), random_.one_in(2) ? ids : nullptr,
                                  random_.pick(kSizes), random_.one_in(2) ? &count : nullptr,
                                  random_.one_in(2) ? written : nullptr, random_.pick(kSizes),
                                  random_.one_in(2) ? &bytes : nullptr));
    }
    case 3:
      require(fk_tokenizer_info(tokenizer) != nullptr, "a text is NULL");
      return fk_tokenizer_find(tokenizer, random_.one_in(4) ? nullptr : text) >= 0;
    default: {
      fk_tokenizer* opened = nullptr;
      static constexpr const char* kPaths[] = {nullptr, "", "/", "/nowhere", "/dev/null", "\xff"};
      const bool accepted =
          ok(fk_tokenizer_open(random_.pick(kPaths), random_.one_in(2) ? &opened : nullptr));
      fk_tokenizer_close(opened);
      return accepted;
    }
  }
}

}  // namespace fk::fuzz
