// Calls through the C ABI, as every binding makes them: what a call computes, what can be asked
// before it, which implementation runs and where its workspace comes from.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "abi_calls.h"

namespace {

using fk::test::Array;
using fk::test::Call;
using fk::test::kI32;
using fk::test::RmsNorm;

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

TEST_F(RmsNorm, OutputsMayBeAbsent) {
  call_["y"].tensor = nullptr;
  Array rstd({2});
  call_.with("rstd", rstd);
  ASSERT_EQ(call_(), "");
  EXPECT_GT(rstd.data()[0], 0);
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
