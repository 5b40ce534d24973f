// Every op, every dtype, every CPU implementation and SIMD target, against the reference, on
// arguments drawn from the op's declaration. A new op is covered by being declared.
#include <gtest/gtest.h>

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "check/drawn_call.h"
#include "core/op.h"
#include "core/thread_pool.h"
#include "cpu/targets.h"

namespace fk {
namespace {

struct Variant {
  const char* name;
  int samples;
  DrawOptions options;
};

std::vector<Variant> variants() {
  DrawOptions plain, strided, empty, alias, skipping, special, large;
  strided.strided = true;
  empty.empty = true;
  alias.alias = alias.strided = true;
  skipping.skip_outputs = true;
  special.special = true;
  large.min_elements = 1 << 17;  // enough that the work is shared by threads
  large.max_elements = 1 << 18;
  return {{"plain", 24, plain}, {"strided", 24, strided},  {"empty", 12, empty},
          {"alias", 6, alias},  {"skipping", 6, skipping}, {"special", 12, special},
          {"large", 2, large}};
}

// Runs `implementation` and compares; "" where it is right or does not take the call.
std::string difference(const DrawnCall& drawn_call, const std::vector<DrawnTensor>& expected,
                       const char* implementation) {
  std::vector<DrawnTensor> got;
  const Status status = run_call(drawn_call, implementation, host_memory(), &got);
  if (status.code() == FK_UNSUPPORTED) return "";
  if (!status.ok()) return status.message();
  std::string worst;
  const double error = largest_error(drawn_call, expected, got, &worst);
  return error <= 1 ? "" : worst + " (" + std::to_string(error) + " times what is allowed)";
}

class Sweep : public testing::TestWithParam<std::string> {};

TEST_P(Sweep, MatchesReference) {
  const fk_op& op = *Registry::get().find(GetParam());
  const int threads = num_threads();
  set_num_threads(2);
  for (const Variant& variant : variants()) {
    // 0 times infinity is NaN: a product of whole tiles hands it to rows that do not see it.
    const bool reorders = op.declaration.multiplies || op.declaration.reorders;
    if (variant.options.special && reorders) continue;
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3}) {
      if (dtype == DType::kFloat8E4M3 && !op.declaration.float8) continue;
      for (int seed = 0; seed < variant.samples; ++seed) {
        DrawOptions options = variant.options;
        options.dtype = dtype;
        options.seed = seed;
        DrawnCall drawn_call;
        const Status drawn = draw_call(op, options, &drawn_call);
        ASSERT_TRUE(drawn.ok()) << drawn.message();
        SCOPED_TRACE(std::string(variant.name) + " " + drawn_call.describe());
        std::vector<DrawnTensor> expected;
        const Status status = run_call(drawn_call, "reference", host_memory(), &expected);
        ASSERT_TRUE(status.ok()) << status.message();
        for (const fk_op::Implementation& i : op.implementations) {
          if (i.device != Device::kCpu || i.name == "reference") continue;
          for (const std::string& target : cpu::supported_targets()) {
            ASSERT_EQ(fk_set_cpu_target(target.c_str()), FK_OK);
            EXPECT_EQ(difference(drawn_call, expected, i.name.c_str()), "")
                << i.name << " " << target;
          }
          fk_set_cpu_target(nullptr);
        }
        if (HasFailure()) break;
      }
    }
  }
  set_num_threads(threads);
}

