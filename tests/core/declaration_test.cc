#include "core/declaration.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <clocale>
#include <iterator>
#include <string>
#include <vector>

#include "core/op.h"

namespace fk {
namespace {

// The field a type is parsed into, and the op whose symbols it names.
struct Parsed {
  OpDeclaration op;
  Field field;
};

Parsed parse(const std::string& type) {
  Parsed p;
  p.op.name = "an_op";
  Field earlier;
  earlier.name = "weight";
  p.op.fields.push_back(earlier);
  p.op.set_type(p.field, type);
  return p;
}

// A shape as text again.
std::string text(const OpDeclaration& op, const Dims& dims) {
  std::string s;
  for (const Dim& dim : dims) s += (s.empty() ? "" : " ") + dim_text(op, dim);
  return s;
}

TEST(Declaration, DTypes) {
  EXPECT_EQ(parse("T[N]").field.dtype_rule, DTypeRule::kActivation);
  EXPECT_EQ(parse("P[N]").field.dtype_rule, DTypeRule::kParameter);
  EXPECT_EQ(parse("F[N]").field.dtype_rule, DTypeRule::kFloat32);
  EXPECT_EQ(parse("I[N]").field.dtype_rule, DTypeRule::kIndex);
  EXPECT_EQ(parse("J[N]").field.dtype_rule, DTypeRule::kInt32);
  const Parsed same = parse("@weight[N]");
  EXPECT_EQ(same.field.dtype_rule, DTypeRule::kSameAs);
  EXPECT_EQ(same.field.dtype_of, 0);
}

TEST(Declaration, Shapes) {
  const auto shapes = [](const std::string& type) {
    const Parsed p = parse(type);
    std::string s;
    for (size_t i = 0; i < p.field.shapes.size(); ++i) {
      s += (i > 0 ? " | " : "") + text(p.op, p.field.shapes[i]);
    }
    return s;
  };
  EXPECT_EQ(shapes("F[]"), "");
  EXPECT_EQ(parse("F[]").field.shapes.size(), 1u);
  EXPECT_EQ(shapes("T[...]"), "...");
  EXPECT_EQ(shapes("T[..., N]"), "... N");
  EXPECT_EQ(shapes("T[B, 4, N]"), "B 4 N");
  EXPECT_EQ(shapes("T[B, W-1, D]"), "B W-1 D");
  EXPECT_EQ(shapes("J[S + 1]"), "S+1");
  EXPECT_EQ(shapes("I[L | B, L]"), "L | B L");
  EXPECT_EQ(shapes("T[ B,L ]"), "B L");
  EXPECT_EQ(shapes("P[4*H, I]"), "4*H I");
  EXPECT_EQ(shapes("P[4 * H - 1]"), "4*H-1");
  EXPECT_EQ(shapes("P[H, (P)]"), "H | H P");
  EXPECT_EQ(shapes("P[H, (P), ( 2*Q )]"), "H | H P | H P 2*Q");
  EXPECT_EQ(shapes("P[(H)]"), " | H");
}

TEST(Declaration, SymbolsAreSharedByName) {
  OpDeclaration op;
  Field a, b;
  op.set_type(a, "T[B, N]");
  op.set_type(b, "T[N, M]");
  EXPECT_EQ(op.symbols, (std::vector<std::string>{"B", "N", "M"}));
  EXPECT_EQ(a.shapes[0][1].symbol, b.shapes[0][0].symbol);
}

TEST(DeclarationDeathTest, MalformedTypesAbort) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(parse("T"), "declaration of an_op: type 'T'");
  EXPECT_DEATH(parse("T[N"), "type 'T\\[N'");
  EXPECT_DEATH(parse("Q[N]"), "dtype 'Q'");
  EXPECT_DEATH(parse("[N]"), "dtype ''");
  EXPECT_DEATH(parse("@bias[N]"), "no field 'bias'");
  EXPECT_DEATH(parse("T[N, ]"), "empty dimension");
  EXPECT_DEATH(parse("T[0*N]"), "no size can be told from the dimension '0\\*N'");
  EXPECT_DEATH(parse("T[H*P]"), "expected a number, got 'H'");
  EXPECT_DEATH(parse("T[4*]"), "expected a symbol, got ''");
  EXPECT_DEATH(parse("T[N+]"), "expected a number, got ''");
  EXPECT_DEATH(parse("T[H, (P), Q]"), "'Q' after dims that may be missing");
  EXPECT_DEATH(parse("T[H, (P) | Q]"), "may be missing beside other alternatives");
  EXPECT_DEATH(parse("T[..., (P)]"), "may be missing beside other alternatives");
}

// An op with one of everything, never registered.
struct Everything {
  static constexpr const char* kName = "everything_fwd";
  static constexpr const char* kDoc = "One of \"everything\".";
  Tensor x, bias, y, extra, named, unnamed, flagged;
  double scale = 0;
  int64_t count = 0, mode = 0, axis = 0;
  bool flag = false;

