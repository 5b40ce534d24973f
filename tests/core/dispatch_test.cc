// Calls through the C ABI, as every binding makes them: what is accepted, and the message for each
// thing that is not.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/op.h"
#include "flashkernel/abi.h"

namespace {

constexpr DLDataType kF32 = {kDLFloat, 32, 1};
constexpr DLDataType kF64 = {kDLFloat, 64, 1};
constexpr DLDataType kF16 = {kDLFloat, 16, 1};
constexpr DLDataType kI32 = {kDLInt, 32, 1};
constexpr DLDataType kI64 = {kDLInt, 64, 1};

// A tensor with memory of its own, zero at first.
class Array {
 public:
  Array(std::initializer_list<int64_t> shape, DLDataType dtype = kF32) : shape_(shape) {
    int64_t count = 1;
    for (int64_t size : shape) count *= size;
    bytes_.resize(count * dtype.bits / 8 + 1);
    tensor_.data = bytes_.data();
    tensor_.device = {kDLCPU, 0};
    tensor_.ndim = static_cast<int32_t>(shape.size());
    tensor_.dtype = dtype;
    tensor_.shape = shape_.data();
  }
  Array(const Array&) = delete;

  DLTensor& tensor() { return tensor_; }
  template <class T = float>
  T* data() {
    return reinterpret_cast<T*>(bytes_.data());
  }

 private:
  std::vector<int64_t> shape_;
  std::vector<char> bytes_;
  DLTensor tensor_{};
};

// An op's slots by name, attributes at their defaults.
class Call {
 public:
  explicit Call(const char* op) : op_(fk_find_op(op)) {
    for (const fk::Field& f : op_->declaration.fields) {
      fk_slot slot{};
      if (f.kind == fk::Kind::kNumber) {
        slot.number = f.number_default;
      } else if (f.kind != fk::Kind::kInput && f.kind != fk::Kind::kOutput) {
        slot.integer = f.integer_default;
      }
      slots_.push_back(slot);
    }
  }

  fk_slot& operator[](const char* name) { return slots_[op_->declaration.find(name)]; }
  Call& with(const char* name, Array& array) {
    (*this)[name].tensor = &array.tensor();
    return *this;
  }

  // "" where the call succeeds, otherwise the message.
  std::string operator()(const fk_exec* exec = nullptr, fk_status code = FK_INVALID_ARGUMENT) {
    const fk_status status = fk_op_call(op_, slots_.data(), exec);
    if (status == FK_OK) return "";
    EXPECT_EQ(status, code);
    return fk_last_error();
  }

  const fk_op* op() const { return op_; }
  const fk_slot* slots() const { return slots_.data(); }

 private:
  const fk_op* op_;
  std::vector<fk_slot> slots_;
};

class RmsNorm : public testing::Test {
 protected:
  RmsNorm() {
    call_.with("x", x_).with("y", y_);
    for (int i = 0; i < 8; ++i) x_.data()[i] = static_cast<float>(i - 3);
  }

