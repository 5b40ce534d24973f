// What the parts of fk_fuzz_abi share. Each makes calls of the C ABI that must all return, with a
// message where they fail; sanitizers watch.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check/drawn_call.h"
#include "flashkernel/abi.h"

namespace fk::fuzz {

class Random {
 public:
  explicit Random(uint64_t seed) : numbers_(seed) {}

  size_t below(size_t n) { return static_cast<size_t>(numbers_() % n); }
  bool one_in(size_t n) { return below(n) == 0; }
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(below(static_cast<size_t>(high - low + 1)));
  }
  template <class T, size_t n>
  const T& pick(const T (&values)[n]) {
    return values[below(n)];
  }

 private:
  std::mt19937_64 numbers_;
};

// Ends the program unless the status is one of the ABI's and, where it is not FK_OK, says why.
void require_message(fk_status status);

// Every op.
class OpFuzzer {
 public:
  explicit OpFuzzer(uint64_t seed) : random_(seed) {}
  bool call();  // whether it was accepted

 private:
  const DrawnCall& sample_of(const fk_op* op);

  Random random_;
  std::map<const fk_op*, std::vector<DrawnCall>> samples_;
};

// Models, tokenizers and engines: good handles, hostile arguments, and files whose weights make no
// sense.
class EngineFuzzer {
 public:
  explicit EngineFuzzer(uint64_t seed);
  ~EngineFuzzer();
  bool call();

 private:
  struct Handles;
  bool open_spoiled();
  bool engine_call();
  bool model_call();
  bool tokenizer_call();

  Random random_;
  std::string good_file_, folder_;
  std::unique_ptr<Handles> handles_;
};

}  // namespace fk::fuzz
