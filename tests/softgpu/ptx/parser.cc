#include <algorithm>
#include <charconv>

#include "ptx/operands.h"
#include "ptx/scanner.h"
#include "ptx/syntax.h"

namespace fk::softgpu {

namespace {

size_t bytes_of_type(std::string_view type, const Scanner& scanner) {
  size_t bits = 0;
  if (type == ".f16x2" || type == ".bf16x2") return 4;
  if (type == ".bf16") return 2;
  if (type.size() > 2) std::from_chars(type.data() + 2, type.data() + type.size(), bits);
  if (bits == 0) scanner.fail("unknown type " + std::string(type));
  return bits / 8;
}

int parse_int(Scanner& scanner) {
  bool decimal;
  return static_cast<int>(parse_number(scanner, &decimal));
}

// Reads one to three numbers with commas between them.
void parse_three(Scanner& scanner, int (&to)[3]) {
  to[0] = to[1] = to[2] = 1;
  for (int i = 0; i < 3; ++i) {
    to[i] = parse_int(scanner);
    if (i == 2 || !scanner.take(',')) return;
  }
}

// Holds what follows the space of a variable or a parameter: .align 4 .b8 name[16]
struct Declared {
  size_t align = 0, element = 0, count = 1;
  std::string_view name;
  bool open = false;  // name[]
};
Declared parse_declared(Scanner& scanner) {
  Declared result;
  for (;;) {
    const std::string_view word = scanner.word();
    if (word == ".align") {
      result.align = static_cast<size_t>(parse_int(scanner));
    } else if (word == ".ptr" || word == ".attribute") {
      scanner.fail("not understood: " + std::string(word));
    } else if (word[0] == '.') {
      result.element = bytes_of_type(word, scanner);
    } else {
      result.name = word;
      break;
    }
  }
  if (result.align == 0) result.align = result.element;
  while (scanner.take('[')) {
    if (scanner.take(']')) {
      result.open = true;
      continue;
    }
    result.count *= static_cast<size_t>(parse_int(scanner));
    scanner.expect(']');
  }
  return result;
}

Variable parse_variable(Scanner& scanner, Space space, bool external) {
  const Declared declared = parse_declared(scanner);
  Variable variable;
  variable.name = declared.name;
  variable.space = space;
  variable.align = declared.align;
  variable.bytes = declared.open ? 0 : declared.element * declared.count;
  variable.external = external;
  if (scanner.take('=')) {
    const bool list = scanner.take('{');
    do {
      bool decimal;
      const uint64_t value = parse_number(scanner, &decimal);
      for (size_t i = 0; i < declared.element; ++i) {
        variable.initial.push_back(static_cast<uint8_t>(value >> (8 * i)));
      }
    } while (list && scanner.take(','));
    if (list) scanner.expect('}');
    if (variable.initial.size() > variable.bytes) scanner.fail("more values than elements");
    variable.initial.resize(variable.bytes);
  }
  scanner.expect(';');
  return variable;
}

void parse_parameters(Scanner& scanner, KernelText* kernel) {
  if (!scanner.take('(') || scanner.take(')')) return;
  size_t end = 0;
  do {
    if (scanner.word() != ".param") scanner.fail("expected .param");
    const Declared declared = parse_declared(scanner);
    Parameter parameter;
    parameter.align = declared.align;
    parameter.size = declared.element * declared.count;
    parameter.offset = (end + parameter.align - 1) / parameter.align * parameter.align;
    end = parameter.offset + parameter.size;
    kernel->info.parameters.push_back(parameter);
    kernel->parameter_names.emplace_back(declared.name);
  } while (scanner.take(','));
  scanner.expect(')');
  kernel->info.parameter_bytes = end;
}

// Only in the declaration of a variable does a space follow .shared; the rest of the body is not
// looked at before the kernel is launched.
size_t static_shared_bytes(const KernelText& kernel, const std::vector<Variable>& variables) {
  size_t bytes = 0;
  const auto add = [&](const Variable& variable) {
    bytes = (bytes + variable.align - 1) / variable.align * variable.align + variable.bytes;
  };
  for (const Variable& variable : variables) {
    if (variable.space == Space::kShared && !variable.external &&
        kernel.body.find(variable.name) != std::string_view::npos) {
      add(variable);
    }
  }
  static constexpr std::string_view kShared = ".shared ";
  for (size_t at = kernel.body.find(kShared); at != std::string_view::npos;
       at = kernel.body.find(kShared, at + 1)) {
    if (at > 0 && kernel.body[at - 1] != '\n' && kernel.body[at - 1] != '\t') continue;
    Scanner scanner(kernel.body.substr(at + kShared.size()), 0);
    add(parse_variable(scanner, Space::kShared, false));
  }
  return bytes;
}

KernelText parse_kernel(Scanner& scanner) {
  KernelText kernel;
  kernel.info.name = scanner.word();
  parse_parameters(scanner, &kernel);
  while (!scanner.take('{')) {
    const std::string_view word = scanner.word();
    if (word == ".maxntid") {
      parse_three(scanner, kernel.info.max_threads);
    } else if (word == ".reqntid") {
      parse_three(scanner, kernel.info.required_threads);
    } else if (word == ".minnctapersm") {
      kernel.info.min_blocks = parse_int(scanner);
    } else if (word == ".reqnctapercluster") {
      parse_three(scanner, kernel.info.required_cluster);
    } else if (word == ".maxnreg" || word == ".maxclusterrank") {
      parse_int(scanner);
    } else if (word != ".explicitcluster") {
      scanner.fail("unknown directive " + std::string(word));
    }
  }
  kernel.first_line = scanner.line();
  kernel.body = scanner.braced();
  return kernel;
}

// Reads the statements of one body.
class BodyParser {
 public:
  explicit BodyParser(const KernelText& kernel)
      : scanner_(kernel.body, kernel.first_line), registers_(&body_.registers) {}

