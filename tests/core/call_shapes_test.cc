// The grammar of shapes, on ops of the tests' own: products, several states that one call updates,
// and tensors whose last dims may be missing.
#include "core/call_shapes.h"

#include <gtest/gtest.h>

#include <deque>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "check/drawn_call.h"
#include "core/infer.h"
#include "core/op.h"

namespace fk {
namespace {

// One step of an LSTM, as far as its arguments go: the kernel copies.
struct LstmStep {
  static constexpr const char* kName = "lstm_step_fwd";
  static constexpr const char* kDoc = "Moves h and c one step on.";
  Tensor x, h, c, w_ih, w_hh, bias, y, new_h, new_c;

  static void declare(Declaration<LstmStep>& d) {
    d.input("x", &LstmStep::x, "T[B, I]", "this step's input");
    d.input("h", &LstmStep::h, "T[B, H]", "hidden state");
    d.input("c", &LstmStep::c, "F[B, H]", "cell state");
    d.input("w_ih", &LstmStep::w_ih, "P[4*H, I]", "weights of the input");
    d.input("w_hh", &LstmStep::w_hh, "@w_ih[4*H, H]", "weights of the state");
    d.input("bias", &LstmStep::bias, "P[4*H+1]", "gates' bias").optional();
    d.output("y", &LstmStep::y, "T[B, H]", "the step's output");
    d.output("new_h", &LstmStep::new_h, "@h", "after the step").updates("h");
    d.output("new_c", &LstmStep::new_c, "@c", "after the step").updates("c");
  }
};

void copy(const Tensor& from, const Tensor& to) {
  for (int64_t i = 0; to && i < from.size(0); ++i) {
    for (int64_t j = 0; j < from.size(1); ++j) {
      to.ptr<float>()[i * to.stride(0) + j * to.stride(1)] =
          from.ptr<float>()[i * from.stride(0) + j * from.stride(1)];
    }
  }
}

Status step(const LstmStep& a, const Exec&) {
  copy(a.h, a.y);
  copy(a.h, a.new_h);
  copy(a.c, a.new_c);
  return {};
}

// A skip connection of a state-space layer: one factor per head, or one per channel of a head.
struct Skip {
  static constexpr const char* kName = "skip_fwd";
  static constexpr const char* kDoc = "y = D x.";
  Tensor x, D, y, double_x;

  static void declare(Declaration<Skip>& d) {
    d.input("x", &Skip::x, "T[..., H, P]", "input");
    d.input("D", &Skip::D, "P[H, (P)]", "factors");
    d.output("y", &Skip::y, "T[..., H, P]", "output");
    d.output("double_x", &Skip::double_x, "T[..., 2*P]", "a row of two heads");
  }
};

// The arguments of one call of an op, of float32 tensors without data.
template <class Args>
class Shaped {
 public:
  explicit Shaped(const std::vector<std::pair<const char*, std::vector<int64_t>>>& given)
      : op_(make_op<Args>({})), slots_(op().fields.size()) {
    for (const auto& [name, shape] : given) {
      shapes_.push_back(shape);
      tensors_.push_back({});
      DLTensor& t = tensors_.back();
      t.device = {kDLCPU, 0};
      t.ndim = static_cast<int32_t>(shape.size());
      t.dtype = {kDLFloat, 32, 1};
      t.shape = shapes_.back().data();
      slots_[static_cast<size_t>(op().find(name))].tensor = &t;
    }
  }

  // What is wrong with the shapes of a call, in the order of its arguments; "" where nothing is.
  std::string error() {
    CallShapes shapes(op(), slots_.data());
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].tensor == nullptr) continue;
      const DLTensor& t = *slots_[i].tensor;
      const Status status = shapes.match(op().fields[i], t.ndim, t.shape);
      if (!status.ok()) return status.message();
    }
    return "";
  }

  // The shape of an output, told from the inputs; or why it cannot be.
  std::string inferred(const char* output) {
    const OutputInference inference(op(), slots_.data());
    OutputType type;
    const Status status = inference.infer(op().fields[op().find(output)], &type);
    return status.ok() ? shape_string(type.shape, type.ndim) : status.message();
  }

 private:
  const OpDeclaration& op() const { return op_->declaration; }

  std::unique_ptr<fk_op> op_;
  std::deque<std::vector<int64_t>> shapes_;
  std::deque<DLTensor> tensors_;
  std::vector<fk_slot> slots_;
};

