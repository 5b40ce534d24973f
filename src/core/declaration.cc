#include "core/declaration.h"

#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "core/json_text.h"

namespace fk {
namespace {

// A declaration is part of the program: a malformed one is a bug found the first time it loads.
[[noreturn]] void malformed(const std::string& op, const std::string& what) {
  std::fprintf(stderr, "flashkernel: declaration of %s: %s\n", op.c_str(), what.c_str());
  std::abort();
}

std::string strip(const std::string& s) {
  size_t begin = 0, end = s.size();
  while (begin < end && std::isspace(static_cast<unsigned char>(s[begin]))) ++begin;
  while (end > begin && std::isspace(static_cast<unsigned char>(s[end - 1]))) --end;
  return s.substr(begin, end - begin);
}

std::vector<std::string> split(const std::string& s, char separator) {
  std::vector<std::string> parts(1);
  for (char c : s) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  for (std::string& part : parts) part = strip(part);
  return parts;
}

int symbol_index(OpDeclaration& op, const std::string& name) {
  for (size_t i = 0; i < op.symbols.size(); ++i) {
    if (op.symbols[i] == name) return static_cast<int>(i);
  }
  op.symbols.push_back(name);
  return static_cast<int>(op.symbols.size()) - 1;
}

Dim parse_dim(OpDeclaration& op, const std::string& text) {
  if (text == "...") return {Dim::kEllipsis};
  if (text.empty()) malformed(op.name, "empty dimension");
  if (std::isdigit(static_cast<unsigned char>(text[0]))) return {Dim::kNumber, std::stoll(text)};
  if (text.back() == '?') {
    return {symbol_index(op, strip(text.substr(0, text.size() - 1))), 0, /*or_one=*/true};
  }
  const size_t slash = text.find('/');
  if (slash != std::string::npos) {
    Dim dim{symbol_index(op, strip(text.substr(0, slash)))};
    dim.blocks_of = op.find(strip(text.substr(slash + 1)));
    if (dim.blocks_of < 0 || op.fields[dim.blocks_of].kind != Kind::kInteger) {
      malformed(op.name, "no integer before it for the dimension '" + text + "'");
    }
    return dim;
  }
  const size_t sign = text.find_first_of("+-");
  const int symbol = symbol_index(op, strip(text.substr(0, sign)));
  if (sign == std::string::npos) return {symbol, 0};
  const int64_t number = std::stoll(strip(text.substr(sign + 1)));
  return {symbol, text[sign] == '-' ? -number : number};
}

}  // namespace

int64_t block_length(int64_t size, int64_t attribute) {
  if (attribute >= 0) return attribute;
  int64_t root = static_cast<int64_t>(std::sqrt(static_cast<double>(size)));
  while (root * root < size) ++root;
  return root;
}

int64_t block_count(int64_t size, int64_t attribute) {
  const int64_t length = block_length(size, attribute);
  return length == 0 ? 0 : size / length;
}

int OpDeclaration::find(const std::string& field) const {
  for (size_t i = 0; i < fields.size(); ++i) {
    if (fields[i].name == field) return static_cast<int>(i);
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
  const std::string dtype = strip(type.substr(0, open));
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
  const std::string dims = strip(type.substr(open + 1, type.size() - open - 2));
  for (const std::string& alternative : split(dims, '|')) {
    std::vector<Dim> shape;
    if (!alternative.empty()) {
      for (const std::string& dim : split(alternative, ',')) shape.push_back(parse_dim(*this, dim));
    }
    field.shapes.push_back(std::move(shape));
  }
}

namespace {

// Whether `shape` gives this dim's symbol (or the leading dims) a size.
bool gives(const std::vector<Dim>& shape, const Dim& dim) {
  for (const Dim& d : shape) {
    if (d.symbol == dim.symbol && !d.or_one && d.blocks_of < 0) return true;
  }
  return false;
}

// Whether arguments declared before `field` give a dim of its alternative of this number its size
// in every call that has the field.
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
    if (f.shapes.size() == 1 && gives(f.shapes[0], dim)) return true;
    if (f.form_index >= 0 && f.form_index == field.form_index &&
        gives(f.shapes[alternative], dim)) {
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
    outputs_begun = outputs_begun || f.kind == Kind::kOutput;
    if (outputs_begun && f.kind == Kind::kInput) {
      malformed(name, "the input '" + f.name + "' after an output");
    }
    set_form(*this, f);
  }
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

bool output_wanted(const OpDeclaration& op, const Field& field, const fk_slot* slots) {
  if (field.when.empty()) return true;
  const size_t equals = field.when.find('=');
  if (equals == std::string::npos) {
    const int i = op.find(field.when);
    if (i < 0) malformed(op.name, "condition '" + field.when + "'");
    return op.fields[i].kind == Kind::kInput ? slots[i].tensor != nullptr : slots[i].integer != 0;
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

namespace {

void write_key(std::string& out, const char* key, const std::string& value) {
  if (value.empty()) return;
  out += ", \"";
  out += key;
  out += "\": ";
  append_json(out, value);
}

template <class Number>
void write_number(std::string& out, const char* key, Number value) {
  out += std::string(", \"") + key + "\": ";
  append_json(out, value);
}

// What may be said of an attribute, as a number of its own kind.
void write_bound(std::string& out, const char* key, const Field& f, double value) {
  if (f.kind == Kind::kInteger) {
    write_number(out, key, static_cast<int64_t>(value));
  } else {
    write_number(out, key, value);
  }
}

void write_flag(std::string& out, const char* key, bool value) {
  if (value) out += std::string(", \"") + key + "\": true";
}

void write_range(std::string& out, const Field& f) {
  if (f.least != -kLeftOut) write_bound(out, "least", f, f.least);
  if (f.most != kLeftOut) write_bound(out, "most", f, f.most);
}

void write_field(std::string& out, const Field& f) {
  static constexpr const char* kKinds[] = {"input",   "output", "number", "integer",
                                           "boolean", "choice", "axis"};
  out += "{\"name\": ";
  append_json(out, f.name);
  write_key(out, "kind", kKinds[static_cast<int>(f.kind)]);
  write_key(out, "doc", f.doc);
  write_flag(out, "keyword_only", f.keyword_only);
  write_key(out, "group", f.group);
  if (f.kind == Kind::kInput || f.kind == Kind::kOutput) {
    write_key(out, "type", f.type);
    write_flag(out, "optional", f.kind == Kind::kInput && f.optional);
    write_flag(out, "stacked", f.stacked);
    write_flag(out, "along_axis", f.along_axis);
    write_flag(out, "saved", f.saved);
    write_key(out, "saved_unless", f.saved_unless);
    write_key(out, "when", f.when);
    write_key(out, "may_alias", f.may_alias);
    write_key(out, "updates", f.updates);
    write_key(out, "below", f.below);
    write_key(out, "rises_to", f.rises_to);
    write_key(out, "prefer", f.prefer);
    write_key(out, "also_gradient_of", f.also_gradient_of);
    write_key(out, "repeats", f.repeats);
    if (f.drawn_from != f.drawn_to) {
      out += ", \"drawn_between\": ";
      append_json(out, std::vector<double>{f.drawn_from, f.drawn_to});
    }
    write_flag(out, "with_float8", f.with_float8);
    write_key(out, "form", f.form);
  } else if (f.kind == Kind::kNumber) {
    write_number(out, "default", f.number_default);
    write_flag(out, "nullable", f.nullable);
    write_range(out, f);
  } else {
    out += ", \"default\": " + std::to_string(f.integer_default);
    write_flag(out, "nullable", f.nullable);
    write_range(out, f);
    if (f.kind == Kind::kChoice) {
      out += ", \"choices\": [";
      for (size_t i = 0; i < f.choices.size(); ++i) {
        if (i > 0) out += ", ";
        append_json(out, f.choices[i]);
      }
      out += "]";
    }
  }
  out += "}";
}

}  // namespace

std::string declarations_json(const std::vector<const OpDeclaration*>& ops) {
  std::string out = "[";
  for (const OpDeclaration* op : ops) {
    if (out.size() > 1) out += ",\n ";
    out += "{\"name\": ";
    append_json(out, op->name);
    write_key(out, "doc", op->doc);
    if (!op->size_unless_given.empty()) {
      out += ", \"size_unless_given\": {";
      for (size_t i = 0; i < op->size_unless_given.size(); ++i) {
        if (i > 0) out += ", ";
        append_json(out, op->size_unless_given[i].first);
        out += ": ";
        append_json(out, op->size_unless_given[i].second);
      }
      out += "}";
    }
    write_flag(out, "float8", op->float8);
    static constexpr const char* kAutocast[] = {"widest", "lower", "float32_on_gpu"};
    write_key(out, "autocast", kAutocast[static_cast<int>(op->autocast)]);
    out += ", \"fields\": [";
    for (size_t i = 0; i < op->fields.size(); ++i) {
      if (i > 0) out += ",\n  ";
      write_field(out, op->fields[i]);
    }
    out += "]}";
  }
  return out + "]";
}

}  // namespace fk
