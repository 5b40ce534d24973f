// The C ABI of packed linear layers: what they compute is tested from Python
// (test_packed_linear.py), here are the arguments that cannot be meant.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "../core/abi_calls.h"
#include "flashkernel/linear.h"

namespace fk::test {
namespace {

constexpr DLDataType kBF16 = {kDLBfloat, 16, 1};

class PackedLinearAbi : public testing::Test {
 protected:
  PackedLinearAbi() {
    for (int i = 0; i < 12; ++i) weight_.data()[i] = static_cast<float>(i);
    for (int i = 0; i < 8; ++i) x_.data()[i] = 1;
  }
  void TearDown() override { fk_packed_linear_close(layer_); }

  // "" where it succeeds, otherwise the message.
  std::string open(DLTensor* weight, DLTensor* bias = nullptr, const char* dtype = nullptr,
                   const char* activation = nullptr) {
    fk_packed_linear_close(layer_);
    layer_ = nullptr;
    return message_of(fk_packed_linear_open(weight, bias, dtype, activation, &layer_));
  }
  std::string call(DLTensor* x, DLTensor* y) {
    return message_of(fk_packed_linear_call(layer_, x, y, nullptr));
  }
  static std::string message_of(fk_status status) { return status == FK_OK ? "" : fk_last_error(); }