using Lstm = Shaped<LstmStep>;

TEST(CallShapes, Products) {
  Lstm good({{"x", {2, 3}},
             {"h", {2, 5}},
             {"c", {2, 5}},
             {"w_ih", {20, 3}},
             {"w_hh", {20, 5}},
             {"bias", {21}}});
  EXPECT_EQ(good.error(), "");
  EXPECT_EQ(good.inferred("y"), "(2, 5)");
  EXPECT_EQ(good.inferred("new_c"), "(2, 5)");
  EXPECT_EQ(Lstm({{"x", {2, 3}}, {"h", {2, 5}}, {"w_ih", {19, 3}}}).error(),
            "w_ih: expected shape (20, 3) to fit h, got (19, 3)");
  EXPECT_EQ(Lstm({{"x", {2, 3}}, {"h", {2, 5}}, {"w_ih", {20, 4}}}).error(),
            "w_ih: expected shape (20, 3) to fit x, got (20, 4)");
  EXPECT_EQ(Lstm({{"h", {2, 5}}, {"bias", {20}}}).error(),
            "bias: expected shape (21,) to fit h, got (20,)");
}

TEST(CallShapes, ProductsTellTheirSymbol) {
  EXPECT_EQ(Lstm({{"x", {2, 3}}, {"w_ih", {20, 3}}}).inferred("y"), "(2, 5)");
  EXPECT_EQ(Lstm({{"x", {2, 3}}, {"bias", {21}}}).inferred("y"), "(2, 5)");
  EXPECT_EQ(Lstm({{"w_ih", {20, 3}}, {"w_hh", {20, 6}}}).error(),
            "w_hh: expected shape (20, 5) to fit w_ih, got (20, 6)");
  EXPECT_EQ(Lstm({{"w_ih", {0, 3}}, {"w_hh", {0, 0}}}).error(), "");
}

TEST(CallShapes, ASizeThatIsNoMultiple) {
  EXPECT_EQ(Lstm({{"w_ih", {21, 3}}}).error(), "w_ih: expected shape (4*H, I), got (21, 3)");
  EXPECT_EQ(Lstm({{"bias", {20}}}).error(), "bias: expected shape (4*H+1,), got (20,)");
  EXPECT_EQ(Lstm({{"x", {2, 3}}, {"bias", {0}}}).error(),
            "bias: expected shape (4*H+1,), got (0,)");
  EXPECT_EQ(Lstm({{"x", {2, 3}}, {"w_ih", {21, 3}}}).inferred("y"),
            "y: its shape cannot be told from the inputs");
}

TEST(CallShapes, ProductsThatNoIntegerHolds) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 2;
  EXPECT_EQ(Lstm({{"h", {0, kHuge}}, {"w_ih", {4, 3}}}).error(),
            "h: expected H to be small enough for 4*H to be a size, got " + std::to_string(kHuge));
  const std::string text = Shaped<Skip>({{"x", {0, kHuge + 1}}}).inferred("double_x");
  EXPECT_EQ(text, "double_x: its size 2*P cannot be, P being " + std::to_string(kHuge + 1));
}

TEST(CallShapes, LastDimsMayBeMissing) {
  using SkipCall = Shaped<Skip>;
  EXPECT_EQ(SkipCall({{"x", {7, 2, 3}}, {"D", {2}}, {"y", {7, 2, 3}}}).error(), "");
  EXPECT_EQ(SkipCall({{"x", {7, 2, 3}}, {"D", {2, 3}}, {"y", {7, 2, 3}}}).error(), "");
  EXPECT_EQ(SkipCall({{"x", {2, 3}}, {"D", {3}}}).error(),
            "D: expected shape (2,) or (2, 3) to fit x, got (3,)");
  EXPECT_EQ(SkipCall({{"x", {2, 3}}, {"D", {2, 4}}}).error(),
            "D: expected shape (2,) or (2, 3) to fit x, got (2, 4)");
  EXPECT_EQ(SkipCall({{"x", {2, 3}}, {"D", {}}}).error(),
            "D: expected shape (2,) or (2, 3) to fit x, got ()");
}