  static void declare(Declaration<Everything>& d) {
    d.input("x", &Everything::x, "T[..., N]", "input");
    d.input("bias", &Everything::bias, "P[N]", "optional input").optional();
    d.keyword_only();
    d.attribute("scale", &Everything::scale, 0.5, "a number");
    d.attribute("count", &Everything::count, 3, "an integer");
    d.attribute("flag", &Everything::flag, true, "a boolean");
    d.choice("mode", &Everything::mode, {"", "fast"}, 1, "a choice");
    d.axis("axis", &Everything::axis, -1, true, {"x", "y"}, "an axis");
    d.output("y", &Everything::y, "T[..., N]", "output").may_alias("x");
    d.output("extra", &Everything::extra, "F[...]", "saved").when("bias").saved();
    d.output("named", &Everything::named, "F[]", "one mode").when("mode=fast");
    d.output("unnamed", &Everything::unnamed, "F[]", "the others").when("mode!=fast");
    d.output("flagged", &Everything::flagged, "F[]", "by flag").when("flag");
  }
};

class DeclaredEverything : public testing::Test {
 protected:
  DeclaredEverything() {
    op_.name = Everything::kName;
    op_.doc = Everything::kDoc;
    Declaration<Everything> declaration(op_);
    Everything::declare(declaration);
    declaration.finish();
    slots_.resize(op_.fields.size());
  }

  const Field& field(const char* name) { return op_.fields[op_.find(name)]; }
  fk_slot& slot(const char* name) { return slots_[op_.find(name)]; }
  bool wanted(const char* name) { return output_wanted(op_, field(name), slots_.data()); }