  Array weight_{{3, 4}}, bias_{{3}}, x_{{2, 4}}, y_{{2, 3}};
  fk_packed_linear* layer_ = nullptr;
};

void expect_in(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "'" << message << "' lacks " << part;
  }
}

TEST_F(PackedLinearAbi, Computes) {
  for (const char* dtype : {static_cast<const char*>(nullptr), "float32", "bfloat16", "int8"}) {
    ASSERT_EQ(open(&weight_.tensor(), &bias_.tensor(), dtype), "");
    EXPECT_GT(fk_packed_linear_bytes(layer_), 0);
    ASSERT_EQ(call(&x_.tensor(), &y_.tensor()), "");
    for (int i = 0; i < 6; ++i) EXPECT_NEAR(y_.data()[i], 6.0f + 16.0f * (i % 3), 0.3f) << i;
  }
}

TEST_F(PackedLinearAbi, OpeningRefuses) {
  expect_in(open(nullptr), {"PackedLinear: weight", "NULL"});
  EXPECT_EQ(fk_packed_linear_open(&weight_.tensor(), nullptr, nullptr, nullptr, nullptr),
            FK_INVALID_ARGUMENT);
  expect_in(fk_last_error(), {"packed", "NULL"});
  for (const char* dtype : {"float16", "", "int4", "\xff"}) {
    expect_in(open(&weight_.tensor(), nullptr, dtype), {"dtype", "float32, bfloat16 or int8"});
  }
  expect_in(open(&weight_.tensor(), nullptr, nullptr, "tanh?"), {"activation", "tanh?"});
  expect_in(open(&bias_.tensor()), {"weight", "(out, in)", "(3,)"});
  Array odd({3, 4}, kI32), wide({1, 131073});
  expect_in(open(&odd.tensor()), {"weight", "float32, float16 or bfloat16", "int32"});
  expect_in(open(&wide.tensor(), nullptr, "int8"), {"weight", "131072", "131073"});
  expect_in(open(&weight_.tensor(), &x_.tensor()), {"bias", "(3,)", "(2, 4)"});
  weight_.data()[5] = HUGE_VALF;
  expect_in(open(&weight_.tensor(), nullptr, "int8"), {"weight", "finite"});
  EXPECT_EQ(layer_, nullptr);
  EXPECT_EQ(fk_packed_linear_bytes(nullptr), 0);
  fk_packed_linear_close(nullptr);
}

// A weight or a bias of one element, repeated: as many as there are in the largest tensor there can
// be, for which there is no memory.
TEST_F(PackedLinearAbi, LayersThatNoMemoryHolds) {
  constexpr int64_t kMost = int64_t{1} << 56;
  Array one({1}, kBF16), two({1}, kF16);
  int64_t strides[2] = {0, 0};
  for (const int64_t rows : {int64_t{1}, int64_t{2}, int64_t{15}, int64_t{1} << 28, kMost}) {
    int64_t shape[2] = {rows, kMost / rows};
    DLTensor weight = one.tensor(), bias = two.tensor();
    weight.ndim = 2;
    weight.shape = shape;
    weight.strides = bias.strides = strides;
    bias.shape = shape;
    for (const char* dtype : {static_cast<const char*>(nullptr), "float32", "int8"}) {
      if (dtype != nullptr && *dtype == 'i' && shape[1] > 131072) continue;
      expect_in(open(&weight, &bias, dtype), {"PackedLinear: out of memory"});
    }
  }
}

TEST_F(PackedLinearAbi, CallsRefuse) {
  expect_in(call(&x_.tensor(), &y_.tensor()), {"packed", "NULL"});
  ASSERT_EQ(open(&weight_.tensor()), "");
  expect_in(call(nullptr, &y_.tensor()), {"x", "NULL"});
  expect_in(call(&x_.tensor(), nullptr), {"y", "NULL"});
  Array half({2, 4}, kF16), scalar({}), wide({2, 5}), ints({2, 4}, kI64);
  expect_in(call(&half.tensor(), &y_.tensor()), {"y", "x's device and dtype", "float32"});
  expect_in(call(&ints.tensor(), &y_.tensor()), {"x", "float32, float16 or bfloat16", "int64"});
  expect_in(call(&scalar.tensor(), &y_.tensor()), {"x", "(..., 4)", "()"});
  expect_in(call(&wide.tensor(), &y_.tensor()), {"x", "(..., 4)", "(2, 5)"});
  expect_in(call(&x_.tensor(), &wide.tensor()), {"y", "3 last", "(2, 5)"});
  DLTensor elsewhere = x_.tensor();
  elsewhere.device = {kDLCUDA, 0};
  expect_in(call(&elsewhere, &y_.tensor()), {"x", "on the CPU"});
}

TEST_F(PackedLinearAbi, NoElementIsWrittenTwice) {
  ASSERT_EQ(open(&weight_.tensor()), "");
  int64_t repeated[2] = {0, 1}, crossed[2] = {2, 1};
  for (int64_t* strides : {repeated, crossed}) {
    DLTensor y = y_.tensor();
    y.strides = strides;
    expect_in(call(&x_.tensor(), &y), {"y", "repeated elements", "dimension 0"});
  }
}

TEST_F(PackedLinearAbi, NothingThatIsReadIsOverwritten) {
  ASSERT_EQ(open(&weight_.tensor()), "");
  Array both({14});
  for (const int64_t between : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{8}}) {
    DLTensor x = x_.tensor(), y = y_.tensor();
    x.data = both.data();
    y.data = both.data() + between;
    if (between == 8) {
      EXPECT_EQ(call(&x, &y), "");
    } else {
      expect_in(call(&x, &y), {"y", "memory of its own", "x"});
    }
  }
}

// Without columns there is nothing to compute, for however many rows.
TEST_F(PackedLinearAbi, EmptyOutputs) {
  Array none({0, 4});
  int64_t x_shape[2] = {int64_t{1} << 50, 4}, y_shape[2] = {int64_t{1} << 50, 0},
          strides[2] = {0, 1};
  DLTensor x = x_.tensor(), y = y_.tensor();
  x.shape = x_shape;
  x.strides = strides;
  y.shape = y_shape;
  for (const char* dtype : {"float32", "bfloat16", "int8"}) {
    ASSERT_EQ(open(&none.tensor(), nullptr, dtype), "");
    EXPECT_EQ(call(&x, &y), "") << dtype;
  }
}

}  // namespace
}  // namespace fk::test