  Array x_{{2, 4}}, y_{{2, 4}};
  Call call_{"rms_norm_fwd"};
};

TEST_F(RmsNorm, Computes) {
  Array weight({4}), residual({2, 4}), sum({2, 4}), rstd({2});
  for (int i = 0; i < 4; ++i) weight.data()[i] = static_cast<float>(1 + i);
  for (int i = 0; i < 8; ++i) residual.data()[i] = 0.5f;
  call_.with("weight", weight).with("residual", residual).with("sum", sum).with("rstd", rstd);
  ASSERT_EQ(call_(), "");
  for (int row = 0; row < 2; ++row) {
    double square = 0;
    for (int i = 0; i < 4; ++i) square += std::pow(x_.data()[4 * row + i] + 0.5, 2);
    const double expected_rstd = 1 / std::sqrt(square / 4 + 1e-6);
    EXPECT_NEAR(rstd.data()[row], expected_rstd, 1e-6);
    for (int i = 0; i < 4; ++i) {
      const double s = x_.data()[4 * row + i] + 0.5;
      EXPECT_EQ(sum.data()[4 * row + i], s);
      EXPECT_NEAR(y_.data()[4 * row + i], s * expected_rstd * (1 + i), 1e-5);
    }
  }
}

TEST_F(RmsNorm, ReadsThroughStridesAndOffset) {
  std::vector<float> memory(64, std::numeric_limits<float>::quiet_NaN());
  int64_t shape[] = {2, 4}, strides[] = {3, 7};
  for (int r = 0; r < 2; ++r) {
    for (int i = 0; i < 4; ++i) memory[5 + 3 * r + 7 * i] = x_.data()[4 * r + i];
  }
  ASSERT_EQ(call_(), "");
  const std::vector<float> expected(y_.data(), y_.data() + 8);
  DLTensor view = x_.tensor();
  view.data = memory.data();
  view.shape = shape;
  view.strides = strides;
  view.byte_offset = 20;
  call_["x"].tensor = &view;
  ASSERT_EQ(call_(), "");
  for (int i = 0; i < 8; ++i) EXPECT_NEAR(y_.data()[i], expected[i], 1e-6);
}

TEST_F(RmsNorm, EmptyTensorsNeedNoData) {
  Array none({0, 4}), out({0, 4});
  none.tensor().data = out.tensor().data = nullptr;
  call_.with("x", none).with("y", out);
  EXPECT_EQ(call_(), "");
}

TEST_F(RmsNorm, MissingInput) {
  call_["x"].tensor = nullptr;
  EXPECT_EQ(call_(), "rms_norm: x: expected a tensor T[..., N], got none");
}

TEST_F(RmsNorm, NullArguments) {
  EXPECT_EQ(fk_op_call(call_.op(), nullptr, nullptr), FK_INVALID_ARGUMENT);
  EXPECT_STREQ(fk_last_error(), "rms_norm: expected arguments, got NULL");
  EXPECT_EQ(fk_op_call(nullptr, call_.slots(), nullptr), FK_INVALID_ARGUMENT);
  EXPECT_STREQ(fk_last_error(), "op: expected an op handle, got NULL");
  EXPECT_EQ(fk_op_workspace(nullptr, call_.slots(), nullptr), FK_INVALID_ARGUMENT);
  EXPECT_EQ(fk_op_implementation(nullptr, call_.slots(), nullptr), FK_INVALID_ARGUMENT);
  EXPECT_EQ(fk_force_implementation(nullptr, "cpu"), FK_INVALID_ARGUMENT);
  EXPECT_EQ(fk_op_workspace(call_.op(), call_.slots(), nullptr), FK_INVALID_ARGUMENT);
  EXPECT_STREQ(fk_last_error(), "rms_norm: bytes: expected where to put them, got NULL");
  EXPECT_EQ(fk_op_implementation(call_.op(), call_.slots(), nullptr), FK_INVALID_ARGUMENT);
}

TEST_F(RmsNorm, NullData) {
  x_.tensor().data = nullptr;
  EXPECT_EQ(call_(), "rms_norm: x: data is NULL");
}

TEST_F(RmsNorm, TooManyDimensions) {
  Array deep({1, 1, 1, 1, 1, 1, 1, 1, 4});
  call_.with("x", deep);
  EXPECT_EQ(call_(), "rms_norm: x: expected at most 8 dimensions, got 9");
}

TEST_F(RmsNorm, WrongActivationDType) {
  Array x({2, 4}, kF64);
  call_.with("x", x);
  EXPECT_EQ(call_(), "rms_norm: x: expected float32, float16 or bfloat16, got float64");
  Array integers({2, 4}, kI32);
  call_.with("x", integers);
  EXPECT_EQ(call_(), "rms_norm: x: expected float32, float16 or bfloat16, got int32");
}

TEST_F(RmsNorm, ActivationsOfTwoDTypes) {
  Array y({2, 4}, kF16);
  call_.with("y", y);
  EXPECT_EQ(call_(), "rms_norm: y: expected float32, the dtype of x, got float16");
}

TEST_F(RmsNorm, WrongParameterDType) {
  Array weight({4}, kF16);
  call_.with("weight", weight);
  EXPECT_EQ(call_(), "rms_norm: weight: expected float32, got float16");
  Array x({2, 4}, kF16), y({2, 4}, kF16), wide({4}, kF64);
  call_.with("x", x).with("y", y).with("weight", wide);
  EXPECT_EQ(call_(), "rms_norm: weight: expected float32 or float16, the dtype of x, got float64");
  call_.with("weight", weight);
  EXPECT_EQ(call_(), "");
  Array single({4});
  call_.with("weight", single);
  EXPECT_EQ(call_(), "");
}

TEST_F(RmsNorm, WrongStatisticDType) {
  Array rstd({2}, kF16);
  call_.with("rstd", rstd);
  EXPECT_EQ(call_(), "rms_norm: rstd: expected float32, got float16");
}

TEST_F(RmsNorm, ShapeMismatch) {
  Array weight({5});
  call_.with("weight", weight);
  EXPECT_EQ(call_(), "rms_norm: weight: expected shape (4,) to fit x, got (5,)");
  Array square({4, 4});
  call_.with("weight", square);
  EXPECT_EQ(call_(), "rms_norm: weight: expected shape (4,) to fit x, got (4, 4)");
}

TEST_F(RmsNorm, LeadingShapeMismatch) {
  Array y({3, 4});
  call_.with("y", y);
  EXPECT_EQ(call_(), "rms_norm: y: expected shape (2, 4) to fit x, got (3, 4)");
  Array rstd({2, 1});
  call_.with("y", y_).with("rstd", rstd);
  const std::string message = call_();
  EXPECT_NE(message.find("rms_norm: rstd: expected shape (2"), std::string::npos) << message;
  EXPECT_NE(message.find("to fit x, got (2, 1)"), std::string::npos) << message;
}

TEST_F(RmsNorm, Scalar) {
  Array scalar({});
  call_.with("x", scalar);
  EXPECT_EQ(call_(), "rms_norm: x: expected shape (..., N), got ()");
}

TEST_F(RmsNorm, OtherDevice) {
  y_.tensor().device = {kDLCUDA, 1};
  EXPECT_EQ(call_(), "rms_norm: y: expected cpu, where x is, got cuda:1");
  const int32_t unknown = 7;
  std::memcpy(&y_.tensor().device.device_type, &unknown, sizeof unknown);
  EXPECT_EQ(call_(), "rms_norm: y: expected a CPU or CUDA tensor, got DLPack device type 7");
}

TEST_F(RmsNorm, NanAttribute) {
  call_["eps"].number = std::nan("");
  EXPECT_EQ(call_(), "rms_norm: eps: expected a number, got NaN");
}

TEST_F(RmsNorm, AttributeOutOfRange) {
  call_["eps"].number = -1;
  EXPECT_EQ(call_(), "rms_norm: eps: expected at least 0, got -1");
  call_["eps"].number = std::numeric_limits<double>::infinity();
  EXPECT_EQ(call_(), "rms_norm: eps: expected a finite number, got inf");
  call_["eps"].number = 0;
  EXPECT_EQ(call_(), "");
}

TEST_F(RmsNorm, AttributeThatNoFloatHolds) {
  call_["eps"].number = 1e39;
  EXPECT_EQ(call_(), "rms_norm: eps: expected a number that float32 can hold, got 1e+39");
  call_["eps"].number = std::numeric_limits<float>::max();
  EXPECT_EQ(call_(), "");
}

TEST_F(RmsNorm, OutputWithRepeatedElements) {
  int64_t strides[] = {0, 1};
  y_.tensor().strides = strides;
  EXPECT_EQ(call_(),
            "rms_norm: y: expected an output without repeated elements, got stride 0 in "
            "dimension 0");
  strides[0] = 2;  // the second row would begin inside the first
  EXPECT_EQ(call_(),
            "rms_norm: y: expected an output without repeated elements, got stride 2 in "
            "dimension 0");
}

TEST_F(RmsNorm, OutputsMayBeAbsent) {
  call_["y"].tensor = nullptr;
  Array rstd({2});
  call_.with("rstd", rstd);
  ASSERT_EQ(call_(), "");
  EXPECT_GT(rstd.data()[0], 0);
}

TEST_F(RmsNorm, NotAllOutputsMayBeAbsent) {
  call_["y"].tensor = nullptr;
  EXPECT_EQ(call_(),
            "rms_norm: y: expected a tensor T[..., N], since no other output is given, got none");
  size_t bytes = 0;
  EXPECT_EQ(fk_op_workspace(call_.op(), call_.slots(), &bytes), FK_OK);
}

TEST(Dispatch, OutputsAskedForByAFlag) {
  Array q({1, 2, 1, 8}), out({1, 2, 1, 8});
  Call attention("attention_fwd");
  attention.with("q", q).with("k", q).with("v", q).with("out", out);
  attention["return_lse"].integer = 1;
  EXPECT_EQ(attention(),
            "attention: lse: expected a tensor F[B, H, Lq | H, Tq], since return_lse is true, got "
            "none");

  Array x({1, 3, 2}), weight({2, 2}), y({1, 3, 2});
  Call conv("causal_conv1d_fwd");
  conv.with("x", x).with("weight", weight).with("y", y);
  EXPECT_EQ(conv(), "");
  conv["return_final_state"].integer = 1;
  EXPECT_EQ(conv(),
            "causal_conv1d: final_state: expected a tensor T[S, W-1, D], since return_final_state "
            "is true, got none");
}

TEST_F(RmsNorm, QueriesNeedNoData) {
  x_.tensor().data = y_.tensor().data = nullptr;
  size_t bytes = 123;
  const char* name = nullptr;
  EXPECT_EQ(fk_op_workspace(call_.op(), call_.slots(), &bytes), FK_OK);
  EXPECT_NE(bytes, 123u);
  EXPECT_EQ(fk_op_implementation(call_.op(), call_.slots(), &name), FK_OK);
  EXPECT_STREQ(name, "cpu");
}

TEST_F(RmsNorm, QueriesCheckToo) {
  Array weight({5});
  call_.with("weight", weight);
  size_t bytes = 0;
  EXPECT_EQ(fk_op_workspace(call_.op(), call_.slots(), &bytes), FK_INVALID_ARGUMENT);
  EXPECT_STREQ(fk_last_error(), "rms_norm: weight: expected shape (4,) to fit x, got (5,)");
}

TEST_F(RmsNorm, ForcedImplementation) {
  const char* name = nullptr;
  ASSERT_EQ(fk_force_implementation(call_.op(), "reference"), FK_OK);
  EXPECT_EQ(fk_op_implementation(call_.op(), call_.slots(), &name), FK_OK);
  EXPECT_STREQ(name, "reference");
  ASSERT_EQ(fk_force_implementation(call_.op(), nullptr), FK_OK);
  EXPECT_EQ(fk_op_implementation(call_.op(), call_.slots(), &name), FK_OK);
  EXPECT_STREQ(name, "cpu");
}

TEST_F(RmsNorm, ForcedImplementationUnknown) {
  EXPECT_EQ(fk_force_implementation(call_.op(), "abacus"), FK_INVALID_ARGUMENT);
  const std::string message = fk_last_error();
  EXPECT_EQ(message.rfind("rms_norm: implementation: expected one of ", 0), 0u) << message;
  EXPECT_NE(message.find("reference"), std::string::npos) << message;
  EXPECT_NE(message.find(", got abacus"), std::string::npos) << message;
  EXPECT_EQ(call_(), "") << "and nothing changed";
}

TEST_F(RmsNorm, ForcedImplementationOfAnotherDevice) {
  x_.tensor().device = y_.tensor().device = {kDLCUDA, 0};
  ASSERT_EQ(fk_force_implementation(call_.op(), "reference"), FK_OK);
  EXPECT_EQ(call_(nullptr, FK_UNSUPPORTED),
            "rms_norm: the forced implementation 'reference' does not take this CUDA call");
  fk_force_implementation(call_.op(), nullptr);
}

TEST_F(RmsNorm, CallersParallelFor) {
  Array x({300, 1024}), y({300, 1024});
  for (int i = 0; i < 300 * 1024; ++i) x.data()[i] = static_cast<float>(i % 17);
  call_.with("x", x).with("y", y);
  ASSERT_EQ(call_(), "");
  const std::vector<float> expected(y.data(), y.data() + 300 * 1024);
  std::memset(y.data(), 0xff, 300 * 1024 * 4);
  int64_t items = 0;
  fk_exec exec = FK_EXEC_DEFAULTS;
  exec.parallel_pool = &items;
  exec.parallel_for = [](void* pool, int64_t count, int64_t grain, fk_range_body body,
                         void* context) {
    *static_cast<int64_t*>(pool) += count;
    for (int64_t begin = 0; begin < count; begin += grain) {
      body(begin, std::min(begin + grain, count), context);
    }
  };
  ASSERT_EQ(call_(&exec), "");
  EXPECT_GT(items, 0);
  EXPECT_EQ(expected, std::vector<float>(y.data(), y.data() + 300 * 1024));
}

TEST(Dispatch, UnknownOp) {
  EXPECT_EQ(fk_find_op("no_such_op"), nullptr);
  EXPECT_EQ(fk_find_op(""), nullptr);
  EXPECT_EQ(fk_find_op(nullptr), nullptr);
  EXPECT_EQ(fk_op_at(fk_op_count()), nullptr);
  EXPECT_STREQ(fk_op_name(nullptr), "");
}

TEST(Dispatch, ListsEveryOp) {
  ASSERT_GT(fk_op_count(), 0u);
  for (size_t i = 0; i < fk_op_count(); ++i) {
    EXPECT_EQ(fk_find_op(fk_op_name(fk_op_at(i))), fk_op_at(i));
    EXPECT_NE(std::strstr(fk_declarations(), fk_op_name(fk_op_at(i))), nullptr);
  }
}

TEST(Dispatch, BadAxis) {
  Array x({2, 3}), y({2, 3});
  Call call("softmax_fwd");
  call.with("x", x).with("y", y);
  for (int64_t axis : {-2, -1, 0, 1}) {
    call["axis"].integer = axis;
    EXPECT_EQ(call(), "");
  }
  call["axis"].integer = 2;
  EXPECT_EQ(call(), "softmax: axis: expected -2 to 1 for x of shape (2, 3), got 2");
  call["axis"].integer = -3;
  EXPECT_EQ(call(), "softmax: axis: expected -2 to 1 for x of shape (2, 3), got -3");
  call["axis"].integer = std::numeric_limits<int64_t>::min();
  EXPECT_NE(call(), "");
  Array scalar({}), out({});
  call.with("x", scalar).with("y", out);
  call["axis"].integer = -1;
  EXPECT_EQ(call(), "softmax: x: expected at least 1 dimension, got a scalar");
}

TEST(Dispatch, AxisIsMovedLast) {
  Array x({2, 3}), y({3});
  for (int i = 0; i < 6; ++i) x.data()[i] = static_cast<float>(i);
  Call call("sum_fwd");
  call.with("x", x).with("y", y);
  call["axis"].integer = 0;
  std::vector<char> workspace(1 << 16);
  fk_exec exec = FK_EXEC_DEFAULTS;
  exec.workspace =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 255) / 256 * 256);
  exec.workspace_bytes = workspace.size() - 256;
  ASSERT_EQ(call(&exec), "");
  EXPECT_EQ(y.data()[0], 3);
  EXPECT_EQ(y.data()[1], 5);
  EXPECT_EQ(y.data()[2], 7);
}

