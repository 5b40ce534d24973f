// The roles of symbols are true: a call is cut in two along each dim that has one, and what its
// parts compute, put together or added up as the role says, is what the whole call computes.
// Derived from the declarations, so that a new op is covered by being declared.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "check/drawn_call.h"
#include "core/access.h"
#include "core/op.h"

namespace fk {
namespace {

constexpr int kLeading = Dim::kEllipsis;
constexpr int kCallsEach = 12, kMostDraws = 400;

// One symbol of an op, in one drawn call. Cutting `leading` dims means the first of them.
class Cut {
 public:
  Cut(const DrawnCall& call, int symbol)
      : call_(call), op_(call.op->declaration), symbols_{symbol} {
    for (size_t i = 0; i < op_.fields.size(); ++i) {
      packed_ = packed_ || (call.tensors[i].present && !op_.fields[i].rises_to.empty());
    }
    for (const auto& [follower, other] : op_.size_unless_given) {
      if (op_.find_symbol(other) == symbol) symbols_.push_back(op_.find_symbol(follower));
    }
  }

  // The size to cut, or 0 where the call has no such dim.
  int64_t size() const {
    if (packed_) return 0;  // the rows of a batch are not its sequences then
    for (size_t i = 0; i < op_.fields.size(); ++i) {
      const int place = place_in(i);
      if (place >= 0) return call_.tensors[i].shape[static_cast<size_t>(place)];
    }
    return 0;
  }

  // The call on the part [begin, end) along the symbol.
  DrawnCall part(int64_t begin, int64_t end) const {
    DrawnCall part = call_;
    for (size_t i = 0; i < op_.fields.size(); ++i) {
      const int place = place_in(i);
      if (place >= 0) part.tensors[i] = slice(call_.tensors[i], place, begin, end);
      if (symbols_[0] >= 0 && op_.fields[i].symbol == symbols_[0]) {
        part.attributes[i].integer = end - begin;
      }
    }
    return part;
  }

  // What an output's elements should be, given those of both parts.
  std::vector<double> joined(size_t output, const DrawnTensor& first,
                             const DrawnTensor& second) const {
    const int place = place_in(output);
    std::vector<double> values = call_.tensors[output].values;
    values.resize(static_cast<size_t>(call_.tensors[output].numel()));
    if (place < 0) {
      for (size_t k = 0; k < values.size(); ++k) values[k] = first.values[k] + second.values[k];
      return values;
    }
    const auto axis = static_cast<size_t>(place);
    const int64_t inner = inner_of(first, axis);
    const int64_t sizes[] = {first.shape[axis] * inner, second.shape[axis] * inner};
    const int64_t row = sizes[0] + sizes[1];
    for (size_t k = 0; k < values.size(); ++k) {
      const int64_t at = static_cast<int64_t>(k) % row, outer = static_cast<int64_t>(k) / row;
      values[k] = at < sizes[0]
                      ? first.values[static_cast<size_t>(outer * sizes[0] + at)]
                      : second.values[static_cast<size_t>(outer * sizes[1] + at - sizes[0])];
    }
    return values;
  }

 private:
  // Where tensor `i` has the symbol among its dims, or -1.
  int place_in(size_t i) const {
    const Field* field = &op_.fields[i];
    if (!call_.tensors[i].present) return -1;
    while (field->shape_of >= 0) field = &op_.fields[static_cast<size_t>(field->shape_of)];
    const auto ndim = static_cast<int>(call_.tensors[i].shape.size());
    for (const Dims& dims : field->shapes) {
      if (!rank_fits(dims, ndim)) continue;
      const int leading = has_leading_dims(dims) ? ndim - static_cast<int>(dims.size()) + 1 : 0;
      for (size_t d = 0; d < dims.size(); ++d) {
        if (std::count(symbols_.begin(), symbols_.end(), dims[d].symbol) == 0) continue;
        if (dims[d].symbol == kLeading && leading == 0) continue;
        const bool first = has_leading_dims(dims) && d == 0;
        int place = first ? 0 : static_cast<int>(d) + ndim - static_cast<int>(dims.size());
        if (field->along_axis) place = before_moving(place, ndim);
        const bool repeated =
            dims[d].or_one && call_.tensors[i].shape[static_cast<size_t>(place)] == 1;
        return repeated ? -1 : place;
      }
      return -1;
    }
    return -1;
  }

  // The place of a dim in a tensor whose axis is not moved last.
  int before_moving(int place, int ndim) const {
    for (size_t k = 0; k < op_.fields.size(); ++k) {
      if (op_.fields[k].kind != Kind::kAxis) continue;
      const auto axis = static_cast<int>((call_.attributes[k].integer + ndim) % ndim);
      if (place == ndim - 1) return axis;
      return place < axis ? place : place + 1;
    }
    return place;
  }

  static int64_t inner_of(const DrawnTensor& t, size_t axis) {
    int64_t inner = 1;
    for (size_t d = axis + 1; d < t.shape.size(); ++d) inner *= t.shape[d];
    return inner;
  }

  // Part of a tensor, row-major.
  static DrawnTensor slice(const DrawnTensor& t, int place, int64_t begin, int64_t end) {
    constexpr int64_t kGuard = 8;
    const auto axis = static_cast<size_t>(place);
    DrawnTensor part = t;
    part.shape[axis] = end - begin;
    part.values.clear();
    const int64_t inner = inner_of(t, axis), row = t.shape[axis] * inner;
    for (size_t k = 0; k < t.values.size(); ++k) {
      const int64_t at = static_cast<int64_t>(k) % row;
      if (at >= begin * inner && at < end * inner) part.values.push_back(t.values[k]);
    }
    int64_t extent = 1;
    for (size_t d = t.shape.size(); d-- > 0;) {
      part.strides[d] = extent;
      extent *= std::max<int64_t>(part.shape[d], 1);
    }
    part.first = kGuard;
    part.elements = extent + 2 * kGuard;
    return part;
  }

