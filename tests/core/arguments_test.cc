// The arguments of calls through the C ABI: the message for each thing that is not accepted.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "abi_calls.h"

namespace {

using fk::test::Array;
using fk::test::Call;
using fk::test::kF16;
using fk::test::kF32;
using fk::test::kF64;
using fk::test::kI32;
using fk::test::kI64;
using fk::test::RmsNorm;

TEST_F(RmsNorm, MissingInput) {
  call_["x"].tensor = nullptr;
  EXPECT_EQ(call_(), "rms_norm: x: expected a tensor T[..., N], got none");
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

TEST(RmsNormBackward, GradientOfNoGate) {
  Array rows({2, 4}), rstd({2}), dx({2, 4}), dgate({2, 4});
  Call call("rms_norm_bwd");
  call.with("dy", rows).with("x", rows).with("rstd", rstd).with("dx", dx).with("dgate", dgate);
  EXPECT_EQ(call(), "rms_norm_bwd: dgate: expected none without gate, got a tensor");
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

TEST(Dispatch, SizeBelowZero) {
  Array x({1, 3, 4}), weight({4, 0}), state({1, 0, 4}), y({1, 3, 4});
  Call call("causal_conv1d_fwd");
  call.with("x", x).with("weight", weight).with("initial_state", state).with("y", y);
  EXPECT_EQ(call(), "causal_conv1d: weight: expected W to be at least 1, got 0");
}

}  // namespace