TEST(Dispatch, SizeGivenAsAttribute) {
  Array dy({2}), dx({2, 3});
  Call call("sum_bwd");
  call.with("dy", dy).with("dx", dx);
  call["N"].integer = 4;
  EXPECT_EQ(call(), "sum_bwd: dx: expected shape (2, 4) to fit N, got (2, 3)");
  call["N"].integer = -1;
  EXPECT_EQ(call(), "sum_bwd: N: expected at least 0, got -1");
  call["N"].integer = 3;
  EXPECT_EQ(call(), "");
}

TEST(Dispatch, BadChoice) {
  Array logits({2, 5}), targets({2}, kI64), loss({});
  Call call("cross_entropy_fwd");
  call.with("logits", logits).with("targets", targets).with("loss", loss);
  call["reduction"].integer = 3;
  EXPECT_EQ(call(), "cross_entropy: reduction: expected a choice from 0 to 2, got 3");
  call["reduction"].integer = -1;
  EXPECT_EQ(call(), "cross_entropy: reduction: expected a choice from 0 to 2, got -1");
}

TEST(Dispatch, LossOfRowsThatStaySeparate) {
  Array logits({2, 5}), targets({2}, kI64), losses({2}), loss({});
  Call call("cross_entropy_fwd");
  call.with("logits", logits).with("targets", targets).with("losses", losses).with("loss", loss);
  EXPECT_EQ(call(), "");
  call["reduction"].integer = 0;
  loss.data()[0] = 77;
  EXPECT_EQ(call(), "cross_entropy: loss: expected none with reduction=none, got a tensor");
  EXPECT_EQ(loss.data()[0], 77);
}

