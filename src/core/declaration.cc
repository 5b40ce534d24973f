#include "core/declaration.h"

#include <cstdio>
#include <cstdlib>

namespace fk {

void malformed(const std::string& op, const std::string& what) {
  std::fprintf(stderr, "flashkernel: declaration of %s: %s\n", op.c_str(), what.c_str());
  std::abort();
}

int OpDeclaration::find(const std::string& field) const {
  for (size_t i = 0; i < fields.size(); ++i) {
    if (fields[i].name == field) return static_cast<int>(i);
  }
  return -1;
}

int OpDeclaration::find_symbol(const std::string& symbol) const {
  for (size_t i = 0; i < symbols.size(); ++i) {
    if (symbols[i] == symbol) return static_cast<int>(i);
  }
  return -1;
}

void OpDeclaration::set_type(Field& field, const std::string& type) {
  field.type = type;
  if (type[0] == '@' && type.find('[') == std::string::npos) {
    field.dtype_rule = DTypeRule::kSameAs;
    field.dtype_of = field.shape_of = find(type.substr(1));
    if (field.dtype_of < 0) malformed(name, "no field '" + type.substr(1) + "'");
    return;
  }
  const size_t open = type.find('[');
  if (open == std::string::npos || type.back() != ']') malformed(name, "type '" + type + "'");
  const std::string dtype = type.substr(0, open);
  if (dtype == "T") {
    field.dtype_rule = DTypeRule::kActivation;
  } else if (dtype == "P") {
    field.dtype_rule = DTypeRule::kParameter;
  } else if (dtype == "F") {
    field.dtype_rule = DTypeRule::kFloat32;
  } else if (dtype == "I") {
    field.dtype_rule = DTypeRule::kIndex;
  } else if (dtype == "J") {
    field.dtype_rule = DTypeRule::kInt32;
  } else if (!dtype.empty() && dtype[0] == '@') {
    field.dtype_rule = DTypeRule::kSameAs;
    field.dtype_of = find(dtype.substr(1));
    if (field.dtype_of < 0) malformed(name, "no field '" + dtype.substr(1) + "'");
  } else {
    malformed(name, "dtype '" + dtype + "'");
  }
  bool by_rank = false;
  field.shapes = parse_shapes(*this, type.substr(open + 1, type.size() - open - 2), &by_rank);
  if (by_rank) field.form = field.name;
}

namespace {

// Decides whether a tensor of this shape tells the size of a dim's symbol, or the leading dims.
bool tells(const Dims& dims, const Dim& dim) {
  for (const Dim& d : dims) {
    if (d.symbol == dim.symbol && d.tells_size()) return true;
  }
  return false;
}

// Decides whether arguments declared before `field` tell the size of a dim, in its alternative of
// this number, in every call that has the field.
bool told(const OpDeclaration& op, const Field& field, size_t alternative, const Dim& dim) {
  if (dim.symbol == Dim::kNumber) return true;
  if (dim.symbol >= 0) {
    const std::string& symbol = op.symbols[dim.symbol];
    const int attribute = op.find(symbol);
    if (attribute >= 0 && op.fields[attribute].kind == Kind::kInteger) return true;
    for (const auto& given : op.size_unless_given) {
      if (given.first == symbol) return true;
    }
  }
  for (const Field& f : op.fields) {
    if (&f == &field) break;
    if (f.kind != Kind::kInput || f.shapes.empty()) continue;
    const bool there = !f.optional || f.name == field.when ||
                       (field.dtype_of >= 0 && &f == &op.fields[field.dtype_of]);
    if (!there) continue;
    if (f.shapes.size() == 1 && tells(f.shapes[0], dim)) return true;
    if (f.form_index >= 0 && f.form_index == field.form_index &&
        tells(f.shapes[alternative], dim)) {
      return true;
    }
  }
  return false;
}

void set_form(OpDeclaration& op, Field& field) {
  if (field.shapes.size() < 2) return;
  for (size_t i = 0; i < op.forms.size(); ++i) {
    if (op.forms[i] == field.form) field.form_index = static_cast<int>(i);
  }
  if (field.form_index >= 0) {
    for (const Field& f : op.fields) {
      if (f.form_index != field.form_index || f.shapes.size() == field.shapes.size()) continue;
      malformed(op.name, "'" + field.name + "' has not as many alternatives as '" + f.name + "'");
    }
    return;
  }
  field.form_index = static_cast<int>(op.forms.size());
  op.forms.push_back(field.form);
}

}  // namespace

void OpDeclaration::finish(const std::vector<std::string>& along_axis) {
  for (const std::string& name : along_axis) {
    const int i = find(name);
    if (i >= 0) fields[i].along_axis = true;
  }
  bool outputs_begun = false;
  for (Field& f : fields) {
    for (size_t k = 0; f.kind == Kind::kInteger && k < symbols.size(); ++k) {
      if (symbols[k] == f.name) f.symbol = static_cast<int>(k);
    }
    const int i = find(f.when.empty() ? f.saved_unless : f.when);
    if (i >= 0 && fields[i].kind == Kind::kBoolean) f.asked_by = i;
    if (!f.factors_unless.empty()) {
      f.factors_unless_index = find(f.factors_unless);
      if (f.factors_unless_index < 0) malformed(name, "no field '" + f.factors_unless + "'");
    }
    outputs_begun = outputs_begun || f.kind == Kind::kOutput;
    if (outputs_begun && f.kind == Kind::kInput) {
      malformed(name, "the input '" + f.name + "' after an output");
    }
    set_form(*this, f);
  }
  roles.assign(symbols.size(), Role::kWhole);
  if (symbols.size() > kMaxSymbols) malformed(name, "too many symbols");
  if (forms.size() > kMaxForms) malformed(name, "too many forms");
  for (const Field& f : fields) {
    for (size_t a = 0; a < f.shapes.size(); ++a) {
      for (const Dim& dim : f.shapes[a]) {
        if (f.kind != Kind::kOutput && dim.blocks_of < 0) continue;
        if (!told(*this, f, a, dim)) malformed(name, "nothing tells the size of '" + f.name + "'");
      }
    }
  }
}

void OpDeclaration::set_role(const std::string& symbol, Role role) {
  const int index = symbol == "..." ? Dim::kEllipsis : find_symbol(symbol);
  if (index == -1) malformed(name, "no symbol '" + symbol + "'");
  for (const Field& f : fields) {
    for (const Dims& dims : f.shapes) {
      for (const Dim& dim : dims) {
        if (dim.symbol != index) continue;
        if (dim.factor != 1 || dim.offset != 0 || dim.blocks_of >= 0) {
          malformed(name, "'" + symbol + "' cannot be cut where '" + f.name + "' has it");
        }
        if (role == Role::kReduced && f.kind == Kind::kOutput) {
          malformed(name, "'" + symbol + "' is summed over, but '" + f.name + "' has it");
        }
      }
    }
  }
  (index == Dim::kEllipsis ? leading_role : roles[index]) = role;
}

bool output_wanted(const OpDeclaration& op, const Field& field, const fk_slot* slots) {
  if (field.when.empty()) return true;
  const size_t equals = field.when.find('=');
  if (equals == std::string::npos) {
    const bool off = field.when[0] == '!';
    const int i = op.find(field.when.substr(off ? 1 : 0));
    if (i < 0) malformed(op.name, "condition '" + field.when + "'");
    const bool on =
        op.fields[i].kind == Kind::kInput ? slots[i].tensor != nullptr : slots[i].integer != 0;
    return on != off;
  }
  const bool negated = equals > 0 && field.when[equals - 1] == '!';
  const int i = op.find(field.when.substr(0, negated ? equals - 1 : equals));
  if (i < 0) malformed(op.name, "condition '" + field.when + "'");
  const Field& attribute = op.fields[i];
  const int64_t value = slots[i].integer;
  const bool in_range = value >= 0 && value < static_cast<int64_t>(attribute.choices.size());
  const bool equal = in_range && attribute.choices[value] == field.when.substr(equals + 1);
  return equal != negated;
}

}  // namespace fk
