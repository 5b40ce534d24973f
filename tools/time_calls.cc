// Times what a call costs beside its kernel: small ops on one row of 64 floats, called from C on
// one thread.
//   time_calls LIBRARY [OP [CALLS]]
// LIBRARY: a libflashkernel.so of any version, so that two can be compared. It prints for each op,
// or for OP alone, the best mean over a batch of calls in nanoseconds, which other programs disturb
// least. With CALLS it makes so many of OP and prints nothing: for tools that count instructions,
//   valgrind --tool=callgrind --toggle-collect=fk_op_call time_calls LIBRARY rms_norm_fwd 1000
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "flashkernel/abi.h"

namespace {

constexpr int64_t kColumns = 64;

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "time_calls: %s\n", why.c_str());
  std::exit(1);
}

class Library {
 public:
  explicit Library(const char* path) : handle_(dlopen(path, RTLD_NOW)) {
    if (handle_ == nullptr) fail(dlerror());
  }
  template <class Function>
  Function* find(const char* name) const {
    void* address = dlsym(handle_, name);
    if (address == nullptr) fail(std::string("the library has no ") + name);
    return reinterpret_cast<Function*>(address);
  }

 private:
  void* handle_;
};

// A call of one op: the tensors that it must have, and its weights, of ones; attributes as they are
// by default.
class Call {
 public:
  Call(const Library& library, const std::string& name)
      : op_(library.find<decltype(fk_find_op)>("fk_find_op")(name.c_str())),
        call_(library.find<decltype(fk_op_call)>("fk_op_call")),
        last_error_(library.find<decltype(fk_last_error)>("fk_last_error")) {
    if (op_ == nullptr) fail("the library has no op " + name);
    const auto all = declarations(library);
    const auto& declaration = *std::find_if(
        all.begin(), all.end(), [&](const nlohmann::json& op) { return op["name"] == name; });
    tensors_.resize(declaration["fields"].size());
    for (const auto& field : declaration["fields"]) add(field);
    if (call_(op_, slots_.data(), nullptr) != FK_OK) fail(last_error_());
  }

  void make(int64_t count) const {
    for (int64_t i = 0; i < count; ++i) call_(op_, slots_.data(), nullptr);
  }

 private:
  static nlohmann::json declarations(const Library& library) {
    std::string text = library.find<decltype(fk_declarations)>("fk_declarations")();
    const std::string infinite = "1e999";  // which this parser refuses
    for (size_t at = 0; (at = text.find(infinite, at)) != std::string::npos;) {
      text.replace(at, infinite.size(), "1e308");
    }
    return nlohmann::json::parse(text);
  }

  void add(const nlohmann::json& field) {
    const std::string kind = field["kind"], name = field["name"];
    const auto default_of = [&](auto otherwise) {
      const auto found = field.find("default");
      using Value = decltype(otherwise);
      if (found == field.end() || !(found->is_number() || found->is_boolean())) return otherwise;
      return found->is_boolean() ? static_cast<Value>(found->template get<bool>())
                                 : found->template get<Value>();
    };
    fk_slot slot{};
    if (kind == "input" || kind == "output") {
      if (name == "x" || name == "y" || name == "weight" || name == "bias") {
        slot.tensor = tensor(field["type"].get<std::string>());
      }
    } else if (kind == "number") {
      slot.number = default_of(0.0);
      if (slot.number == 1e308) slot.number = std::numeric_limits<double>::infinity();
    } else {
      slot.integer = default_of(int64_t{0});
    }
    slots_.push_back(slot);
  }

  // x and y are (1, 64), what is as long as a row (64), and what has one number for each row (1).
  DLTensor* tensor(const std::string& type) {
    static int64_t row[2] = {1, kColumns};
    DLTensor& t = tensors_[slots_.size()];
    memory_.emplace_back(kColumns, 1.0f);
    t.data = memory_.back().data();
    t.device = {kDLCPU, 0};
    t.dtype = {kDLFloat, 32, 1};
    const bool has_rows = type.find("...") != std::string::npos;
    const bool has_columns = type.find("N]") != std::string::npos;
    t.ndim = has_rows && has_columns ? 2 : 1;
    t.shape = has_rows ? row : row + 1;
    return &t;
  }

  const fk_op* op_;
  decltype(fk_op_call)* call_;
  decltype(fk_last_error)* last_error_;
  std::vector<fk_slot> slots_;
  std::vector<DLTensor> tensors_;
  std::vector<std::vector<float>> memory_;
};

double nanoseconds(const Call& call) {
  using Clock = std::chrono::steady_clock;
  constexpr int kBatches = 2000;
  constexpr int64_t kCalls = 500;
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kBatches; ++i) {
    const auto begin = Clock::now();
    call.make(kCalls);
    best = std::min(best, std::chrono::duration<double, std::nano>(Clock::now() - begin).count());
  }
  return best / static_cast<double>(kCalls);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 4) {
    std::fprintf(stderr, "usage: time_calls LIBRARY [OP [CALLS]]\n");
    return 2;
  }
  const Library library(argv[1]);
  std::vector<std::string> ops = {"rms_norm_fwd", "layer_norm_fwd", "softmax_fwd", "sum_fwd"};
  if (argc > 2) ops = {argv[2]};
  for (const std::string& op : ops) {
    const Call call(library, op);
    if (argc > 3) {
      call.make(std::strtoll(argv[3], nullptr, 10));
    } else {
      std::printf("%-16s %7.1f ns\n", op.c_str(), nanoseconds(call));
    }
  }
  return 0;
}
