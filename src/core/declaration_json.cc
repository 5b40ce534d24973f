// Writes declarations as JSON, from which the Python side derives its calls. Shapes are written as
// they were parsed, so that one grammar has one parser.
#include <string>

#include "core/declaration.h"
#include "core/json_text.h"

namespace fk {
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

// Writes what bounds an attribute, as a number of its own kind.
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

void write_dim(std::string& out, const OpDeclaration& op, const Dim& dim) {
  out += "{\"text\": ";
  append_json(out, dim_text(op, dim));
  if (dim.symbol == Dim::kEllipsis) write_key(out, "symbol", "...");
  if (dim.symbol >= 0) write_key(out, "symbol", op.symbols[dim.symbol]);
  if (dim.factor != 1) write_number(out, "factor", dim.factor);
  if (dim.offset != 0) write_number(out, "offset", dim.offset);
  write_flag(out, "or_one", dim.or_one);
  if (dim.blocks_of >= 0) write_key(out, "blocks_of", op.fields[dim.blocks_of].name);
  out += "}";
}

// Writes a list of dims for each alternative, or an empty list where the tensor has another's
// shape.
void write_shapes(std::string& out, const OpDeclaration& op, const Field& f) {
  out += ", \"shapes\": [";
  for (size_t k = 0; k < f.shapes.size(); ++k) {
    out += k > 0 ? ", [" : "[";
    for (size_t i = 0; i < f.shapes[k].size(); ++i) {
      if (i > 0) out += ", ";
      write_dim(out, op, f.shapes[k][i]);
    }
    out += "]";
  }
  out += "]";
}

void write_field(std::string& out, const OpDeclaration& op, const Field& f) {
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
    write_shapes(out, op, f);
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

void write_roles(std::string& out, const OpDeclaration& op) {
  static constexpr const char* kRoles[] = {"whole", "batch", "independent", "reduced"};
  out += ", \"roles\": {";
  const char* separator = "";
  const auto write = [&](const std::string& symbol, Role role) {
    if (role == Role::kWhole) return;
    out += separator;
    separator = ", ";
    append_json(out, symbol);
    out += ": ";
    append_json(out, std::string(kRoles[static_cast<int>(role)]));
  };
  write("...", op.leading_role);
  for (size_t i = 0; i < op.roles.size(); ++i) write(op.symbols[i], op.roles[i]);
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
    write_roles(out, *op);
    out += ", \"fields\": [";
    for (size_t i = 0; i < op->fields.size(); ++i) {
      if (i > 0) out += ",\n  ";
      write_field(out, *op, op->fields[i]);
    }
    out += "]}";
  }
  return out + "]";
}

}  // namespace fk