TEST(Dispatch, IndexDType) {
  Array logits({2, 5}), targets({2}, kF32);
  Call call("cross_entropy_fwd");
  call.with("logits", logits).with("targets", targets);
  EXPECT_EQ(call(), "cross_entropy: targets: expected int32 or int64, got float32");
}

TEST(Dispatch, IndexOutOfRange) {
  Array logits({2, 5}), targets({2}, kI64), losses({2});
  Call call("cross_entropy_fwd");
  call.with("logits", logits).with("targets", targets).with("losses", losses);
  call["reduction"].integer = 0;
  targets.data<int64_t>()[1] = 5;
  EXPECT_EQ(call(),
            "cross_entropy: targets: expected values from 0 to 4 or ignore_index=-100, got 5 "
            "at row 1");
}

TEST(Dispatch, GradientOfAnAbsentParameter) {
  Array x({2, 4}), dy({2, 4}), rstd({2}), dweight({4});
  Call call("rms_norm_bwd");
  call.with("dy", dy).with("x", x).with("rstd", rstd).with("dweight", dweight);
  EXPECT_EQ(call(), "rms_norm_bwd: dweight: needs weight, which is absent");
}

TEST(Dispatch, AlternativeShapes) {
  Array x({2, 3, 1, 4}), table({8, 2}), y({2, 3, 1, 4}), positions({5}, kI32);
  Call call("rope_fwd");
  call.with("x", x).with("cos", table).with("sin", table).with("y", y);
  EXPECT_EQ(call(), "");
  call.with("positions", positions);
  EXPECT_EQ(call(), "rope: positions: expected shape (3,) or (2, 3) to fit x, got (5,)");
  Array fits({2, 3}, kI32);
  call.with("positions", fits);
  EXPECT_EQ(call(), "");
}

