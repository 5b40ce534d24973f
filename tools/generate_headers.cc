// Writes flashkernel/ops.h (C) and flashkernel/ops.hpp (C++) from the op declarations: one argument
// struct, its defaults and two functions per op.
//
// An argument struct is an array of 8-byte slots in declaration order (abi.h), so the functions are
// inline casts and the library exports nothing per op.
#include <cctype>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <string>

#include "core/op.h"

namespace {

using fk::Field;
using fk::Kind;

constexpr const char* kBanner =
    "// Generated from the op declarations under src/ops. Do not edit.\n";

std::string upper(std::string s) {
  for (char& c : s) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return s;
}

std::string camel(const std::string& s) {
  std::string out;
  bool capital = true;
  for (char c : s) {
    if (c == '_') {
      capital = true;
    } else {
      out += capital ? static_cast<char>(std::toupper(static_cast<unsigned char>(c))) : c;
      capital = false;
    }
  }
  return out;
}

std::string c_type(const Field& f) {
  if (f.kind == Kind::kInput || f.kind == Kind::kOutput) return "const DLTensor* ";
  return f.kind == Kind::kNumber ? "double " : "int64_t ";
}

std::string default_value(const Field& f, const char* null) {
  if (f.kind == Kind::kInput || f.kind == Kind::kOutput) return null;
  if (f.kind != Kind::kNumber) return std::to_string(f.integer_default);
  if (std::isinf(f.number_default)) return f.number_default > 0 ? "HUGE_VAL" : "-HUGE_VAL";
  char text[40];
  std::snprintf(text, sizeof text, "%.17g", f.number_default);
  std::string s = text;
  return s.find_first_of(".e") == std::string::npos ? s + ".0" : s;
}

// " (at least 0)", or nothing where any number will do.
std::string range(const Field& f) {
  char text[64];
  if (f.most != fk::kLeftOut) {
    std::snprintf(text, sizeof text, " (%g to %g)", f.least, f.most);
  } else if (f.least != -fk::kLeftOut) {
    std::snprintf(text, sizeof text, " (at least %g)", f.least);
  } else {
    return "";
  }
  return text;
}

// "in, optional: P[N]: scale of each column"
std::string comment(const Field& f) {
  std::string s;
  if (f.kind == Kind::kInput) {
    s = std::string("in") + (f.optional ? ", optional: " : ": ") + f.type + ": ";
    if (!f.factors_unless.empty()) s += "(without factors where " + f.factors_unless + " is) ";
  } else if (f.kind == Kind::kOutput) {
    s = "out";
    if (!f.when.empty()) s += ", when " + f.when;
    if (f.saved) s += ", for the backward";
    if (!f.saved_unless.empty()) s += ", for the backward or if " + f.saved_unless;
    if (!f.may_alias.empty()) s += ", may be " + f.may_alias;
    if (!f.updates.empty()) s += ", may be " + f.updates;
    s += ": " + f.type + ": ";
  }
  s += f.doc + range(f);
  for (size_t i = 0; i < f.choices.size(); ++i) {
    s += (i == 0 ? " [" : ", ") + std::to_string(i) + " = " + f.choices[i];
  }
  return f.choices.empty() ? s : s + "]";
}

void write_c(std::ofstream& out, const fk_op& op) {
  const fk::OpDeclaration& d = op.declaration;
  const std::string args = "fk_" + d.name + "_args";
  out << "\n// " << d.doc << "\ntypedef struct " << args << " {\n";
  for (const Field& f : d.fields)
    out << "  " << c_type(f) << f.name << ";  // " << comment(f) << "\n";
  out << "} " << args << ";\n#define FK_" << upper(d.name) << "_DEFAULTS {";
  for (size_t i = 0; i < d.fields.size(); ++i) {
    out << (i == 0 ? "" : ", ") << default_value(d.fields[i], "NULL");
  }
  out << "}\nstatic inline fk_status fk_" << d.name << "(const " << args
      << "* args, const fk_exec* exec) {\n  return fk_op_call(fk_find_op(\"" << d.name
      << "\"), (const fk_slot*)args, exec);\n}\nstatic inline fk_status fk_" << d.name
      << "_workspace(const " << args
      << "* args, size_t* bytes) {\n  return fk_op_workspace(fk_find_op(\"" << d.name
      << "\"), (const fk_slot*)args, bytes);\n}\n";
}

void write_cpp(std::ofstream& out, const fk_op& op) {
  const fk::OpDeclaration& d = op.declaration;
  const std::string args = camel(d.name);
  out << "\n// " << d.doc << "\nstruct " << args << " {\n";
  for (const Field& f : d.fields) {
    out << "  " << c_type(f) << f.name << " = " << default_value(f, "nullptr") << ";  // "
        << comment(f) << "\n";
  }
  out << "};\ninline void " << d.name << "(const " << args << "& args, Run run = {}) {\n"
      << "  static const fk_op* op = fk_find_op(\"" << d.name << "\");\n"
      << "  detail::call(op, reinterpret_cast<const fk_slot*>(&args), run);\n}\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: generate_headers DIRECTORY\n");
    return 2;
  }
  const std::string directory = argv[1];
  std::ofstream c(directory + "/ops.h"), cpp(directory + "/ops.hpp");
  c << kBanner
    << "// An output that is NULL is not computed. At least one must be given, and those that a\n"
       "// flag asks for.\n"
    << "#ifndef FLASHKERNEL_OPS_H_\n#define FLASHKERNEL_OPS_H_\n\n#include <math.h>\n\n"
    << "#include \"flashkernel/abi.h\"\n\n#ifdef __cplusplus\nextern \"C\" {\n#endif\n";
  cpp << kBanner << "// Included by flashkernel/flashkernel.hpp.\n#pragma once\n\nnamespace fk {\n";
  for (const auto& op : fk::Registry::get().ops()) {
    write_c(c, *op);
    write_cpp(cpp, *op);
  }
  c << "\n#ifdef __cplusplus\n}\n#endif\n\n#endif  // FLASHKERNEL_OPS_H_\n";
  cpp << "\n}  // namespace fk\n";
  c.close();
  cpp.close();
  return c.good() && cpp.good() ? 0 : 1;
}
