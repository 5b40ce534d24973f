// Ops that hand work from thread to thread inside a call (the steps of a recurrent net, a norm
// behind a product, a scan in pieces), called by several threads at once, for ThreadSanitizer to
// watch. It runs without, too, where results are compared.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "abi_calls.h"
#include "check/drawn_call.h"
#include "core/heap_workspace.h"
#include "flashkernel/linear.h"

// What bindings call, and no header has.
extern "C" int fk_cpu_call(const fk_op* op, const fk_slot* slots);

namespace fk::test {
namespace {

constexpr int kCallers = 3;

// body(caller) on kCallers threads at once.
template <class Body>
void on_callers(const Body& body) {
  std::vector<std::thread> callers;
  for (int c = 0; c < kCallers; ++c) callers.emplace_back([&body, c] { body(c); });
  for (std::thread& caller : callers) caller.join();
}

// A caller's own threads: one for each range, beside the caller, who only waits.
void threads_of_their_own(void*, int64_t count, int64_t grain, fk_range_body body, void* context) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < count; i += grain) {
    threads.emplace_back([=] { body(i, std::min(count, i + grain), context); });
  }
  for (std::thread& thread : threads) thread.join();
}

class OpThreads : public testing::Test {
 protected:
  // However many processors there are.
  void SetUp() override { fk_set_num_threads(3); }
  void TearDown() override { fk_set_num_threads(threads_); }

 private:
  const int32_t threads_ = fk_num_threads();
};

class DrawnOpThreads : public OpThreads, public testing::WithParamInterface<const char*> {};