// Each tensor of a query may come with data or without.
TEST(Dispatch, QueryWithHalfOfTheOffsets) {
  Array q({4, 1, 8}), offsets({3}, kI32), table({8, 4});
  offsets.data<int32_t>()[2] = 4;
  DLTensor without_data = offsets.tensor();
  without_data.data = nullptr;
  Call attention("attention_fwd");
  attention.with("q", q).with("k", q).with("v", q).with("out", q);
  attention.with("rotary_cos", table).with("rotary_sin", table);
  size_t bytes = 0;
  for (const char* absent : {"cu_seqlens_q", "cu_seqlens_k"}) {
    attention.with("cu_seqlens_q", offsets).with("cu_seqlens_k", offsets);
    attention[absent].tensor = &without_data;
    EXPECT_EQ(fk_op_workspace(attention.op(), attention.slots(), &bytes), FK_OK) << fk_last_error();
  }
}

TEST(Dispatch, SizeBelowZero) {
  Array x({1, 3, 4}), weight({4, 0}), state({1, 0, 4}), y({1, 3, 4});
  Call call("causal_conv1d_fwd");
  call.with("x", x).with("weight", weight).with("initial_state", state).with("y", y);
  EXPECT_EQ(call(), "causal_conv1d: weight: expected W to be at least 1, got 0");
}

