// Draws calls by trial: what a declaration cannot say (rope's R is at most D / 2) is learnt by
// asking the op whether it takes the arguments, and drawing again if not.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <random>

#include "check/drawn_call.h"
#include "core/access.h"
#include "core/call_shapes.h"

namespace fk {
namespace {

constexpr int kAttempts = 2000;
// The sizes lie around the widths of vector registers and of unrolled loops, and are seldom a power
// of two.
constexpr int64_t kSizes[] = {1, 2, 3, 4, 5, 7, 8, 13, 17, 31, 33, 64, 67, 129, 257, 1031};
constexpr int64_t kLeadingSizes[] = {1, 2, 3, 5, 11, 37};
constexpr int kMaxLeading = 3;

bool is_tensor(const Field& f) { return f.kind == Kind::kInput || f.kind == Kind::kOutput; }

bool ends_with(const std::string& s, const std::string& end) {
  return s.size() > end.size() && s.compare(s.size() - end.size(), end.size(), end) == 0;
}

// Holds the sizes in one drawn call. A forward and its backward share them: their symbols mean the
// same.
struct Sizes {
  std::map<std::string, int64_t> symbols;
  std::vector<int64_t> leading;
};

class Drawing {
 public:
  Drawing(const fk_op& op, const DrawOptions& options, int attempt)
      : op_(op), options_(options), random_(mix(op.declaration.name, options.seed, attempt)) {}