TEST_P(DrawnOpThreads, GiveWhatOneGives) {
  const fk_op* op = fk_find_op(GetParam());
  ASSERT_NE(op, nullptr);
  DrawOptions options;
  options.min_elements = 1 << 13;
  options.max_elements = 1 << 14;
  for (options.seed = 0; options.seed < 3; ++options.seed) {
    DrawnCall drawn_call;
    Status status = draw_call(*op, options, &drawn_call);
    ASSERT_TRUE(status.ok()) << status.message();
    SCOPED_TRACE(drawn_call.describe());
    std::vector<DrawnTensor> expected;
    fk_set_num_threads(1);
    status = run_call(drawn_call, nullptr, host_memory(), &expected);
    ASSERT_TRUE(status.ok()) << status.message();
    fk_set_num_threads(3);
    on_callers([&](int) {
      for (int i = 0; i < 2; ++i) {
        std::vector<DrawnTensor> got;
        const Status ran = run_call(drawn_call, nullptr, host_memory(), &got);
        EXPECT_TRUE(ran.ok()) << ran.message();
        std::string worst;
        EXPECT_LE(largest_error(drawn_call, expected, got, &worst), 1) << worst;
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ops, DrawnOpThreads,
                         testing::Values("selective_scan_fwd", "selective_scan_bwd", "linear_fwd",
                                         "linear_bwd"));

// An lstm or a gru whose steps are enough for a team of threads, forward and backward.
class RecurrentNet {
 public:
  explicit RecurrentNet(bool lstm)
      : lstm_(lstm),
        w_ih_({(lstm ? 4 : 3) * kUnits, kIn}),
        w_hh_({(lstm ? 4 : 3) * kUnits, kUnits}),
        dw_hh_({(lstm ? 4 : 3) * kUnits, kUnits}) {
    fill(&x_, kSteps * kIn);
    fill(&dy_, kSteps * kUnits);
    fill(&w_ih_, (lstm ? 4 : 3) * kUnits * kIn);
    fill(&w_hh_, (lstm ? 4 : 3) * kUnits * kUnits);
  }

  // y, dx and dw_hh.
  std::vector<float> run(fk_parallel_for_fn parallel_for) {
    Call forward(lstm_ ? "lstm_fwd" : "gru_fwd"), backward(lstm_ ? "lstm_bwd" : "gru_bwd");
    forward.with("x", x_).with("w_ih", w_ih_).with("w_hh", w_hh_);
    forward.with("y", y_).with("gates", gates_);
    backward.with("dy", dy_).with("x", x_).with("w_ih", w_ih_).with("w_hh", w_hh_);
    backward.with("y", y_).with("gates", gates_).with("dx", dx_).with("dw_hh", dw_hh_);
    if (lstm_) forward.with("cells", cells_), backward.with("cells", cells_);
    for (Call* call : {&forward, &backward}) {
      HeapWorkspace workspace;
      fk_exec exec = FK_EXEC_DEFAULTS;
      exec.parallel_for = parallel_for;
      workspace.serve(&exec);
      EXPECT_EQ((*call)(&exec), "");
    }
    std::vector<float> all(y_.data(), y_.data() + kSteps * kUnits);
    all.insert(all.end(), dx_.data(), dx_.data() + kSteps * kIn);
    all.insert(all.end(), dw_hh_.data(), dw_hh_.data() + (lstm_ ? 4 : 3) * kUnits * kUnits);
    return all;
  }

 private:
  static constexpr int64_t kBatch = 4, kLength = 5, kSteps = kBatch * kLength;
  static constexpr int64_t kIn = 32, kUnits = 64;

  static void fill(Array* array, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      array->data()[i] = static_cast<float>(i * 7 % 23 - 11) * 0.02f;
    }
  }

  const bool lstm_;
  Array x_{{kBatch, kLength, kIn}}, dx_{{kBatch, kLength, kIn}};
  Array y_{{kBatch, kLength, kUnits}}, dy_{{kBatch, kLength, kUnits}};
  Array gates_{{kBatch, kLength, 4 * kUnits}}, cells_{{kBatch, kLength, kUnits}};
  Array w_ih_, w_hh_, dw_hh_;
};

TEST_F(OpThreads, StepRecurrentNetsTogether) {
  for (const bool lstm : {true, false}) {
    fk_set_num_threads(1);
    const std::vector<float> expected = RecurrentNet(lstm).run(nullptr);
    fk_set_num_threads(3);
    const auto expect_same = [&](fk_parallel_for_fn parallel_for) {
      RecurrentNet net(lstm);
      for (int i = 0; i < 5; ++i) {
        const std::vector<float> got = net.run(parallel_for);
        for (size_t k = 0; k < got.size(); ++k) ASSERT_NEAR(got[k], expected[k], 1e-4) << k;
      }
    };
    expect_same(nullptr);  // the pool, which nobody else wants
    expect_same(threads_of_their_own);
    on_callers([&](int caller) { expect_same(caller == 0 ? nullptr : threads_of_their_own); });
  }
}

// A product with bias, residual and norm, as bindings call it, with memory that is kept.
TEST_F(OpThreads, OutputStageInKeptMemory) {
  constexpr int64_t kRows = 70, kIn = 33, kOut = 90;
  const auto fill = [](float* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) x[i] = static_cast<float>(i % 13 - 6) * 0.1f;
  };
  const auto run = [&] {
    Array x({kRows, kIn}), weight({kOut, kIn}), residual({kRows, kOut}), norm_weight({kOut});
    Array y({kRows, kOut}), normed({kRows, kOut});
    fill(x.data(), kRows * kIn);
    fill(weight.data(), kOut * kIn);
    fill(residual.data(), kRows * kOut);
    fill(norm_weight.data(), kOut);
    Call call("linear_fwd");
    call.with("x", x).with("weight", weight).with("residual", residual);
    call.with("norm_weight", norm_weight).with("y", y).with("normed", normed);
    EXPECT_EQ(fk_cpu_call(call.op(), call.slots()), FK_OK) << fk_last_error();
    return std::vector<float>(normed.data(), normed.data() + kRows * kOut);
  };
  const std::vector<float> expected = run();
  on_callers([&](int) {
    for (int i = 0; i < 5; ++i) EXPECT_EQ(run(), expected);
  });
}

TEST_F(OpThreads, ShareAPackedLinear) {
  constexpr int64_t kRows = 20, kIn = 40, kOut = 300;
  Array weight({kOut, kIn}), bias({kOut});
  for (int64_t i = 0; i < kOut * kIn; ++i) weight.data()[i] = static_cast<float>(i % 11 - 5);
  for (const char* dtype : {"float32", "bfloat16", "int8"}) {
    fk_packed_linear* layer = nullptr;
    ASSERT_EQ(fk_packed_linear_open(&weight.tensor(), &bias.tensor(), dtype, "silu", &layer), FK_OK)
        << fk_last_error();
    const auto run = [&](int64_t rows) {
      Array x({rows, kIn}), y({rows, kOut});
      for (int64_t i = 0; i < rows * kIn; ++i) x.data()[i] = static_cast<float>(i % 7 - 3);
      EXPECT_EQ(fk_packed_linear_call(layer, &x.tensor(), &y.tensor(), nullptr), FK_OK)
          << fk_last_error();
      return std::vector<float>(y.data(), y.data() + rows * kOut);
    };
    const std::vector<float> of_one = run(1), of_many = run(kRows);
    on_callers([&](int caller) {
      for (int i = 0; i < 5; ++i) {
        EXPECT_EQ(run((caller + i) % 2 == 0 ? 1 : kRows), (caller + i) % 2 == 0 ? of_one : of_many);
      }
    });
    fk_packed_linear_close(layer);
  }
}

}  // namespace
}  // namespace fk::test
