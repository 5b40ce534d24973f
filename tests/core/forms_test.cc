// Every tensor of every op has the size that the rest of its call says: one tensor of a good call
// is given another rank or another size, and the call must be refused. Derived from the
// declarations, so that a new op is covered by being declared.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check/drawn_call.h"
#include "core/op.h"

namespace fk {
namespace {

constexpr int kSamples = 60, kMostSamples = 600;

DrawOptions options_of(int seed) {
  DrawOptions options;
  options.seed = static_cast<uint64_t>(seed);
  options.max_elements = 1 << 14;
  options.skip_outputs = seed % 2 == 1;
  return options;
}

// What the tensors of a call say about the sizes of symbols.
class ToldSizes {
 public:
  explicit ToldSizes(const DrawnCall& drawn_call)
      : drawn_(drawn_call), op_(drawn_call.op->declaration) {
    bool offsets = false;  // packed sequences are counted by their offsets
    for (size_t i = 0; i < op_.fields.size(); ++i) {
      offsets = offsets || (drawn_call.tensors[i].present && !op_.fields[i].rises_to.empty());
    }
    for (const auto& [symbol, other] : op_.size_unless_given) {
      if (!offsets) same_[symbol] = other;
    }
    for (size_t i = 0; i < op_.fields.size(); ++i) {
      if (op_.fields[i].kind == Kind::kInteger) {
        add(op_.fields[i].name, i, drawn_call.attributes[i].integer);
      }
      if (!drawn_call.tensors[i].present) continue;
      const Dims* dims = dims_of(i);
      const std::vector<int64_t> shape = shape_of(i);
      for (size_t d = 0; dims != nullptr && d < dims->size(); ++d) {
        const Dim& dim = (*dims)[d];
        const size_t place = shape.size() - (dims->size() - d);
        if (dim.symbol == Dim::kEllipsis) {
          add("...", i, 0);
        } else if (dim.symbol >= 0 && dim.blocks_of < 0 && !(dim.or_one && shape[place] == 1)) {
          add(op_.symbols[dim.symbol], i, (shape[place] - dim.offset) / factor(i, dim));
        }
      }
    }
  }

  // The factor of a dim of tensor `i`, which may hold only without another tensor.
  int64_t factor(size_t i, const Dim& dim) const {
    const int unless = op_.fields[i].factors_unless_index;
    return unless >= 0 && drawn_.tensors[unless].present ? 1 : dim.factor;
  }

  // The dims of tensor `i` as declared, in the alternative that it has; NULL: those of another.
  const Dims* dims_of(size_t i) const {
    const auto ndim = static_cast<int>(drawn_.tensors[i].shape.size());
    for (const Dims& dims : op_.fields[i].shapes) {
      if (rank_fits(dims, ndim)) return &dims;
    }
    return nullptr;
  }

  // The shape of tensor `i` with the op's axis last, and where each of its dims really stands.
  std::vector<int64_t> shape_of(size_t i) const {
    std::vector<int64_t> shape;
    for (const size_t place : order_of(i)) shape.push_back(drawn_.tensors[i].shape[place]);
    return shape;
  }
  std::vector<size_t> order_of(size_t i) const {
    std::vector<size_t> order;
    const size_t ndim = drawn_.tensors[i].shape.size();
    for (size_t d = 0; d < ndim; ++d) order.push_back(d);
    for (size_t k = 0; k < op_.fields.size() && op_.fields[i].along_axis; ++k) {
      if (op_.fields[k].kind != Kind::kAxis) continue;
      const auto n = static_cast<int64_t>(ndim);
      const auto axis = static_cast<size_t>((drawn_.attributes[k].integer + n) % n);
      order.erase(order.begin() + static_cast<int64_t>(axis));
      order.push_back(axis);
    }
    return order;
  }

  // Whether another tensor or an attribute than `i` gives the symbol another size than `size`.
  bool contradicted(const std::string& symbol, size_t i, int64_t size) const {
    const auto found = told_.find(name_of(symbol));
    if (found == told_.end()) return false;
    for (const auto& [field, value] : found->second) {
      if (field != i && value != size) return true;
    }
    return false;
  }

  int64_t size_or(const std::string& symbol, int64_t otherwise) const {
    const auto found = told_.find(name_of(symbol));
    return found == told_.end() ? otherwise : found->second.front().second;
  }

