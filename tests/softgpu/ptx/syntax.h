// This file describes the PTX of a module as it is written: declarations, and the statements of a
// kernel with their registers resolved. What a statement means is decided in program/.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "softgpu.h"

namespace fk::softgpu {

// Says how many bytes a register holds for each lane; 0 is a predicate.
using RegisterBytes = uint8_t;

struct Operand {
  enum class Kind {
    kRegister,   // number `value`
    kImmediate,  // `value`: the bits, sign-extended where the text has a minus
    kName,       // `text`: a label, a variable, a parameter, a special register; plus `offset`
    kAddress,    // [parts[0] + offset], or [parts[0], parts[1]] with coordinates
    kVector,     // {parts}
    kPair,       // parts[0]|parts[1]
    kNone        // _
  };
  Kind kind = Kind::kNone;
  bool negated = false;  // !p
  bool decimal = false;  // an immediate without a point: an integer
  uint64_t value = 0;
  int64_t offset = 0;
  std::string_view text;
  std::vector<Operand> parts;
};

struct Statement {
  std::string_view mnemonic;
  std::string_view text;  // all of it, for reports
  std::vector<Operand> operands;
  int guard = -1;  // the predicate register that it depends on
  bool guard_negated = false;
  int line = 0;                  // of the PTX
  int file = 0;                  // of the .loc ahead of it; 0 where there is none
  int source_line = 0;           // the same
  uint16_t used_bytes = 0xffff;  // of a load: a bit for each byte that matters
};

enum class Space { kGlobal, kConstant, kShared };

struct Variable {
  std::string name;
  Space space = Space::kGlobal;
  size_t align = 1;
  size_t bytes = 0;
  bool external = false;         // .extern .shared: the dynamic shared memory
  std::vector<uint8_t> initial;  // empty where all is zero
};

struct KernelText {
  KernelInfo info;
  std::vector<std::string> parameter_names;
  std::string_view body;  // between its braces
  int first_line = 0;     // of the body
};

struct ModuleText {
  int architecture = 0;
  std::vector<KernelText> kernels;
  std::vector<Variable> variables;
  std::map<int, std::string> files;  // by the number that .loc uses
};

struct Body {
  std::vector<Statement> statements;
  std::vector<RegisterBytes> registers;              // by number
  std::unordered_map<std::string_view, int> labels;  // the statement that follows
  std::vector<Variable> shared;
};

// The text must outlive what is parsed from it. Both throw ParseError.
ModuleText parse_module(std::string_view text);
Body parse_body(const KernelText& kernel);

}  // namespace fk::softgpu