  Status draw(DrawnCall* drawn_call) {
    const std::string& name = op_.declaration.name;
    const fk_op* forward = nullptr;
    if (ends_with(name, "_bwd")) {
      forward = Registry::get().find(name.substr(0, name.size() - 4) + "_fwd");
    }
    forms_[""] = below(1024);
    packed_ = !op_.declaration.size_unless_given.empty() && one_in(3);
    draw_sizes(op_.declaration);
    if (forward != nullptr) draw_sizes(forward->declaration);
    if (options_.empty) empty_one();
    if (forward == nullptr) return draw_arguments(op_, nullptr, drawn_call);

    DrawnCall saved;
    FK_RETURN_IF_ERROR(draw_arguments(*forward, nullptr, &saved));
    std::vector<DrawnTensor> outputs;
    FK_RETURN_IF_ERROR(run_call(saved, "reference", host_memory(), &outputs));
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i].present) saved.tensors[i] = outputs[i];
    }
    return draw_arguments(op_, &saved, drawn_call);
  }

 private:
  static uint64_t mix(const std::string& name, uint64_t seed, int attempt) {
    return std::hash<std::string>()(name) + seed * 0x9e3779b97f4a7c15 + attempt;
  }

  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }
  template <class T, size_t n>
  T pick(const T (&values)[n]) {
    return values[below(n)];
  }

  void draw_sizes(const OpDeclaration& op) {
    for (const std::string& symbol : op.symbols) sizes_.symbols.emplace(symbol, pick(kSizes));
    // Packed sequences stand in a batch of 1; otherwise each row of the batch is one.
    for (const auto& [symbol, other] : op.size_unless_given) {
      if (packed_) {
        sizes_.symbols[other] = 1;
      } else {
        sizes_.symbols[symbol] = sizes_.symbols[other];
      }
    }
    if (!sizes_.leading.empty() || !has_leading(op)) return;
    sizes_.leading.resize(below(kMaxLeading + 1));
    for (int64_t& size : sizes_.leading) size = pick(kLeadingSizes);
  }

  static bool has_leading(const OpDeclaration& op) {
    for (const Field& f : op.fields) {
      for (const Dims& dims : f.shapes) {
        if (has_leading_dims(dims)) return true;
      }
    }
    return false;
  }

  void empty_one() {
    std::vector<int64_t*> all;
    for (auto& [symbol, size] : sizes_.symbols) all.push_back(&size);
    for (int64_t& size : sizes_.leading) all.push_back(&size);
    if (!all.empty()) *all[below(all.size())] = 0;
  }

  // Draws arguments for `op`. A backward's come from `forward`, whose outputs have values.
  Status draw_arguments(const fk_op& op, const DrawnCall* forward, DrawnCall* drawn_call) {
    const std::vector<Field>& fields = op.declaration.fields;
    drawn_call->op = &op;
    drawn_call->tensors.assign(fields.size(), {});
    drawn_call->attributes.assign(fields.size(), {});
    // Attributes come first, because outputs and the order of dimensions depend on them.
    for (size_t i = 0; i < fields.size(); ++i) {
      if (!is_tensor(fields[i])) drawn_call->attributes[i] = draw_attribute(op, fields[i], forward);
    }
    for (size_t i = 0; i < fields.size(); ++i) {
      if (fields[i].kind == Kind::kInput) draw_input(drawn_call, i, forward);
    }
    for (size_t i = 0; i < fields.size() && forward == nullptr; ++i) {
      const int unless = fields[i].factors_unless_index;
      if (unless >= 0 && drawn_call->tensors[unless].present) set_type(drawn_call, i);
    }
    // Conditions on inputs look at whether a slot is set, not at what is in it.
    static const DLTensor kSet{};
    std::vector<fk_slot> slots = drawn_call->attributes;
    for (size_t i = 0; i < fields.size(); ++i) {
      if (is_tensor(fields[i])) slots[i].tensor = drawn_call->tensors[i].present ? &kSet : nullptr;
    }
    std::vector<size_t> wanted;
    for (size_t i = 0; i < fields.size(); ++i) {
      if (fields[i].kind != Kind::kOutput) continue;
      if (output_wanted(op.declaration, fields[i], slots.data())) wanted.push_back(i);
    }
    bool any = false;  // at least one of them must be asked for
    for (const size_t i : wanted) {
      const int flag = fields[i].asked_by;
      const bool needed = (flag >= 0 && slots[flag].integer != 0) || (i == wanted.back() && !any);
      if (options_.skip_outputs && &op == &op_ && !needed && one_in(2)) continue;
      any = true;
      set_type(drawn_call, i);
      const std::string& shared =
          fields[i].updates.empty() ? fields[i].may_alias : fields[i].updates;
      const int alias = op.declaration.find(shared);
      if (options_.alias && &op == &op_ && alias >= 0) drawn_call->tensors[i].alias = alias;
    }
    int64_t elements = 0;
    for (const DrawnTensor& t : drawn_call->tensors) {
      elements += t.present ? t.numel() : 0;
      // Empty tensors take memory by their other sizes.
      int64_t extent = 1;
      for (int64_t size : t.shape) extent *= std::max<int64_t>(size, 1);
      if (extent > options_.max_elements) return invalid("too large");
    }
    if (elements > options_.max_elements) return invalid("too large");
    // A forward is checked loosely, before it is run for its backward.
    const int64_t least = &op == &op_ ? options_.min_elements : options_.min_elements / 4;
    if (elements < least) return invalid("too small");
    for (size_t i = 0; i < fields.size(); ++i) {
      if (drawn_call->tensors[i].present) lay_out(drawn_call, i);
    }
    FK_RETURN_IF_ERROR(check_call(*drawn_call));
    for (size_t i = 0; i < fields.size(); ++i) {
      DrawnTensor& t = drawn_call->tensors[i];
      if (fields[i].kind == Kind::kInput && t.present && t.values.empty()) {
        FK_RETURN_IF_ERROR(fill(*drawn_call, fields[i], &t));
      }
    }
    return check_call(*drawn_call);  // now with the values
  }

  fk_slot draw_attribute(const fk_op& op, const Field& f, const DrawnCall* forward) {
    fk_slot slot{};
    if (forward != nullptr) {
      const int same = forward->op->declaration.find(f.name);
      if (same >= 0) return forward->attributes[same];
    }
    switch (f.kind) {
      case Kind::kNumber:
        slot.number = f.number_default;
        if (one_in(3)) {
          slot.number = std::isinf(f.number_default) ? 0.25 : f.number_default + 0.25;
        }
        slot.number = std::min(std::max(slot.number, f.least), f.most);
        break;
      case Kind::kInteger:
        slot.integer = one_in(4) ? below(3) : f.integer_default;
        if (sizes_.symbols.count(f.name) > 0) slot.integer = sizes_.symbols[f.name];
        break;
      case Kind::kBoolean:
        slot.integer = below(2);
        break;
      case Kind::kChoice:
        slot.integer = below(f.choices.size());
        break;
      case Kind::kAxis:
        slot.integer = draw_axis(op.declaration);
        break;
      default:
        break;
    }
    return slot;
  }

  int64_t draw_axis(const OpDeclaration& op) {
    for (const Field& f : op.fields) {
      if (!f.along_axis) continue;
      const auto ndim = static_cast<int64_t>(shape_of(op, f.shapes[0], {}).size());
      return below(2 * ndim) - ndim;
    }
    return 0;
  }

  std::vector<int64_t> shape_of(const OpDeclaration& op, const Dims& dims,
                                const std::vector<fk_slot>& attributes) {
    const CallShapes shapes(op, attributes.data());
    std::vector<int64_t> shape;
    for (const Dim& dim : dims) {
      if (dim.symbol == Dim::kEllipsis) {
        shape.insert(shape.end(), sizes_.leading.begin(), sizes_.leading.end());
      } else if (dim.symbol == Dim::kNumber) {
        shape.push_back(dim.offset);
      } else if (dim.or_one && one_in(3)) {
        shape.push_back(1);
      } else {
        const int64_t size = shapes.dim_size(dim, sizes_.symbols[op.symbols[dim.symbol]]);
        shape.push_back(std::max<int64_t>(0, size));
      }
    }
    return shape;
  }

  void draw_input(DrawnCall* drawn_call, size_t i, const DrawnCall* forward) {
    const Field& f = drawn_call->op->declaration.fields[i];
    if (forward == nullptr) {
      if (!f.optional || draw_presence(*drawn_call, i)) set_type(drawn_call, i);
      return;
    }
    const auto in_forward = [&](const std::string& name) -> const DrawnTensor* {
      const int k = forward->op->declaration.find(name);
      return k < 0 ? nullptr : &forward->tensors[k];
    };
    const DrawnTensor* same = f.prefer.empty() ? nullptr : in_forward(f.prefer);
    if (same == nullptr || !same->present) same = in_forward(f.name);
    if (same != nullptr) {
      drawn_call->tensors[i] = *same;
      return;
    }
    // The gradient of an output is there only if that output is.
    const DrawnTensor* output = f.name[0] == 'd' ? in_forward(f.name.substr(1)) : nullptr;
    if (output != nullptr && !output->present) return;
    if (!f.optional || !one_in(4)) set_type(drawn_call, i);
  }

  // Tensors of one form take alternatives of one number: all packed, or none is. A number is drawn
  // for every optional tensor, also where it is not needed, so that calls stay the same where one
  // is tied to a form.
  const Dims& alternative(const Field& f) {
    const bool follows =
        f.kind == Kind::kOutput || (!f.optional && f.form != f.name) || f.name[0] == 'd';
    int64_t number = follows ? 0 : below(1024);
    if (f.shapes.size() == 1) return f.shapes[0];
    if (f.form != f.name) {
      const auto [form, is_new] = forms_.emplace(f.form, 0);
      if (is_new) form->second = below(1024);
      number = form->second;
    }
    return f.shapes[static_cast<size_t>(number) % f.shapes.size()];
  }

  // Decides whether an optional input of a forward is drawn. Those of a group go together, and
  // offsets go with the packed tensors they are for.
  bool draw_presence(const DrawnCall& drawn_call, size_t i) {
    const std::vector<Field>& fields = drawn_call.op->declaration.fields;
    const Field& f = fields[i];
    if (!f.rises_to.empty() && !drawn_call.op->declaration.size_unless_given.empty())
      return packed_;
    if (f.with_float8 && options_.dtype != DType::kFloat8E4M3) return false;
    if (!f.rises_to.empty()) {
      for (const Field& other : fields) {
        if (other.kind != Kind::kInput || other.optional) continue;
        for (const Dim& dim : alternative(other)) {
          if (dim.symbol >= 0 && drawn_call.op->declaration.symbols[dim.symbol] == f.rises_to) {
            return true;
          }
        }
      }
      return false;
    }
    if (i > 0 && !f.group.empty() && f.group == fields[i - 1].group) {
      return drawn_call.tensors[i - 1].present;
    }
    return one_in(2);
  }

  // Makes the field present, with its dtype and shape.
  void set_type(DrawnCall* drawn_call, size_t i) {
    const OpDeclaration& op = drawn_call->op->declaration;
    const Field& f = op.fields[i];
    DrawnTensor& t = drawn_call->tensors[i];
    t.present = true;
    switch (f.dtype_rule) {
      case DTypeRule::kActivation:
        t.dtype = f.kind == Kind::kOutput ? result_dtype(options_.dtype) : options_.dtype;
        break;
      case DTypeRule::kParameter:
        t.dtype = one_in(2) ? result_dtype(options_.dtype) : DType::kFloat32;
        break;
      case DTypeRule::kFloat32:
        t.dtype = DType::kFloat32;
        break;
      case DTypeRule::kIndex:
        t.dtype = one_in(2) ? DType::kInt32 : DType::kInt64;
        break;
      case DTypeRule::kInt32:
        t.dtype = DType::kInt32;
        break;
      case DTypeRule::kSameAs:
        t.dtype = drawn_call->tensors[f.dtype_of].dtype;
        break;
    }
    if (f.shape_of >= 0) {
      t.shape = drawn_call->tensors[f.shape_of].shape;
    } else {
      Dims dims = alternative(f);
      const int unless = f.factors_unless_index;
      const bool alone = unless >= 0 && drawn_call->tensors[unless].present;
      for (Dim& dim : dims) dim.factor = alone ? 1 : dim.factor;
      t.shape = shape_of(op, dims, drawn_call->attributes);
    }
    if (!f.along_axis) return;
    for (size_t k = 0; k < op.fields.size(); ++k) {
      if (op.fields[k].kind != Kind::kAxis) continue;
      const auto ndim = static_cast<int64_t>(t.shape.size());
      const int64_t axis = (drawn_call->attributes[k].integer + ndim) % ndim;
      std::rotate(t.shape.begin() + axis, t.shape.end() - 1, t.shape.end());
    }
  }

  // Chooses where the elements lie. Memory always starts and ends with a few that are not the
  // tensor's.
  void lay_out(DrawnCall* drawn_call, size_t i) {
    constexpr int64_t kGuard = 64;
    DrawnTensor& t = drawn_call->tensors[i];
    if (t.alias >= 0) {
      const DrawnTensor& input = drawn_call->tensors[t.alias];
      t.strides = input.strides;
      t.first = input.first;
      t.elements = input.elements;
      return;
    }
    const bool strided = options_.strided && drawn_call->op == &op_;
    const Field& field = drawn_call->op->declaration.fields[i];
    // Offsets rise, so that they cannot repeat.
    const bool may_repeat = field.kind == Kind::kInput && field.rises_to.empty();
    const auto ndim = static_cast<int>(t.shape.size());
    std::vector<int> order(ndim);
    for (int d = 0; d < ndim; ++d) order[d] = d;
    if (strided && ndim > 1 && one_in(3)) std::swap(order[below(ndim)], order[below(ndim)]);
    t.strides.assign(ndim, 0);
    t.first = kGuard + (strided ? below(4) : 0);
    int64_t extent = strided && one_in(4) ? 2 : 1;
    for (int k = ndim - 1; k >= 0; --k) {
      const int d = order[k];
      // A dimension is repeated only where the values are ours to choose.
      if (strided && may_repeat && t.values.empty() && one_in(8)) continue;
      t.strides[d] = extent;
      extent *= std::max<int64_t>(t.shape[d], 1);
      if (strided && one_in(3)) extent += 1 + below(3);
      if (strided && t.shape[d] > 1 && one_in(8)) {
        t.first += t.strides[d] * (t.shape[d] - 1);
        t.strides[d] = -t.strides[d];
      }
    }
    t.elements = kGuard + 4 + extent + kGuard;
  }

  // Draws normal values. An index lies below its symbol, or is the op's ignore_index.
  Status fill(const DrawnCall& drawn_call, const Field& f, DrawnTensor* t) {
    t->values.resize(t->numel());
    if (t->dtype != DType::kInt32 && t->dtype != DType::kInt64) {
      std::normal_distribution<double> normal;
      const bool ranged = f.drawn_from != f.drawn_to;
      std::uniform_real_distribution<double> uniform(f.drawn_from, ranged ? f.drawn_to : 1);
      for (double& value : t->values) {
        value = round_to(t->dtype, ranged ? uniform(random_) : normal(random_));
      }
      if (!options_.special) return {};
      constexpr double kInfinity = std::numeric_limits<double>::infinity();
      // Gradients get NaN only: a factor too small for float32 is 0 there, and 0 times infinity is
      // NaN.
      const bool gradient = ends_with(drawn_call.op->declaration.name, "_bwd") && f.name[0] == 'd';
      for (double& value : t->values) {
        if (!one_in(50)) continue;
        value = gradient ? std::nan("") : pick({kInfinity, -kInfinity, std::nan("")});
      }
      return {};
    }
    if (!f.rises_to.empty()) {
      const int64_t total = sizes_.symbols[f.rises_to];
      for (double& value : t->values) value = static_cast<double>(below(total + 1));
      std::sort(t->values.begin(), t->values.end());
      if (t->values.size() == 1 && total > 0) return invalid(f.name + " has no valid value");
      t->values.back() = static_cast<double>(total);
      t->values.front() = 0;
      return {};
    }
    const int ignore = drawn_call.op->declaration.find("ignore_index");
    const auto size = sizes_.symbols.find(f.below);
    const int64_t limit = size == sizes_.symbols.end() ? 1 : size->second;
    for (double& value : t->values) {
      if (ignore >= 0 && (limit == 0 || one_in(4))) {
        value = static_cast<double>(drawn_call.attributes[ignore].integer);
      } else if (limit > 0) {
        value = static_cast<double>(below(limit));
      } else {
        return invalid(f.name + " has no valid value");
      }
    }
    return {};
  }

  const fk_op& op_;
  const DrawOptions& options_;
  std::mt19937_64 random_;
  Sizes sizes_;
  std::map<std::string, int64_t> forms_;  // by name, as a forward and its backward share them
  bool packed_ = false;
};

}  // namespace