 private:
  std::string name_of(const std::string& symbol) const {
    const auto found = same_.find(symbol);
    return found == same_.end() ? symbol : found->second;
  }
  void add(const std::string& symbol, size_t field, int64_t size) {
    told_[name_of(symbol)].emplace_back(field, size);
  }

  const DrawnCall& drawn_;
  const OpDeclaration& op_;
  std::map<std::string, std::string> same_;
  std::map<std::string, std::vector<std::pair<size_t, int64_t>>> told_;
};

// Row-major strides for a shape that was changed, and no values.
void set_shape(DrawnTensor* t, std::vector<int64_t> shape) {
  t->shape = std::move(shape);
  t->values.clear();
  t->strides.assign(t->shape.size(), 1);
  for (size_t d = t->shape.size(); d-- > 1;) {
    t->strides[d - 1] = t->strides[d] * std::max<int64_t>(t->shape[d], 1);
  }
  t->first = 0;
}

void expect_refused(const DrawnCall& changed, const Field& field) {
  const Status status = check_call(changed);
  EXPECT_EQ(status.code(), FK_INVALID_ARGUMENT) << changed.describe();
  EXPECT_NE(status.message().find(field.name), std::string::npos) << status.message() << "\n"
                                                                  << changed.describe();
}

class Forms : public testing::TestWithParam<std::string> {
 protected:
  const fk_op& op() { return *Registry::get().find(GetParam()); }
  const std::vector<Field>& fields() { return op().declaration.fields; }