  OpDeclaration op_;
  std::vector<fk_slot> slots_;
};

TEST_F(DeclaredEverything, Fields) {
  EXPECT_EQ(op_.find("nothing"), -1);
  EXPECT_EQ(op_.fields.size(), 12u);
  EXPECT_EQ(field("x").kind, Kind::kInput);
  EXPECT_FALSE(field("x").optional);
  EXPECT_FALSE(field("x").keyword_only);
  EXPECT_TRUE(field("x").along_axis);
  EXPECT_TRUE(field("bias").optional);
  EXPECT_FALSE(field("bias").along_axis);
  EXPECT_EQ(field("scale").number_default, 0.5);
  EXPECT_TRUE(field("scale").keyword_only);
  EXPECT_EQ(field("count").integer_default, 3);
  EXPECT_EQ(field("flag").kind, Kind::kBoolean);
  EXPECT_EQ(field("flag").integer_default, 1);
  EXPECT_EQ(field("mode").choices, (std::vector<std::string>{"", "fast"}));
  EXPECT_TRUE(field("axis").nullable);
  EXPECT_TRUE(field("y").optional);
  EXPECT_TRUE(field("y").along_axis);
  EXPECT_EQ(field("y").may_alias, "x");
  EXPECT_TRUE(field("extra").saved);
}

TEST_F(DeclaredEverything, OffsetsFindTheMembers) {
  Everything args;
  const auto at = [&](const char* name) {
    return reinterpret_cast<char*>(&args) + field(name).offset;
  };
  EXPECT_EQ(at("x"), reinterpret_cast<char*>(&args.x));
  EXPECT_EQ(at("flagged"), reinterpret_cast<char*>(&args.flagged));
  EXPECT_EQ(at("scale"), reinterpret_cast<char*>(&args.scale));
  EXPECT_EQ(at("flag"), reinterpret_cast<char*>(&args.flag));
  EXPECT_EQ(at("axis"), reinterpret_cast<char*>(&args.axis));
}

TEST_F(DeclaredEverything, Conditions) {
  EXPECT_TRUE(wanted("y"));
  EXPECT_FALSE(wanted("extra"));
  const DLTensor tensor{};
  slot("bias").tensor = &tensor;
  EXPECT_TRUE(wanted("extra"));

  slot("mode").integer = 0;
  EXPECT_FALSE(wanted("named"));
  EXPECT_TRUE(wanted("unnamed"));
  slot("mode").integer = 1;
  EXPECT_TRUE(wanted("named"));
  EXPECT_FALSE(wanted("unnamed"));
  slot("mode").integer = 7;  // no such choice: the call itself reports it
  EXPECT_FALSE(wanted("named"));

  EXPECT_FALSE(wanted("flagged"));
  slot("flag").integer = 1;
  EXPECT_TRUE(wanted("flagged"));
}

TEST_F(DeclaredEverything, Json) {
  const std::string json = declarations_json({&op_});
  const auto has = [&](const std::string& part) {
    return json.find(part) != std::string::npos ? testing::AssertionSuccess()
                                                : testing::AssertionFailure()
                                                      << part << " is not in\n"
                                                      << json;
  };
  EXPECT_TRUE(has("\"name\": \"everything_fwd\""));
  EXPECT_TRUE(has("\"One of \\\"everything\\\".\""));
  EXPECT_TRUE(has("\"type\": \"T[..., N]\""));
  EXPECT_TRUE(has("\"choices\": [\"\", \"fast\"]"));
  EXPECT_TRUE(has("\"may_alias\": \"x\""));
  EXPECT_TRUE(has("\"when\": \"mode!=fast\""));
  EXPECT_TRUE(has("\"nullable\": true"));
  EXPECT_TRUE(has("\"default\": 0.5"));
}

TEST_F(DeclaredEverything, AutocastTakesTheWidestUnlessTheOpMultipliesOrSaysOtherwise) {
  const auto json_has = [&](const std::string& rule) {
    return declarations_json({&op_}).find("\"autocast\": \"" + rule + "\"") != std::string::npos;
  };
  EXPECT_TRUE(json_has("widest"));
  Declaration<Everything> declaration(op_);
  declaration.multiplies();
  EXPECT_TRUE(json_has("lower"));
  declaration.autocast(Autocast::kFloat32OnGpu);
  EXPECT_TRUE(json_has("float32_on_gpu"));
}

TEST_F(DeclaredEverything, JsonInALocaleWithADecimalComma) {
  const char* const names[] = {"de_DE.UTF-8", "de_DE", "fr_FR.UTF-8", "fr_FR"};
  if (std::none_of(std::begin(names), std::end(names),
                   [](const char* name) { return std::setlocale(LC_NUMERIC, name) != nullptr; })) {
    GTEST_SKIP() << "this system has no such locale";
  }
  const std::string json = declarations_json({&op_});
  std::setlocale(LC_NUMERIC, "C");
  EXPECT_NE(json.find("\"default\": 0.5"), std::string::npos) << json;
}

// Ops whose declarations break a rule.
struct Broken {
  Tensor x, z, y;
  int64_t block = 0;
};

template <class Declare>
OpDeclaration declared(const Declare& declare) {
  OpDeclaration op;
  op.name = "broken";
  Declaration<Broken> declaration(op);
  declare(declaration);
  declaration.finish();
  return op;
}

TEST(DeclarationDeathTest, SizesThatNothingTells) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  using D = Declaration<Broken>;
  EXPECT_DEATH(declared([](D& d) {
                 d.input("x", &Broken::x, "T[N]", "x");
                 d.output("y", &Broken::y, "T[M]", "y");
               }),
               "declaration of broken: nothing tells the size of 'y'");
  EXPECT_DEATH(declared([](D& d) {  // z may be absent
                 d.input("x", &Broken::x, "T[N]", "x");
                 d.input("z", &Broken::z, "T[M]", "z").optional();
                 d.output("y", &Broken::y, "T[M]", "y");
               }),
               "nothing tells the size of 'y'");
  EXPECT_DEATH(declared([](D& d) {
                 d.input("x", &Broken::x, "T[N?]", "x");
                 d.output("y", &Broken::y, "T[N]", "y");
               }),
               "nothing tells the size of 'y'");
  EXPECT_DEATH(declared([](D& d) {  // of another form
                 d.input("x", &Broken::x, "T[N | N, M]", "x").own_form();
                 d.output("y", &Broken::y, "T[N | N, M]", "y");
               }),
               "nothing tells the size of 'y'");
  EXPECT_DEATH(declared([](D& d) {
                 d.attribute("block", &Broken::block, 1, "block");
                 d.input("x", &Broken::x, "T[N/block]", "x");
                 d.input("z", &Broken::z, "T[N]", "z");
                 d.output("y", &Broken::y, "T[N]", "y");
               }),
               "nothing tells the size of 'x'");
  declared([](D& d) {  // y exists only with z
    d.input("x", &Broken::x, "T[N]", "x");
    d.input("z", &Broken::z, "T[M]", "z").optional();
    d.output("y", &Broken::y, "@z[M]", "y").when("z");
  });
}

