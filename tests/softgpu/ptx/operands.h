// This file reads the names of registers, and the operands of a statement.
#pragma once

#include <string_view>
#include <unordered_map>
#include <vector>

#include "ptx/scanner.h"
#include "ptx/syntax.h"

namespace fk::softgpu {

// Holds the registers of a body: those of an inner pair of braces hide the outer ones.
class RegisterScopes {
 public:
  explicit RegisterScopes(std::vector<RegisterBytes>* all) : all_(all), scopes_(1) {}
  void open() { scopes_.emplace_back(); }
  // Returns false where nothing was open.
  bool close();
  void declare(std::string_view name, RegisterBytes bytes);
  // Declares name<count>: name0 to name(count - 1).
  void declare_range(std::string_view name, int count, RegisterBytes bytes);
  // Returns -1 where there is no such register.
  int find(std::string_view name) const;

 private:
  struct Range {
    std::string_view prefix;
    int first = 0, count = 0;
  };
  struct Scope {
    std::unordered_map<std::string_view, int> names;
    std::vector<Range> ranges;
  };
  std::vector<RegisterBytes>* all_;
  std::vector<Scope> scopes_;
};

Operand parse_operand(Scanner& scanner, const RegisterScopes& registers);
// Reads an integer, or the bits of a float (0f..., 0d...). `decimal` tells integers.
uint64_t parse_number(Scanner& scanner, bool* decimal);

}  // namespace fk::softgpu
