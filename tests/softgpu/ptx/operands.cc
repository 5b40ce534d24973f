#include "ptx/operands.h"

#include <cctype>
#include <charconv>

namespace fk::softgpu {

bool RegisterScopes::close() {
  if (scopes_.size() < 2) return false;
  scopes_.pop_back();
  return true;
}

void RegisterScopes::declare(std::string_view name, RegisterBytes bytes) {
  scopes_.back().names[name] = static_cast<int>(all_->size());
  all_->push_back(bytes);
}

void RegisterScopes::declare_range(std::string_view name, int count, RegisterBytes bytes) {
  scopes_.back().ranges.push_back({name, static_cast<int>(all_->size()), count});
  all_->insert(all_->end(), static_cast<size_t>(count), bytes);
}

int RegisterScopes::find(std::string_view name) const {
  size_t digits = name.size();
  while (digits > 0 && std::isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
  int number = -1;
  std::from_chars(name.data() + digits, name.data() + name.size(), number);
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    if (const auto found = scope->names.find(name); found != scope->names.end()) {
      return found->second;
    }
    if (number < 0) continue;
    for (const Range& range : scope->ranges) {
      if (range.prefix == name.substr(0, digits) && number < range.count) {
        return range.first + number;
      }
    }
  }
  return -1;
}

uint64_t parse_number(Scanner& scanner, bool* decimal) {
  const bool negative = scanner.take('-');
  std::string_view text = scanner.word();
  *decimal = true;
  int base = 10;
  if (text.size() > 1 && text[0] == '0') {
    const char kind = static_cast<char>(std::tolower(text[1]));
    if (kind == 'f' || kind == 'd' || kind == 'x') {
      base = 16;
      *decimal = kind == 'x';
      text.remove_prefix(2);
    }
  }
  if (base == 10 && !text.empty() && text.back() == 'U') text.remove_suffix(1);
  uint64_t value = 0;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (end.ptr != text.data() + text.size()) scanner.fail("expected a number");
  return negative ? ~value + 1 : value;
}

namespace {

Operand parse_list(Scanner& scanner, const RegisterScopes& registers) {
  Operand list;
  list.kind = Operand::Kind::kVector;
  do {
    list.parts.push_back(parse_operand(scanner, registers));
  } while (scanner.take(','));
  scanner.expect('}');
  return list;
}

int64_t parse_offset(Scanner& scanner) {
  bool decimal;
  if (scanner.take('+')) return static_cast<int64_t>(parse_number(scanner, &decimal));
  if (scanner.peek() == '-') return static_cast<int64_t>(parse_number(scanner, &decimal));
  return 0;
}

Operand parse_address(Scanner& scanner, const RegisterScopes& registers) {
  Operand address;
  address.kind = Operand::Kind::kAddress;
  address.parts.push_back(parse_operand(scanner, registers));
  std::swap(address.offset, address.parts[0].offset);
  if (scanner.take(',')) address.parts.push_back(parse_operand(scanner, registers));
  scanner.expect(']');
  return address;
}

}  // namespace

Operand parse_operand(Scanner& scanner, const RegisterScopes& registers) {
  if (scanner.take('{')) return parse_list(scanner, registers);
  if (scanner.take('[')) return parse_address(scanner, registers);
  Operand operand;
  operand.negated = scanner.take('!');
  const char first = scanner.peek();
  if (first == '-' || std::isdigit(static_cast<unsigned char>(first))) {
    operand.kind = Operand::Kind::kImmediate;
    operand.value = parse_number(scanner, &operand.decimal);
    return operand;
  }
  operand.text = scanner.word();
  if (operand.text == "_") {
    operand.kind = Operand::Kind::kNone;
  } else if (const int number = registers.find(operand.text); number >= 0) {
    operand.kind = Operand::Kind::kRegister;
    operand.value = static_cast<uint64_t>(number);
  } else {
    operand.kind = Operand::Kind::kName;
  }
  operand.offset = parse_offset(scanner);
  if (scanner.take('|')) {
    Operand pair;
    pair.kind = Operand::Kind::kPair;
    pair.parts.push_back(operand);
    pair.parts.push_back(parse_operand(scanner, registers));
    return pair;
  }
  return operand;
}

}  // namespace fk::softgpu