TEST(DeclarationDeathTest, FormsThatDoNotFit) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  using D = Declaration<Broken>;
  EXPECT_DEATH(declared([](D& d) {
                 d.input("x", &Broken::x, "T[N | B, N]", "x");
                 d.output("y", &Broken::y, "T[N | B, N | B, N, N]", "y");
               }),
               "'y' has not as many alternatives as 'x'");
  EXPECT_DEATH(declared([](D& d) {
                 d.output("y", &Broken::y, "T[]", "y");
                 d.input("x", &Broken::x, "T[N]", "x");
               }),
               "the input 'x' after an output");
}

TEST(Declaration, FormsAndRanges) {
  const OpDeclaration op = declared([](Declaration<Broken>& d) {
    d.input("x", &Broken::x, "T[N | B, N]", "x");
    d.input("z", &Broken::z, "T[N | B, N]", "z").form("other");
    d.attribute("block", &Broken::block, 1, "block").at_least(0).at_most(8);
    d.output("y", &Broken::y, "T[N | B, N]", "y");
  });
  EXPECT_EQ(op.fields[0].form_index, op.fields[3].form_index);
  EXPECT_NE(op.fields[0].form_index, op.fields[1].form_index);
  EXPECT_EQ(op.forms, (std::vector<std::string>{"", "other"}));
  const std::string json = declarations_json({&op});
  EXPECT_NE(json.find("\"form\": \"other\""), std::string::npos) << json;
  EXPECT_NE(json.find("\"least\": 0, \"most\": 8"), std::string::npos) << json;
}

// Rules the bindings rely on, for every op of the library.
TEST(Registry, DeclarationsAreConsistent) {
  for (const auto& op : Registry::get().ops()) {
    const OpDeclaration& d = op->declaration;
    SCOPED_TRACE(d.name);
    EXPECT_FALSE(d.doc.empty());
    const bool backward = d.name.size() > 4 && d.name.substr(d.name.size() - 4) == "_bwd";
    const fk_op* forward =
        backward ? Registry::get().find(d.name.substr(0, d.name.size() - 4) + "_fwd") : nullptr;
    EXPECT_EQ(backward, forward != nullptr) << "a backward needs its forward";
    bool has_output = false;
    const std::vector<fk_slot> slots(d.fields.size());
    for (const Field& f : d.fields) {
      SCOPED_TRACE(f.name);
      EXPECT_FALSE(f.doc.empty());
      EXPECT_EQ(&d.fields[d.find(f.name)], &f) << "declared twice";
      if (f.kind == Kind::kOutput) {
        has_output = true;
        output_wanted(d, f, slots.data());  // aborts on a condition that names nothing
      }
      if (!f.may_alias.empty()) {
        ASSERT_GE(d.find(f.may_alias), 0);
        EXPECT_EQ(d.fields[d.find(f.may_alias)].kind, Kind::kInput);
      }
      if (!f.below.empty()) {
        EXPECT_EQ(std::count(d.symbols.begin(), d.symbols.end(), f.below), 1);
      }
      if (forward == nullptr) continue;
      const OpDeclaration& fd = forward->declaration;
      EXPECT_TRUE(f.prefer.empty() || fd.find(f.prefer) >= 0);
      EXPECT_TRUE(f.also_gradient_of.empty() || fd.find(f.also_gradient_of) >= 0);
      const bool is_symbol = std::count(d.symbols.begin(), d.symbols.end(), f.name) > 0;
      const bool known = fd.find(f.name) >= 0 || fd.find(f.prefer) >= 0 ||
                         (f.name[0] == 'd' && fd.find(f.name.substr(1)) >= 0);
      EXPECT_TRUE(known || is_symbol) << "names nothing of the forward";
    }
    EXPECT_TRUE(has_output);
  }
}

TEST(Registry, EveryOpHasAReferenceAndAKernel) {
  for (const auto& op : Registry::get().ops()) {
    SCOPED_TRACE(op->declaration.name);
    int reference = 0, cpu = 0;
    for (const fk_op::Implementation& i : op->implementations) {
      reference += i.name == "reference";
      cpu += i.name != "reference" && i.device == Device::kCpu;
    }
    EXPECT_EQ(reference, 1);
    EXPECT_GE(cpu, 1);
    EXPECT_EQ(op->implementations.back().name, "reference");
  }
}

}  // namespace
}  // namespace fk
