// Memory that runs out at every allocation there is, one after the other: each function of the C
// ABI then says so, lets no exception out, and works again afterwards. A program of its own, since
// it replaces operator new.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "../model/files.h"
#include "flashkernel/engine.h"
#include "flashkernel/linear.h"

namespace {

// How many more allocations succeed, on any thread; below 0: all.
std::atomic<int64_t> left{-1};

void* allocate(size_t bytes) {
  if (left.load(std::memory_order_relaxed) >= 0 && left.fetch_sub(1) == 0) throw std::bad_alloc();
  void* memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes); }
void* operator new[](size_t bytes) { return allocate(bytes); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return allocate(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace fk {
namespace {

// Calls with ever later allocations failing, until one call needs no more of them. What fails is
// FK_INTERNAL and named. Where there are many allocations, not each of them is tried.
void run_out(const char* what, const std::function<fk_status()>& call) {
  SCOPED_TRACE(what);
  for (int64_t n = 0;; n += n < 100 ? 1 : n / 7) {
    left = n;
    const fk_status status = call();
    const bool failed = left.exchange(-1) < 0;
    if (!failed) {
      ASSERT_EQ(status, FK_OK) << fk_last_error();
      return;
    }
    if (status == FK_OK) continue;  // it did without
    const std::string message = fk_last_error();
    ASSERT_EQ(status, FK_INTERNAL) << n << " " << message;
    ASSERT_NE(message.find("out of memory"), std::string::npos) << n << " " << message;
  }
}

class OutOfMemory : public testing::Test {
 protected:
  // What the library sets up when it is first asked, too.
  static void SetUpTestSuite() {
    const fk_op* op = nullptr;
    for (int64_t n = 0; op == nullptr; n += n < 100 ? 1 : n / 7) {
      left = n;
      op = fk_find_op("softmax_fwd");
      left = -1;
    }
  }

  void SetUp() override {
    path_ = testing::TempDir() + "/fk_out_of_memory.gguf";
    const std::string bytes = model::GgufFile::llama().build();
    std::ofstream(path_, std::ios::binary)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    ASSERT_EQ(fk_model_open(path_.c_str(), nullptr, &model_), FK_OK) << fk_last_error();
    ASSERT_EQ(fk_engine_open(model_, 0, nullptr, nullptr, &engine_), FK_OK) << fk_last_error();
    int64_t rows = 0;
    ASSERT_EQ(fk_model_weight(model_, 0, nullptr, nullptr, &rows, nullptr), FK_OK);
    logits_.resize(static_cast<size_t>(rows) * 8);
  }
  void TearDown() override {
    fk_engine_close(engine_);
    fk_model_close(model_);
    std::remove(path_.c_str());
  }

  std::string path_;
  fk_model* model_ = nullptr;
  fk_engine* engine_ = nullptr;
  std::vector<float> logits_;
  int32_t ids_[4] = {1, 2, 3, 4};
};

TEST_F(OutOfMemory, Ops) {
  std::vector<float> x(64 * 1024), y(x.size());
  int64_t shape[] = {64, 1024}, wrong[] = {63, 1024};
  DLTensor tx{x.data(), {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, nullptr, 0}, ty = tx, tw = tx;
  ty.data = y.data();
  tw.shape = wrong;
  const fk_op* op = fk_find_op("softmax_fwd");
  fk_slot slots[3] = {}, refused[3] = {};
  slots[0].tensor = refused[0].tensor = &tx;
  slots[1].integer = refused[1].integer = -1;
  slots[2].tensor = &ty;
  refused[2].tensor = &tw;
  const char* name = nullptr;
  size_t bytes = 0;
  for (const char* implementation : {"cpu", "reference"}) {
    ASSERT_EQ(fk_force_implementation(op, implementation), FK_OK);
    run_out("fk_op_call", [&] { return fk_op_call(op, slots, nullptr); });
  }
  ASSERT_EQ(fk_force_implementation(op, nullptr), FK_OK);
  run_out("fk_op_workspace", [&] { return fk_op_workspace(op, slots, &bytes); });
  run_out("fk_op_implementation", [&] { return fk_op_implementation(op, slots, &name); });
  run_out("a call that is refused", [&] {
    const fk_status status = fk_op_call(op, refused, nullptr);
    EXPECT_NE(fk_last_error()[0], '\0');
    return status == FK_INVALID_ARGUMENT ? FK_OK : status;
  });
  run_out("fk_set_cpu_target", [&] {
    const fk_status status = fk_set_cpu_target("abacus");
    return status == FK_INVALID_ARGUMENT ? FK_OK : status;
  });
  run_out("fk_declarations", [&] { return *fk_declarations() == '[' ? FK_OK : FK_INTERNAL; });
  run_out("fk_build_info", [&] { return *fk_build_info() == '{' ? FK_OK : FK_INTERNAL; });
  run_out("fk_find_op", [&] {
    return fk_find_op("selective_state_update_fwd") != nullptr ? FK_OK : FK_INTERNAL;
  });
}

TEST_F(OutOfMemory, PackedLinears) {
  std::vector<float> weight(96 * 64), bias(96), x(5 * 64), y(5 * 96);
  int64_t weight_shape[] = {96, 64}, x_shape[] = {5, 64}, y_shape[] = {5, 96};
  const auto tensor = [](std::vector<float>& data, int64_t* shape, int32_t ndim) {
    return DLTensor{data.data(), {kDLCPU, 0}, ndim, {kDLFloat, 32, 1}, shape, nullptr, 0};
  };
  DLTensor w = tensor(weight, weight_shape, 2), b = tensor(bias, weight_shape, 1);
  DLTensor in = tensor(x, x_shape, 2), out = tensor(y, y_shape, 2);
  for (const char* dtype : {"float32", "bfloat16", "int8"}) {
    SCOPED_TRACE(dtype);
    run_out("fk_packed_linear_open", [&] {
      fk_packed_linear* layer = nullptr;
      const fk_status status = fk_packed_linear_open(&w, &b, dtype, "gelu", &layer);
      EXPECT_EQ(layer != nullptr, status == FK_OK);
      fk_packed_linear_close(layer);
      return status;
    });
    fk_packed_linear* layer = nullptr;
    ASSERT_EQ(fk_packed_linear_open(&w, &b, dtype, "gelu", &layer), FK_OK) << fk_last_error();
    run_out("fk_packed_linear_call",
            [&] { return fk_packed_linear_call(layer, &in, &out, nullptr); });
    run_out("a call that is refused", [&] {
      const fk_status status = fk_packed_linear_call(layer, &in, &in, nullptr);
      EXPECT_NE(fk_last_error()[0], '\0');
      return status == FK_INVALID_ARGUMENT ? FK_OK : status;
    });
    fk_packed_linear_close(layer);
  }
}

TEST_F(OutOfMemory, Engines) {
  fk_sampling s{};
  s.max_tokens = 3;
  s.top_p = 1;
  s.temperature = 1;
  s.repetition_penalty = 1.5;
  s.ignore_eos = 1;
  const char* stops[] = {"a stop that is longer than a short string"};
  s.stop = stops;
  s.stop_count = 1;
  run_out("fk_engine_open", [&] {
    fk_engine* engine = nullptr;
    const fk_status status = fk_engine_open(model_, 0, nullptr, "q8_0", &engine);
    fk_engine_close(engine);
    return status;
  });
  run_out("fk_engine_logits", [&] { return fk_engine_logits(engine_, ids_, 4, logits_.data()); });
  run_out("fk_engine_step", [&] {
    fk_engine* engine = nullptr;  // a fresh one has no buffers for a step yet
    const int64_t allowed = left.exchange(-1);
    EXPECT_EQ(fk_engine_open(model_, 0, nullptr, nullptr, &engine), FK_OK);
    left = allowed;
    const fk_status status = fk_engine_step(engine, 1, logits_.data());
    const int64_t now = left.exchange(-1);
    EXPECT_EQ(fk_engine_step(engine, 1, logits_.data()), FK_OK) << "and works again";
    fk_engine_close(engine);
    left = now;
    return status;
  });
  run_out("fk_engine_begin", [&] { return fk_engine_begin(engine_, ids_, 4, &s); });
  run_out("fk_engine_next", [&] {
    const int64_t allowed = left.exchange(-1);
    EXPECT_EQ(fk_engine_begin(engine_, ids_, 4, &s), FK_OK);
    left = allowed;
    const char* text = nullptr;
    size_t bytes = 0;
    int32_t more = 1;
    fk_status status = FK_OK;
    while (status == FK_OK && more != 0) status = fk_engine_next(engine_, &text, &bytes, &more);
    return status;
  });
  run_out("fk_engine_result",
          [&] { return *fk_engine_result(engine_) == '{' ? FK_OK : FK_INTERNAL; });
}

TEST_F(OutOfMemory, Models) {
  run_out("fk_model_open", [&] {
    fk_model* model = nullptr;
    const fk_status status = fk_model_open(path_.c_str(), nullptr, &model);
    fk_model_close(model);
    return status;
  });
  run_out("fk_tokenizer_open", [&] {
    fk_tokenizer* tokenizer = nullptr;
    const fk_status status = fk_tokenizer_open(path_.c_str(), &tokenizer);
    fk_tokenizer_close(tokenizer);
    return status;
  });
  const fk_tokenizer* tokenizer = fk_model_tokenizer(model_);
  int32_t ids[64];
  char text[256];
  size_t count = 0, bytes = 0;
  run_out("fk_tokenizer_encode",
          [&] { return fk_tokenizer_encode(tokenizer, "hello there", 11, 1, 1, ids, 64, &count); });
  run_out("fk_tokenizer_decode", [&] {
    return fk_tokenizer_decode(tokenizer, ids, std::min<size_t>(count, 64), 0, text, 256, &bytes);
  });
  run_out("fk_tokenizer_find", [&] {
    return fk_tokenizer_find(tokenizer, "a token of more bytes than a short string has") == -1
               ? FK_OK
               : FK_INTERNAL;
  });
}

}  // namespace
}  // namespace fk