  Body parse() {
    while (!scanner_.done()) {
      if (scanner_.take('{')) {
        registers_.open();
      } else if (scanner_.take('}')) {
        if (!registers_.close()) scanner_.fail("a brace too many");
      } else if (!scanner_.take(';')) {
        parse_one();
      }
    }
    return std::move(body_);
  }

 private:
  void parse_one() {
    const int line = scanner_.line();
    const size_t begin = scanner_.position();
    Statement statement;
    if (scanner_.take('@')) {
      statement.guard_negated = scanner_.take('!');
      const std::string_view name = scanner_.word();
      statement.guard = registers_.find(name);
      if (statement.guard < 0) scanner_.fail("no predicate " + std::string(name));
    }
    const std::string_view word = scanner_.word();
    if (word[0] == '.') return parse_directive(word);
    if (scanner_.take(':')) {
      body_.labels[word] = static_cast<int>(body_.statements.size());
      return;
    }
    statement.mnemonic = word;
    if (scanner_.peek() != ';') {
      do {
        statement.operands.push_back(parse_operand(scanner_, registers_));
      } while (scanner_.take(','));
    }
    scanner_.expect(';');
    statement.text = scanner_.since(begin);
    statement.line = line;
    statement.file = file_;
    statement.source_line = source_line_;
    statement.used_bytes = used_bytes_;
    used_bytes_ = 0xffff;
    body_.statements.push_back(std::move(statement));
  }

  void parse_directive(std::string_view word) {
    if (word == ".loc") {
      file_ = parse_int(scanner_);
      source_line_ = parse_int(scanner_);
      scanner_.skip_line();
    } else if (word == ".reg") {
      parse_registers();
    } else if (word == ".shared") {
      body_.shared.push_back(parse_variable(scanner_, Space::kShared, false));
    } else if (word == ".pragma") {
      parse_pragma();
    } else {
      scanner_.fail("unknown directive " + std::string(word));
    }
  }

  // Reads a .pragma "used_bytes_mask 65280"; it says of the load that follows which bytes matter.
  void parse_pragma() {
    static constexpr std::string_view kUsed = "used_bytes_mask ";
    const std::string_view text = scanner_.quoted();
    if (text.substr(0, kUsed.size()) == kUsed) {
      uint32_t mask = 0;
      std::from_chars(text.data() + kUsed.size(), text.data() + text.size(), mask, 10);
      used_bytes_ = static_cast<uint16_t>(mask);
    }
    scanner_.expect(';');
  }

  void parse_registers() {
    const std::string_view type = scanner_.word();
    const auto bytes = type == ".pred" ? RegisterBytes{0}
                                       : static_cast<RegisterBytes>(bytes_of_type(type, scanner_));
    do {
      const std::string_view name = scanner_.word();
      if (scanner_.take('<')) {
        registers_.declare_range(name, parse_int(scanner_), bytes);
        scanner_.expect('>');
      } else {
        registers_.declare(name, bytes);
      }
    } while (scanner_.take(','));
    scanner_.expect(';');
  }

  Scanner scanner_;
  Body body_;
  RegisterScopes registers_;
  int file_ = 0, source_line_ = 0;
  uint16_t used_bytes_ = 0xffff;
};

}  // namespace

ModuleText parse_module(std::string_view text) {
  ModuleText module;
  Scanner scanner(text, 1);
  bool external = false;
  while (!scanner.done()) {
    const std::string_view word = scanner.word();
    if (word == ".version" || word == ".address_size") {
      scanner.skip_line();
    } else if (word == ".target") {
      const std::string_view name = scanner.word();  // sm_90a
      std::from_chars(name.data() + 3, name.data() + name.size(), module.architecture);
      scanner.skip_line();
    } else if (word == ".visible" || word == ".weak") {
      external = false;
    } else if (word == ".extern") {
      external = true;
    } else if (word == ".entry") {
      module.kernels.push_back(parse_kernel(scanner));
    } else if (word == ".shared" || word == ".global" || word == ".const") {
      const Space space = word == ".shared"   ? Space::kShared
                          : word == ".global" ? Space::kGlobal
                                              : Space::kConstant;
      module.variables.push_back(parse_variable(scanner, space, external));
      external = false;
    } else if (word == ".file") {
      const int number = parse_int(scanner);
      module.files[number] = scanner.quoted();
      scanner.skip_line();
    } else if (word == ".section") {
      scanner.skip_past('{');
      scanner.braced();
    } else {
      scanner.fail("unknown directive " + std::string(word));
    }
  }
  for (KernelText& kernel : module.kernels) {
    kernel.info.static_shared_bytes = static_shared_bytes(kernel, module.variables);
    for (const Variable& variable : module.variables) {
      if (variable.space == Space::kConstant) kernel.info.constant_bytes += variable.bytes;
    }
  }
  return module;
}

Body parse_body(const KernelText& kernel) { return BodyParser(kernel).parse(); }

}  // namespace fk::softgpu