int64_t DrawnTensor::numel() const {
  int64_t n = 1;
  for (int64_t size : shape) n *= size;
  return n;
}

std::string DrawnCall::describe() const {
  std::string text = op->declaration.name + "(";
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Field& f = op->declaration.fields[i];
    const DrawnTensor& t = tensors[i];
    std::string value;
    if (is_tensor(f)) {
      if (!t.present) continue;
      const auto list = [](const std::vector<int64_t>& v) {
        return shape_string(v.data(), static_cast<int>(v.size()));
      };
      value = std::string(" ") + name_of(t.dtype) + list(t.shape) + " strides " + list(t.strides);
      if (t.alias >= 0) value += " in " + op->declaration.fields[t.alias].name;
    } else if (f.kind == Kind::kNumber) {
      value = "=" + std::to_string(attributes[i].number);
    } else if (f.kind == Kind::kChoice) {
      value = "=" + f.choices[attributes[i].integer];
    } else {
      value = "=" + std::to_string(attributes[i].integer);
    }
    text += (text.back() == '(' ? "" : ", ") + f.name + value;
  }
  return text + ")";
}

Status draw_call(const fk_op& op, const DrawOptions& options, DrawnCall* drawn_call) {
  Status status;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    status = Drawing(op, options, attempt).draw(drawn_call);
    if (status.code() != FK_INVALID_ARGUMENT) return status;
  }
  return {FK_INTERNAL, "no valid arguments found in " + std::to_string(kAttempts) +
                           " draws; the last: " + status.message() + ": " + drawn_call->describe()};
}

}  // namespace fk