  const DrawnCall& call_;
  const OpDeclaration& op_;
  std::vector<int> symbols_;  // and those that have its size
  bool packed_ = false;
};

// Float32 outputs of the reference, which are added up in another order.
bool nearly(double a, double b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return true;
  return std::fabs(a - b) <= 1e-5 * (1 + std::fabs(a) + std::fabs(b));
}

// What is wrong where one drawn call is cut in two along a symbol; "" where nothing is.
std::string cut_error(const DrawnCall& call, const Cut& cut, int64_t middle) {
  std::vector<DrawnTensor> whole, first, second;
  Status status = run_call(call, "reference", host_memory(), &whole);
  const DrawnCall parts[] = {cut.part(0, middle), cut.part(middle, cut.size())};
  if (status.ok()) status = run_call(parts[0], "reference", host_memory(), &first);
  if (status.ok()) status = run_call(parts[1], "reference", host_memory(), &second);
  if (!status.ok()) return status.message() + "\n" + parts[0].describe();
  for (size_t i = 0; i < whole.size(); ++i) {
    if (!whole[i].present) continue;
    const std::vector<double> joined = cut.joined(i, first[i], second[i]);
    for (size_t k = 0; k < joined.size(); ++k) {
      if (nearly(joined[k], whole[i].values[k])) continue;
      return call.op->declaration.fields[i].name + "[" + std::to_string(k) +
             "]: " + std::to_string(joined[k]) + " of the parts, " +
             std::to_string(whole[i].values[k]) + " of the whole\n" + call.describe();
    }
  }
  return "";
}

// The same for calls of an op until one goes wrong.
std::string cuts_error(const fk_op& op, int symbol) {
  int cut_calls = 0;
  for (uint64_t seed = 0; seed < kMostDraws && cut_calls < kCallsEach; ++seed) {
    DrawOptions options;
    options.seed = seed;
    options.max_elements = 1 << 12;
    DrawnCall call;
    const Status drawn = draw_call(op, options, &call);
    if (!drawn.ok()) return drawn.message();
    const Cut cut(call, symbol);
    if (cut.size() < 2) continue;
    ++cut_calls;
    const int64_t middle = 1 + static_cast<int64_t>(seed) % (cut.size() - 1);
    const std::string error = cut_error(call, cut, middle);
    if (!error.empty()) return error;
  }
  return cut_calls > 0 ? "" : "no call was drawn that could be cut";
}

class RolesOf : public testing::TestWithParam<std::string> {};

TEST_P(RolesOf, CutCallsGiveTheSame) {
  const fk_op& op = *Registry::get().find(GetParam());
  const OpDeclaration& declaration = op.declaration;
  if (declaration.leading_role != Role::kWhole) {
    EXPECT_EQ(cuts_error(op, kLeading), "") << "...";
  }
  for (size_t s = 0; s < declaration.roles.size(); ++s) {
    if (declaration.roles[s] == Role::kWhole) continue;
    EXPECT_EQ(cuts_error(op, static_cast<int>(s)), "") << declaration.symbols[s];
  }
}

// Sums of rows: rows can be cut apart, and so can columns, whose sums add up.
struct RowSums {
  static constexpr const char* kName = "row_sums_fwd";
  static constexpr const char* kDoc = "y = sum(x), z = x - mean(x).";
  Tensor x, y, z;
  static void declare(Declaration<RowSums>& d) {
    d.batch({"B"});
    d.independent({"N"});
    d.input("x", &RowSums::x, "T[B, N]", "input");
    d.output("y", &RowSums::y, "T[B]", "sums");
    d.output("z", &RowSums::z, "T[B, N]", "deviations, which depend on all of a row");
  }
};

Status sum_rows(const RowSums& a, const Exec&) {
  for (int64_t b = 0; b < a.x.size(0); ++b) {
    const auto x = [&](int64_t n) { return load(a.x, b * a.x.stride(0) + n * a.x.stride(1)); };
    double sum = 0;
    for (int64_t n = 0; n < a.x.size(1); ++n) sum += x(n);
    if (a.y) store(a.y, b * a.y.stride(0), sum);
    for (int64_t n = 0; a.z && n < a.x.size(1); ++n) {
      store(a.z, b * a.z.stride(0) + n * a.z.stride(1),
            x(n) - sum / static_cast<double>(a.x.size(1)));
    }
  }
  return {};
}

TEST(Roles, AWrongOneIsNoticed) {
  const auto op = make_op<RowSums>({{"reference", kReference, nullptr, sum_rows}});
  EXPECT_EQ(cuts_error(*op, op->declaration.find_symbol("B")), "");
  const std::string error = cuts_error(*op, op->declaration.find_symbol("N"));
  EXPECT_EQ(error.substr(0, 2), "z[") << error;
}

std::vector<std::string> ops_with_roles() {
  std::vector<std::string> names;
  for (const auto& op : Registry::get().ops()) {
    const auto has_role = [](Role role) { return role != Role::kWhole; };
    const auto& roles = op->declaration.roles;
    if (has_role(op->declaration.leading_role) ||
        std::any_of(roles.begin(), roles.end(), has_role)) {
      names.push_back(op->declaration.name);
    }
  }
  return names;
}

INSTANTIATE_TEST_SUITE_P(Ops, RolesOf, testing::ValuesIn(ops_with_roles()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace fk