  // Whether another tensor of the call is tied to the alternative that tensor `i` has.
  bool tied(const DrawnCall& drawn_call, size_t i) {
    for (size_t k = 0; k < fields().size(); ++k) {
      if (k == i || !drawn_call.tensors[k].present) continue;
      if (fields()[k].form_index == fields()[i].form_index) return true;
    }
    return false;
  }
};

TEST_P(Forms, AnotherTensorsFormIsRefused) {
  std::set<std::pair<int, size_t>> seen, expected;  // form, alternative
  for (const Field& f : fields()) {
    for (size_t a = 0; f.form_index >= 0 && a < f.shapes.size(); ++a) {
      expected.emplace(f.form_index, a);
    }
  }
  for (int seed = 0; seed < kSamples || (seed < kMostSamples && seen != expected); ++seed) {
    if (expected.empty()) break;
    DrawOptions options = options_of(seed);
    if (op().declaration.float8 && seed % 3 == 2) options.dtype = DType::kFloat8E4M3;
    DrawnCall drawn_call;
    const Status drawn = draw_call(op(), options, &drawn_call);
    ASSERT_TRUE(drawn.ok()) << drawn.message();
    const ToldSizes sizes(drawn_call);
    for (size_t i = 0; i < fields().size(); ++i) {
      const Field& f = fields()[i];
      if (f.form_index < 0 || !drawn_call.tensors[i].present) continue;
      for (size_t a = 0; a < f.shapes.size(); ++a) {
        if (&f.shapes[a] == sizes.dims_of(i)) {
          seen.emplace(f.form_index, a);
          continue;
        }
        if (!tied(drawn_call, i)) continue;
        DrawnCall changed = drawn_call;
        std::vector<int64_t> shape;
        for (const Dim& dim : f.shapes[a]) {
          shape.push_back(dim.factor * sizes.size_or(op().declaration.symbols[dim.symbol], 1) +
                          dim.offset);
        }
        set_shape(&changed.tensors[i], shape);
        expect_refused(changed, f);
      }
      if (HasFailure()) return;
    }
  }
  EXPECT_EQ(seen, expected) << "not every form was drawn";
}

TEST_P(Forms, AnotherSizeIsRefused) {
  int refused = 0;
  for (int seed = 0; seed < kSamples; ++seed) {
    DrawnCall drawn_call;
    const Status drawn = draw_call(op(), options_of(seed), &drawn_call);
    ASSERT_TRUE(drawn.ok()) << drawn.message();
    const ToldSizes sizes(drawn_call);
    for (size_t i = 0; i < fields().size(); ++i) {
      const Field& f = fields()[i];
      if (!drawn_call.tensors[i].present) continue;
      const Dims* dims = sizes.dims_of(i);
      const std::vector<size_t> order = sizes.order_of(i);
      for (size_t d = 0; d < order.size(); ++d) {
        for (const int64_t by : {-1, 1}) {
          DrawnCall changed = drawn_call;
          std::vector<int64_t> shape = drawn_call.tensors[i].shape;
          const int64_t size = shape[order[d]] += by;
          if (size < 0) continue;
          set_shape(&changed.tensors[i], shape);
          bool wrong = dims == nullptr;  // another tensor's shape
          if (dims != nullptr) {
            const auto from_end = static_cast<int64_t>(order.size() - d);
            const auto named = static_cast<int64_t>(dims->size());
            const bool leading =
                from_end > named ||
                (*dims)[static_cast<size_t>(named - from_end)].symbol == Dim::kEllipsis;
            if (leading) {
              wrong = sizes.contradicted("...", i, 1);
            } else {
              const Dim& dim = (*dims)[static_cast<size_t>(named - from_end)];
              wrong = dim.symbol == Dim::kNumber || dim.blocks_of >= 0 ||
                      (size - dim.offset) % sizes.factor(i, dim) != 0 ||
                      (!(dim.or_one && size == 1) &&
                       sizes.contradicted(op().declaration.symbols[dim.symbol], i,
                                          (size - dim.offset) / sizes.factor(i, dim)));
            }
          }
          if (!wrong) continue;
          ++refused;
          expect_refused(changed, f);
          if (HasFailure()) return;
        }
      }
    }
  }
  EXPECT_GT(refused, 0);
}

std::vector<std::string> every_op() {
  std::vector<std::string> names;
  for (const auto& op : Registry::get().ops()) names.push_back(op->declaration.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Ops, Forms, testing::ValuesIn(every_op()),
                         [](const auto& info) { return info.param; });

// The two shapes by which memory was once read and written past its end.
class AttentionForms : public testing::Test {
 protected:
  DLTensor& tensor(std::vector<int64_t> shape) {
    shapes_.push_back(std::move(shape));
    tensors_.push_back({});
    DLTensor& t = tensors_.back();
    t.device = {kDLCPU, 0};
    t.ndim = static_cast<int32_t>(shapes_.back().size());
    t.dtype = {kDLFloat, 32, 1};
    t.shape = shapes_.back().data();
    return t;
  }
  std::string refusal(const char* name,
                      const std::vector<std::pair<const char*, const DLTensor*>>& tensors) {
    const fk_op& op = *Registry::get().find(name);
    std::vector<fk_slot> slots(op.declaration.fields.size());
    for (size_t i = 0; i < slots.size(); ++i) {
      const Field& f = op.declaration.fields[i];
      if (f.kind == Kind::kNumber) {
        slots[i].number = f.number_default;
      } else {
        slots[i].integer = f.integer_default;
      }
    }
    for (const auto& [field, t] : tensors) {
      slots[static_cast<size_t>(op.declaration.find(field))].tensor = t;
    }
    size_t bytes = 0;
    EXPECT_EQ(fk_op_workspace(&op, slots.data(), &bytes), FK_INVALID_ARGUMENT);
    return fk_last_error();
  }

 private:
  std::vector<std::vector<int64_t>> shapes_;
  std::deque<DLTensor> tensors_;
};

TEST_F(AttentionForms, PackedOutputOfABatch) {
  const DLTensor& q = tensor({4, 64, 1, 16});
  EXPECT_EQ(
      refusal("attention_fwd", {{"q", &q}, {"k", &q}, {"v", &q}, {"out", &tensor({1, 1, 16})}}),
      "attention: out: expected shape (4, 64, 1, 16) to fit q, got (1, 1, 16)");
}

TEST_F(AttentionForms, PackedKeysOfABatchOfQueries) {
  const DLTensor& q = tensor({4, 64, 1, 16});
  const DLTensor& k = tensor({256, 1, 16});
  EXPECT_EQ(refusal("attention_fwd", {{"q", &q}, {"k", &k}, {"v", &q}, {"out", &q}}),
            "attention: k: expected shape (4, Lk, G, 16) to fit q, got (256, 1, 16)");
}

TEST_F(AttentionForms, PackedStatisticsOfABatch) {
  const DLTensor& q = tensor({64, 64, 64, 64});
  EXPECT_EQ(refusal("attention_bwd", {{"dout", &q},
                                      {"q", &q},
                                      {"k", &q},
                                      {"v", &q},
                                      {"out", &q},
                                      {"lse", &tensor({64, 1})},
                                      {"dq", &q}}),
            "attention_bwd: lse: expected shape (64, 64, 64) to fit dout, got (64, 1)");
}

}  // namespace
}  // namespace fk
