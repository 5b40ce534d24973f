// What the parts of fk_fuzz_abi share. Each makes calls of the C ABI that must all return, with a
// message where they fail; sanitizers watch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check/drawn_call.h"
#include "flashkernel/abi.h"
#include "flashkernel/linear.h"

namespace fk::fuzz {

// Sizes, strides and settings that nobody means.
inline constexpr int64_t kHuge[] = {std::numeric_limits<int64_t>::min(),
                                    std::numeric_limits<int64_t>::max(),
                                    int64_t{1} << 62,
                                    -(int64_t{1} << 62),
                                    int64_t{1} << 57,
                                    int64_t{1} << 40,
                                    int64_t{1} << 31,
                                    -1,
                                    0};

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
  // A size that is far off, or a small one.
  int64_t size() { return one_in(2) ? pick(kHuge) : between(0, 9); }

 private:
  std::mt19937_64 numbers_;
};

// Ends the program unless the status is one of the ABI's and, where it is not FK_OK, says why.
void require_message(fk_status status);

// A tensor argument as it will be sent, with memory of exactly its own size.
struct Argument {
  static constexpr int kMaxRank = 10;
  // Memory of more elements is not provided.
  static constexpr int64_t kMostElements = 1 << 16;

  DLTensor tensor{};
  std::array<int64_t, kMaxRank> shape{}, strides{};
  std::unique_ptr<char[]> memory;
  bool is_present = false;
  bool is_right = true;     // false: it has no memory that a call could use
  bool loses_data = false;  // it is sent without its memory

  Argument() = default;
  Argument(const Argument&) = delete;

  void set(DType dtype, const std::vector<int64_t>& sizes, const std::vector<int64_t>& steps);
  int64_t item() const { return std::max<int64_t>(1, (tensor.dtype.bits + 7) / 8); }
  // How far below and above the first element the others reach; false where that is too far.
  bool reach(int64_t* below, int64_t* above) const;
  // Makes something about its shape, strides, dtype, device or address wrong, or strange.
  void spoil(Random* random);
  // Gives it memory, if it can have some, and returns the bytes of that.
  size_t provide();
  // Lets `other` use its memory instead, where it is large enough.
  void share_with(Argument* other) const;
};

// A caller's own threads: one, which takes ranges from the end.
void run_backwards(void* pool, int64_t count, int64_t grain, fk_range_body body, void* context);

// A drawn call, and its tensors' values as they lie in memory, since it takes many calls.
struct Sample {
  DrawnCall drawn_call;
  std::vector<std::string> bytes;  // by field
};

// Every op.
class OpFuzzer {
 public:
  explicit OpFuzzer(uint64_t seed) : random_(seed) {}
  bool call();  // whether it was accepted

 private:
  const Sample& sample_of(const fk_op* op);

  Random random_;
  std::map<const fk_op*, std::vector<Sample>> samples_;
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

// Linear layers that are packed once: hostile weights, good layers with hostile arguments.
class PackedFuzzer {
 public:
  explicit PackedFuzzer(uint64_t seed) : random_(seed) {}
  ~PackedFuzzer();
  bool call();

 private:
  struct Layer {
    fk_packed_linear* handle = nullptr;
    int64_t in = 0, out = 0;
  };
  void draw(Argument* a, DType dtype, const std::vector<int64_t>& shape);
  void fill(Argument* a, DType dtype);
  bool open(Layer* layer);
  bool open_huge();

  Random random_;
  Layer layers_[4];
};

}  // namespace fk::fuzz