// The checks' own drawing follows the grammar, and a call may update two states.
TEST(CallShapes, DrawnCallsAreTaken) {
  const auto op = make_op<LstmStep>({{"reference", kReference, nullptr, step}});
  int aliased = 0;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    DrawOptions options;
    options.seed = seed;
    options.alias = options.strided = seed % 2 == 1;
    DrawnCall call;
    ASSERT_TRUE(draw_call(*op, options, &call).ok());
    const auto size = [&](const char* name, size_t d) {
      return call.tensors[op->declaration.find(name)].shape[d];
    };
    EXPECT_EQ(size("w_ih", 0), 4 * size("h", 1));
    EXPECT_EQ(size("w_hh", 0), 4 * size("w_hh", 1));
    for (const char* name : {"new_h", "new_c"}) {
      const DrawnTensor& t = call.tensors[op->declaration.find(name)];
      aliased += t.present && t.alias >= 0;
    }
    std::vector<DrawnTensor> outputs;
    const Status status = run_call(call, nullptr, host_memory(), &outputs);
    ASSERT_TRUE(status.ok()) << status.message() << "\n" << call.describe();
    const DrawnTensor& new_c = outputs[op->declaration.find("new_c")];
    EXPECT_EQ(new_c.values, call.tensors[op->declaration.find("c")].values);
  }
  EXPECT_GT(aliased, 0);
}

TEST(CallShapes, BothFormsOfMissingDimsAreDrawn) {
  const auto op = make_op<Skip>(
      {{"reference", kReference, nullptr, [](const Skip&, const Exec&) { return Status(); }}});
  bool seen[3] = {};
  for (uint64_t seed = 0; seed < 50; ++seed) {
    DrawOptions options;
    options.seed = seed;
    DrawnCall call;
    ASSERT_TRUE(draw_call(*op, options, &call).ok());
    seen[call.tensors[1].shape.size()] = true;
  }
  EXPECT_TRUE(seen[1] && seen[2]);
}

struct Roles {
  static constexpr const char* kName = "roles";
  static constexpr const char* kDoc = "An op that only declares roles.";
  Tensor x, w, y;
  static inline void (*roles)(Declaration<Roles>&) = nullptr;
  static void declare(Declaration<Roles>& d) {
    d.input("x", &Roles::x, "T[..., B, K, L]", "");
    d.input("w", &Roles::w, "P[2*N, K]", "");
    d.output("y", &Roles::y, "T[..., B, N, L]", "");
    roles(d);
  }
};

TEST(Roles, AreKeptBySymbol) {
  Roles::roles = [](Declaration<Roles>& d) {
    d.batch({"...", "B"});
    d.reduced({"K"});
  };
  const OpDeclaration declaration = make_op<Roles>({})->declaration;
  EXPECT_EQ(declaration.leading_role, Role::kBatch);
  EXPECT_EQ(declaration.roles[declaration.find_symbol("B")], Role::kBatch);
  EXPECT_EQ(declaration.roles[declaration.find_symbol("K")], Role::kReduced);
  EXPECT_EQ(declaration.roles[declaration.find_symbol("L")], Role::kWhole);
  const std::string json = declarations_json({&declaration});
  EXPECT_NE(json.find("\"roles\": {\"...\": \"batch\", \"B\": \"batch\", \"K\": \"reduced\"}"),
            std::string::npos)
      << json;
  EXPECT_NE(json.find("{\"text\": \"2*N\", \"symbol\": \"N\", \"factor\": 2}"), std::string::npos)
      << json;
}

TEST(RolesDeathTest, MalformedRolesAbort) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Roles::roles = [](Declaration<Roles>& d) { d.batch({"Q"}); };
  EXPECT_DEATH(make_op<Roles>({}), "declaration of roles: no symbol 'Q'");
  Roles::roles = [](Declaration<Roles>& d) { d.reduced({"L"}); };
  EXPECT_DEATH(make_op<Roles>({}), "'L' is summed over, but 'y' has it");
  Roles::roles = [](Declaration<Roles>& d) { d.independent({"N"}); };
  EXPECT_DEATH(make_op<Roles>({}), "'N' cannot be cut where 'w' has it");
}

}  // namespace
}  // namespace fk