// The backward of a norm keeps partial sums in its workspace.
class Workspace : public testing::Test {
 protected:
  Workspace() {
    call_.with("dy", dy_).with("x", x_).with("weight", weight_).with("rstd", rstd_);
    call_.with("dx", dx_).with("dweight", dweight_);
    EXPECT_EQ(fk_op_workspace(call_.op(), call_.slots(), &needed_), FK_OK);
    memory_.resize(needed_ + 256);
    aligned_ =
        reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory_.data()) + 255) / 256 * 256);
  }

  Array dy_{257, 96}, x_{257, 96}, weight_{96}, rstd_{257}, dx_{257, 96}, dweight_{96};
  Call call_{"rms_norm_bwd"};
  size_t needed_ = 0;
  std::vector<char> memory_;
  char* aligned_ = nullptr;
};

TEST_F(Workspace, IsAskedFor) {
  ASSERT_GT(needed_, 0u);
  const std::string expected =
      "rms_norm_bwd: workspace: expected at least " + std::to_string(needed_) + " bytes, got ";
  EXPECT_EQ(call_(), expected + "0");
  fk_exec exec = FK_EXEC_DEFAULTS;
  exec.workspace = aligned_;
  exec.workspace_bytes = needed_ - 1;
  EXPECT_EQ(call_(&exec), expected + std::to_string(needed_ - 1));
  exec.workspace_bytes = needed_;
  EXPECT_EQ(call_(&exec), "");
  exec.workspace = nullptr;
  EXPECT_EQ(call_(&exec), expected + "0");
}

