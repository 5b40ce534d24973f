#include "core/dim.h"

#include <cctype>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "core/declaration.h"

namespace fk {
namespace {

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

int64_t parse_number(const OpDeclaration& op, const std::string& text) {
  char* end = nullptr;
  const int64_t number = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0') malformed(op.name, "expected a number, got '" + text + "'");
  return number;
}

int parse_symbol(OpDeclaration& op, const std::string& name) {
  bool good = !name.empty() && std::isalpha(static_cast<unsigned char>(name[0])) != 0;
  for (char c : name) good = good && (std::isalnum(static_cast<unsigned char>(c)) || c == '_');
  if (!good) malformed(op.name, "expected a symbol, got '" + name + "'");
  const int known = op.find_symbol(name);
  if (known >= 0) return known;
  op.symbols.push_back(name);
  return static_cast<int>(op.symbols.size()) - 1;
}

Dim parse_blocks(OpDeclaration& op, const std::string& size, const std::string& length) {
  Dim dim;
  dim.symbol = parse_symbol(op, size);
  dim.blocks_of = op.find(length);
  if (dim.blocks_of < 0 || op.fields[dim.blocks_of].kind != Kind::kInteger) {
    malformed(op.name, "no integer before it for the dimension '" + size + "/" + length + "'");
  }
  return dim;
}

Dim parse_dim(OpDeclaration& op, const std::string& text) {
  Dim dim;
  if (text == "...") {
    dim.symbol = Dim::kEllipsis;
    return dim;
  }
  if (text.empty()) malformed(op.name, "empty dimension");
  if (text.find_first_not_of("0123456789") == std::string::npos) {
    dim.offset = parse_number(op, text);
    return dim;
  }
  const size_t slash = text.find('/');
  if (slash != std::string::npos) {
    return parse_blocks(op, strip(text.substr(0, slash)), strip(text.substr(slash + 1)));
  }
  if (text.back() == '?') {
    dim = parse_dim(op, strip(text.substr(0, text.size() - 1)));
    dim.or_one = true;
    return dim;
  }
  const size_t star = text.find('*');
  const size_t begin = star == std::string::npos ? 0 : star + 1;
  if (star != std::string::npos) dim.factor = parse_number(op, strip(text.substr(0, star)));
  if (dim.factor < 1) malformed(op.name, "no size can be told from the dimension '" + text + "'");
  const size_t sign = text.find_first_of("+-", begin);
  dim.symbol = parse_symbol(op, strip(text.substr(begin, sign - begin)));
  if (sign == std::string::npos) return dim;
  const int64_t number = parse_number(op, strip(text.substr(sign + 1)));
  dim.offset = text[sign] == '-' ? -number : number;
  return dim;
}

}  // namespace

std::vector<Dims> parse_shapes(OpDeclaration& op, const std::string& text, bool* by_rank) {
  std::vector<Dims> shapes;
  const std::vector<std::string> alternatives = split(text, '|');
  *by_rank = false;
  for (const std::string& alternative : alternatives) {
    Dims dims;
    bool optional = false;  // the dims from here on may be missing
    for (std::string part : split(alternative, ',')) {
      if (alternative.empty()) break;
      if (part.size() > 1 && part.front() == '(' && part.back() == ')') {
        optional = true;
        shapes.push_back(dims);
        part = strip(part.substr(1, part.size() - 2));
      } else if (optional) {
        malformed(op.name, "'" + part + "' after dims that may be missing");
      }
      dims.push_back(parse_dim(op, part));
    }
    *by_rank = *by_rank || optional;
    shapes.push_back(std::move(dims));
  }
  if (*by_rank && (alternatives.size() > 1 || has_leading_dims(shapes.back()))) {
    malformed(op.name, "dims that may be missing beside other alternatives: '" + text + "'");
  }
  return shapes;
}

std::string dim_text(const OpDeclaration& op, const Dim& dim) {
  if (dim.symbol == Dim::kEllipsis) return "...";
  if (dim.symbol == Dim::kNumber) return std::to_string(dim.offset);
  std::string text = op.symbols[dim.symbol];
  if (dim.blocks_of >= 0) return text + "/" + op.fields[dim.blocks_of].name;
  if (dim.factor != 1) text = std::to_string(dim.factor) + "*" + text;
  if (dim.offset != 0) {
    text += (dim.offset > 0 ? "+" : "-") + std::to_string(std::abs(dim.offset));
  }
  return dim.or_one ? text + " or 1" : text;
}

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

}  // namespace fk