std::vector<std::string> op_names() {
  std::vector<std::string> names;
  for (const auto& op : Registry::get().ops()) names.push_back(op->declaration.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Ops, Sweep, testing::ValuesIn(op_names()),
                         [](const auto& info) { return info.param; });

// The same call gives the same bits, whatever the number of threads.
TEST_P(Sweep, Repeats) {
  const fk_op& op = *Registry::get().find(GetParam());
  const int threads = num_threads();
  DrawOptions options;
  options.min_elements = 1 << 16;
  options.max_elements = 1 << 18;
  for (options.seed = 100; options.seed < 103; ++options.seed) {
    DrawnCall drawn_call;
    const Status drawn = draw_call(op, options, &drawn_call);
    ASSERT_TRUE(drawn.ok()) << drawn.message();
    SCOPED_TRACE(drawn_call.describe());
    std::vector<DrawnTensor> first, again;
    for (int t : {1, 1, 2, 3}) {
      set_num_threads(t);
      const Status status = run_call(drawn_call, nullptr, host_memory(), &again);
      ASSERT_TRUE(status.ok()) << status.message();
      if (first.empty()) first = again;
      for (size_t i = 0; i < first.size(); ++i) {
        // NaN differs from itself, which no drawn value leads to here.
        EXPECT_EQ(first[i].values, again[i].values) << op.declaration.fields[i].name << ", " << t;
      }
    }
  }
  set_num_threads(threads);
}

// Drawing itself: the same seed gives the same call, and each option does what it says.
TEST(DrawCall, IsRepeatable) {
  const fk_op& op = *Registry::get().find("rms_norm_fwd");
  DrawOptions options;
  options.seed = 5;
  DrawnCall a, b;
  ASSERT_TRUE(draw_call(op, options, &a).ok());
  ASSERT_TRUE(draw_call(op, options, &b).ok());
  EXPECT_EQ(a.describe(), b.describe());
  EXPECT_EQ(a.tensors[0].values, b.tensors[0].values);
}

TEST(DrawCall, EmptyHasNoElements) {
  const fk_op& op = *Registry::get().find("rms_norm_fwd");
  DrawOptions options;
  options.empty = true;
  for (options.seed = 0; options.seed < 10; ++options.seed) {
    DrawnCall drawn_call;
    ASSERT_TRUE(draw_call(op, options, &drawn_call).ok());
    EXPECT_EQ(drawn_call.tensors[0].numel(), 0) << drawn_call.describe();
  }
}

TEST(DrawCall, AliasSharesMemory) {
  const fk_op& op = *Registry::get().find("rope_fwd");
  DrawOptions options;
  options.alias = true;
  DrawnCall drawn_call;
  ASSERT_TRUE(draw_call(op, options, &drawn_call).ok());
  EXPECT_EQ(drawn_call.tensors[op.declaration.find("y")].alias, op.declaration.find("x"));
}

// A backward's saved inputs are what the forward computed.
TEST(DrawCall, BackwardGetsForwardsResults) {
  const fk_op& op = *Registry::get().find("layer_norm_bwd");
  const int x = op.declaration.find("x"), rstd = op.declaration.find("rstd");
  for (uint64_t seed = 0; seed < 10; ++seed) {
    DrawOptions options;
    options.seed = seed;
    DrawnCall drawn_call;
    ASSERT_TRUE(draw_call(op, options, &drawn_call).ok());
    const int64_t n = drawn_call.tensors[x].shape.back();
    const auto value = [&](int64_t i) { return drawn_call.tensors[x].values[i]; };
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < n; ++i) mean += value(i) / static_cast<double>(n);
    for (int64_t i = 0; i < n; ++i) squares += (value(i) - mean) * (value(i) - mean);
    const double r = drawn_call.tensors[rstd].values[0];
    EXPECT_NEAR(1 / (r * r), squares / n, 0.26) << "eps is at most 0.25 more";
    EXPECT_GE(1 / (r * r), squares / n * 0.999);
  }
}

// A kernel that goes wrong is noticed: an op of the test's own, with one mistake per mode.
struct Faulty {
  static constexpr const char* kName = "faulty_fwd";
  static constexpr const char* kDoc = "y = x, by kernels that each make one mistake.";
  Tensor x, y;
  static void declare(Declaration<Faulty>& d) {
    d.input("x", &Faulty::x, "T[N]", "input");
    d.output("y", &Faulty::y, "T[N]", "output");
  }
};

enum class Mistake { kNone, kValue, kUnwritten, kPastEnd, kIntoInput, kPastWorkspace };

template <Mistake mistake>
Status copy(const Faulty& a, const Exec& exec) {
  const int64_t n = a.x.size(0);
  float* x = a.x.ptr<float>();
  float* y = a.y.ptr<float>();
  for (int64_t i = 0; i < n; ++i) {
    if (mistake == Mistake::kUnwritten && i == n - 1) break;
    y[i * a.y.stride(0)] = x[i * a.x.stride(0)];
  }
  if (mistake == Mistake::kValue) y[0] += 1e-3f;
  if (mistake == Mistake::kPastEnd) y[n] = 0;
  if (mistake == Mistake::kIntoInput) x[0] = 0;
  if (mistake == Mistake::kPastWorkspace) exec.workspace<char>()[100] = 0;
  return {};
}

size_t workspace(const Faulty&) { return 100; }

TEST(RunCall, NoticesMistakes) {
  const auto made = make_op<Faulty>({
      {"none", kPortable, nullptr, copy<Mistake::kNone>, workspace},
      {"value", kPortable, nullptr, copy<Mistake::kValue>, workspace},
      {"unwritten", kPortable, nullptr, copy<Mistake::kUnwritten>, workspace},
      {"past_end", kPortable, nullptr, copy<Mistake::kPastEnd>, workspace},
      {"into_input", kPortable, nullptr, copy<Mistake::kIntoInput>, workspace},
      {"past_workspace", kPortable, nullptr, copy<Mistake::kPastWorkspace>, workspace},
  });
  const fk_op& op = *made;
  DrawnCall drawn_call;
  ASSERT_TRUE(draw_call(op, {}, &drawn_call).ok());
  std::vector<DrawnTensor> expected;
  ASSERT_TRUE(run_call(drawn_call, nullptr, host_memory(), &expected).ok());
  EXPECT_EQ(expected[1].values, drawn_call.tensors[0].values);
  EXPECT_EQ(difference(drawn_call, expected, "none"), "");
  EXPECT_NE(difference(drawn_call, expected, "value"), "");
  EXPECT_NE(difference(drawn_call, expected, "unwritten"), "");
  EXPECT_EQ(difference(drawn_call, expected, "past_end"), "wrote outside the output y");
  EXPECT_EQ(difference(drawn_call, expected, "into_input"), "wrote into the input x");
  EXPECT_EQ(difference(drawn_call, expected, "past_workspace"),
            "wrote past the end of the workspace");
}

}  // namespace
}  // namespace fk