TEST_F(Workspace, MustBeAligned) {
  fk_exec exec = FK_EXEC_DEFAULTS;
  exec.workspace = aligned_ + 1;
  exec.workspace_bytes = needed_;
  const std::string message = call_(&exec);
  EXPECT_EQ(message.rfind("rms_norm_bwd: workspace: expected", 0), 0u) << message;
  EXPECT_NE(message.find("alignment"), std::string::npos) << message;
}

TEST_F(Workspace, ComesFromTheAllocator) {
  fk_exec exec = FK_EXEC_DEFAULTS;
  exec.allocator = aligned_;
  exec.allocate = [](void* allocator, size_t) { return allocator; };
  EXPECT_EQ(call_(&exec), "");
  exec.allocate = [](void*, size_t) -> void* { return nullptr; };
  EXPECT_EQ(call_(&exec), "rms_norm_bwd: workspace: expected at least " + std::to_string(needed_) +
                              " bytes, got 0");
}

TEST(Dispatch, LastErrorIsPerThread) {
  EXPECT_EQ(fk_op_call(nullptr, nullptr, nullptr), FK_INVALID_ARGUMENT);
  std::thread([] { EXPECT_STREQ(fk_last_error(), ""); }).join();
  EXPECT_STREQ(fk_last_error(), "op: expected an op handle, got NULL");
}

TEST(Dispatch, CpuTarget) {
  EXPECT_EQ(fk_set_cpu_target("abacus"), FK_INVALID_ARGUMENT);
  const std::string message = fk_last_error();
  EXPECT_EQ(message.rfind("cpu target: expected one of ", 0), 0u) << message;
  EXPECT_NE(message.find(", got abacus"), std::string::npos) << message;
  EXPECT_EQ(fk_set_cpu_target(nullptr), FK_OK);
}

TEST(Dispatch, Threads) {
  const int32_t before = fk_num_threads();
  EXPECT_GE(before, 1);
  fk_set_num_threads(3);
  EXPECT_EQ(fk_num_threads(), 3);
  fk_set_num_threads(before);
}

TEST(Dispatch, VersionAndBuild) {
  EXPECT_NE(std::strlen(fk_version()), 0u);
  EXPECT_NE(std::strstr(fk_build_info(), fk_version()), nullptr);
}

}  // namespace
