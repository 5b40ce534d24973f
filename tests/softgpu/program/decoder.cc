#include "program/decoder.h"

#include <algorithm>
#include <cstring>

#include "exec/machine.h"
#include "exec/operations.h"
#include "program/allocate.h"

namespace fk::softgpu {

namespace {

using Kind = Operand::Kind;

const std::unordered_map<std::string_view, Special>& special_names() {
  static const std::unordered_map<std::string_view, Special> names = {
      {"%tid.x", Special::kThreadX},
      {"%tid.y", Special::kThreadY},
      {"%tid.z", Special::kThreadZ},
      {"%ntid.x", Special::kThreadsX},
      {"%ntid.y", Special::kThreadsY},
      {"%ntid.z", Special::kThreadsZ},
      {"%ctaid.x", Special::kBlockX},
      {"%ctaid.y", Special::kBlockY},
      {"%ctaid.z", Special::kBlockZ},
      {"%nctaid.x", Special::kBlocksX},
      {"%nctaid.y", Special::kBlocksY},
      {"%nctaid.z", Special::kBlocksZ},
      {"%laneid", Special::kLane},
      {"%warpid", Special::kWarp},
      {"%nwarpid", Special::kWarps},
      {"%cluster_ctarank", Special::kClusterRank},
      {"%cluster_nctarank", Special::kClusterSize},
      {"%lanemask_eq", Special::kLaneMaskEqual},
      {"%lanemask_lt", Special::kLaneMaskLess},
      {"%lanemask_le", Special::kLaneMaskLessEqual},
      {"%lanemask_gt", Special::kLaneMaskGreater},
      {"%lanemask_ge", Special::kLaneMaskGreaterEqual},
      {"%smid", Special::kMultiprocessor},
      {"%dynamic_smem_size", Special::kDynamicSharedBytes},
  };
  return names;
}

// Predicates 0 and 1 are constants.
constexpr Place kFalse = 0, kTrue = 1, kFirstPredicate = 2;

class Decoder {
 public:
  Decoder(const ModuleText& module, const KernelText& kernel, const FindVariable& find_variable)
      : module_(module),
        kernel_(kernel),
        find_variable_(find_variable),
        body_(parse_body(kernel)),
        program_(std::make_unique<Program>()) {}

  std::unique_ptr<Program> decode() {
    program_->info = kernel_.info;
    program_->parameters = aligned_array<uint8_t>(kernel_.info.parameter_bytes + 64);
    place_shared();
    number_predicates();
    alone_.assign(body_.registers.size(), false);
    for (size_t i = 0; i < body_.statements.size(); ++i) {
      statement_ = &body_.statements[i];
      translate();
    }
    append_exit();
    place_registers();
    program_->constants = aligned_array<uint8_t>(constants_.size() + kNarrowBytes);
    if (!constants_.empty()) {
      std::memcpy(program_->constants.get(), constants_.data(), constants_.size());
    }
    return std::move(program_);
  }

 private:
  // Names a place in the code that is filled once registers have theirs.
  struct Hole {
    int number;  // of the register
    bool in_list;
    size_t index;     // of the instruction, or in the list
    int operand = 0;  // of the instruction
  };

  [[noreturn]] void fail(const std::string& what) const {
    throw ParseError("PTX line " + std::to_string(statement_->line) + " of kernel " +
                         kernel_.info.name + ": " + what + ": " + std::string(statement_->text),
                     statement_->line);
  }

  void place_shared() {
    uint32_t end = kSharedBase;
    const auto place = [&](const Variable& variable) {
      const auto align = static_cast<uint32_t>(variable.align);
      end = (end + align - 1) / align * align;
      shared_[variable.name] = end;
      end += static_cast<uint32_t>(variable.bytes);
    };
    for (const Variable& variable : module_.variables) {
      if (variable.space != Space::kShared ||
          kernel_.body.find(variable.name) == std::string_view::npos) {
        continue;
      }
      if (variable.external) {
        program_->shared_align = std::max(program_->shared_align, variable.align);
      } else {
        place(variable);
      }
    }
    for (const Variable& variable : body_.shared) place(variable);
    const auto align = static_cast<uint32_t>(program_->shared_align);
    program_->dynamic_shared = (end + align - 1) / align * align;
    for (const Variable& variable : module_.variables) {
      if (variable.space == Space::kShared && variable.external) {
        shared_[variable.name] = program_->dynamic_shared;
      }
    }
  }

  void number_predicates() {
    predicate_of_.assign(body_.registers.size(), kNoPlace);
    Place next = kFirstPredicate;
    for (size_t r = 0; r < body_.registers.size(); ++r) {
      if (body_.registers[r] == 0) predicate_of_[r] = next++;
    }
    if (next > INT16_MAX) fail("too many predicates");
    program_->predicates = static_cast<int>(next);
  }

  Place constant(uint64_t bits, bool wide) {
    const auto key = std::make_pair(bits, wide);
    if (const auto found = constant_places_.find(key); found != constant_places_.end()) {
      return found->second;
    }
    const auto place = static_cast<Place>(constants_.size()) | kConstantBit;
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int byte = 0; byte < (wide ? 8 : 4); ++byte) {
        constants_.push_back(static_cast<uint8_t>(bits >> (8 * byte)));
      }
    }
    constant_places_[key] = place;
    return place;
  }

  Place special(Special which) {
    for (const auto& [known, place] : program_->specials) {
      if (known == which) return place;
    }
    const auto place = static_cast<Place>(program_->specials.size() * kNarrowBytes);
    program_->specials.push_back({which, place});
    return place;
  }

  // Returns what a name stands for where a number is wanted.
  uint64_t value_of_name(const Operand& operand) {
    const auto offset = static_cast<uint64_t>(operand.offset);
    if (const auto found = shared_.find(std::string(operand.text)); found != shared_.end()) {
      return found->second + offset;
    }
    for (size_t p = 0; p < kernel_.parameter_names.size(); ++p) {
      if (kernel_.parameter_names[p] == operand.text) {
        return reinterpret_cast<uint64_t>(program_->parameters.get()) +
               kernel_.info.parameters[p].offset + offset;
      }
    }
    if (const uint64_t address = find_variable_(operand.text); address != 0) {
      return address + offset;
    }
    fail("unknown name " + std::string(operand.text));
  }

  // Returns a register, an immediate or a name as a place; registers leave a hole.
  Place place_of(const Operand& operand, char letter, bool written, bool read, Hole hole) {
    const bool wide = letter == 'q';
    switch (operand.kind) {
      case Kind::kRegister: {
        const int number = static_cast<int>(operand.value);
        const RegisterBytes bytes = body_.registers[number];
        if ((bytes == 8) != wide || bytes == 0) fail("a register of another size is expected");
        if (written && hole.operand == 0) code_.back().register_bytes = bytes;
        uses_.push_back({static_cast<int>(code_.size()) - 1, number, read, written});
        hole.number = number;
        holes_.push_back(hole);
        return kNoPlace;
      }
      case Kind::kImmediate:
        if (written) fail("a number cannot be written");
        return constant(letter == 'h'   ? operand.value & 0xffff
                        : letter == 'q' ? operand.value
                                        : operand.value & 0xffffffff,
                        wide);
      case Kind::kName: {
        const auto found = special_names().find(operand.text);
        if (found != special_names().end()) {
          if (wide) fail("a special register of 32 bits");
          return special(found->second);
        }
        return constant(value_of_name(operand), wide);
      }
      case Kind::kNone:
        return kNoPlace;
      default:
        fail("an operand that is not expected");
    }
  }

  Place predicate_place(const Operand& operand) {
    if (operand.kind == Kind::kImmediate) return operand.value != 0 ? kTrue : kFalse;
    if (operand.kind == Kind::kNone) return kNoPlace;
    if (operand.kind != Kind::kRegister || predicate_of_[operand.value] == kNoPlace) {
      fail("a predicate is expected");
    }
    return predicate_of_[operand.value];
  }

  void add_to_list(const Operand& operand, bool written, bool both) {
    const size_t index = program_->lists.size();
    const bool wide = operand.kind == Kind::kRegister && body_.registers[operand.value] == 8;
    program_->lists.push_back(kNoPlace);
    const Place place = place_of(operand, wide || wide_list_ ? 'q' : 'r', written, !written || both,
                                 {0, true, index, 0});
    program_->lists[index] = place;
    if (both && operand.kind == Kind::kRegister) alone_[operand.value] = true;
    ++code_.back().list_size;
  }

  void take_address(const Operand& operand, int index, int* addresses) {
    if (operand.kind != Kind::kAddress) fail("an address is expected");
    const Operand& base = operand.parts[0];
    Instruction& i = code_.back();
    int64_t offset = operand.offset;
    bool wide = true;
    if (base.kind == Kind::kRegister) {
      wide = body_.registers[base.value] == 8;
    } else if (base.kind == Kind::kName) {
      wide = shared_.count(std::string(base.text)) == 0;
    }
    if (wide) i.wide_address |= static_cast<uint8_t>(1 << index);
    const Place place =
        place_of(base, wide ? 'q' : 'r', false, true, {0, false, code_.size() - 1, index});
    code_.back().at[index] = place;
    Instruction& after = code_.back();
    if (*addresses == 0) {
      after.immediate = offset;
    } else if (*addresses == 1) {
      after.second_offset = static_cast<int32_t>(offset);
    } else if (offset != 0) {
      fail("an offset that is not expected");
    }
    ++*addresses;
  }

  void take_operand(const std::string& word, const Operand& operand, int index, int* addresses) {
    const bool both = word[0] == '+';
    const bool written = both || word[0] == '=';
    const char letter = word[written ? 1 : 0];
    const bool pair = word.back() == '|';
    Instruction& i = code_.back();
    const Operand* main = &operand;
    if (pair && operand.kind == Kind::kPair) {
      i.at[5] = predicate_place(operand.parts[1]);
      main = &operand.parts[0];
    }
    switch (letter) {
      case 'm':
        i.target = static_cast<uint32_t>(index);
        [[fallthrough]];
      case 'r':
      case 'h':
      case 'q': {
        const Place place = place_of(*main, letter == 'm' ? 'r' : letter, written, !written || both,
                                     {0, false, code_.size() - 1, index});
        code_.back().at[index] = place;
        break;
      }
      case 'p':
        i.at[index] = predicate_place(*main);
        if (main->negated) i.negated |= static_cast<uint8_t>(1 << index);
        break;
      case 'v':
        if (i.list_size == 0) i.list = static_cast<uint32_t>(program_->lists.size());
        if (main->kind == Kind::kVector) {
          for (const Operand& part : main->parts) add_to_list(part, written, both);
        } else {
          add_to_list(*main, written, both);
        }
        break;
      case 'a':
        take_address(*main, index, addresses);
        break;
      case 'c':
        take_address(*main, index, addresses);
        if (main->parts.size() != 2 || main->parts[1].kind != Kind::kVector) {
          fail("coordinates are expected");
        }
        code_.back().list = static_cast<uint32_t>(program_->lists.size());
        for (const Operand& part : main->parts[1].parts) add_to_list(part, false, false);
        break;
      case 'i':
        if (main->kind != Kind::kImmediate) fail("a number is expected");
        i.number = static_cast<int32_t>(main->value);
        break;
      case 'n':
        if (main->kind != Kind::kImmediate) fail("a number is expected");
        i.number = (i.number << 4) | static_cast<int32_t>(main->value & 15);
        break;
      case 't': {
        const auto label = body_.labels.find(main->text);
        if (label == body_.labels.end()) fail("no label " + std::string(main->text));
        i.target = static_cast<uint32_t>(label->second);
        break;
      }
      default:
        fail("an operand that cannot be given");
    }
  }

  // Returns the name of the operation: moves of vectors have names of their own.
  std::string operation_name() const {
    std::string name(statement_->mnemonic);
    if (name.compare(0, 4, "mov.") == 0 && statement_->operands.size() == 2) {
      for (int k = 0; k < 2; ++k) {
        const Operand& operand = statement_->operands[k];
        if (operand.kind != Kind::kVector) continue;
        name += k == 0 ? " unpack" : " pack";
        if (operand.parts.size() != 2) name += " " + std::to_string(operand.parts.size());
      }
    }
    if (name.compare(0, 9, "wgmma.mma") == 0 && statement_->operands.size() > 1 &&
        statement_->operands[1].kind == Kind::kVector) {
      name += " registers";
    }
    if (name.compare(0, 9, "cp.async.") == 0 && statement_->operands.size() == 4 &&
        operations().count(name + " sized") != 0) {
      const Operand& last = statement_->operands[3];
      const bool predicate = last.kind == Kind::kRegister && body_.registers[last.value] == 0;
      if (!predicate) name += " sized";
    }
    // The register of a load, a store or a conversion may be wider than its type.
    const bool load = name.compare(0, 2, "ld") == 0;
    if (load || name.compare(0, 2, "st") == 0 || name.compare(0, 3, "cvt") == 0) {
      const std::vector<Operand>& operands = statement_->operands;
      const size_t which = load ? 0 : 1;
      if (operands.size() > which && operands[which].kind == Kind::kRegister &&
          body_.registers[operands[which].value] == 8 && operations().count(name + " wide") != 0) {
        name += " wide";
      }
    }
    return name;
  }

  void translate() {
    const std::string name = operation_name();
    const Operations& table = operations();
    const auto found = table.find(name);
    if (found == table.end()) fail("unknown instruction");
    const Operation& operation = found->second;
    code_.emplace_back();
    Instruction& i = code_.back();
    i.execute = operation.execute;
    i.control = operation.control;
    if (statement_->guard >= 0) {
      i.guard = static_cast<int16_t>(predicate_of_[statement_->guard]);
      i.guard_negated = statement_->guard_negated;
    }
    i.used_bytes = statement_->used_bytes;
    wide_list_ = name.size() > 2 && name.compare(name.size() - 2, 2, "64") == 0;
    const size_t first_use = uses_.size();
    take_operands(operation.operands);
    if (statement_->guard >= 0) {
      // The lanes that the guard leaves out keep what they had.
      for (size_t u = first_use; u < uses_.size(); ++u) uses_[u].read = true;
    }
    InstructionText text;
    text.mnemonic = statement_->mnemonic;
    text.text = statement_->text;
    text.line = statement_->line;
    text.file = statement_->file;
    text.source_line = statement_->source_line;
    text.kind = operation.kind;
    program_->texts.push_back(std::move(text));
  }

  void take_operands(const std::string& words) {
    size_t taken = 0;
    int index = 0, addresses = 0;
    size_t optional = static_cast<size_t>(std::count(words.begin(), words.end(), '?'));
    const size_t wanted = static_cast<size_t>(std::count(words.begin(), words.end(), ' ')) +
                          (words.empty() ? 0 : 1) -
                          static_cast<size_t>(std::count(words.begin(), words.end(), '-'));
    const std::vector<Operand>& operands = statement_->operands;
    size_t missing = wanted - std::min(wanted, operands.size());
    if (operands.size() > wanted || missing > optional) fail("wrong number of operands");
    for (size_t begin = 0; begin < words.size();) {
      const size_t end = std::min(words.find(' ', begin), words.size());
      std::string word = words.substr(begin, end - begin);
      begin = end + 1;
      const bool may_miss = word.back() == '?';
      if (may_miss) word.pop_back();
      if (word == "-") {
        ++index;
      } else if (may_miss && missing > 0) {
        --missing;
        ++index;
      } else {
        take_operand(word, operands[taken++], index, &addresses);
        if (word != "n") ++index;
      }
    }
  }

  void append_exit() {
    code_.emplace_back();
    code_.back().control = Control::kExit;
    InstructionText text;
    text.mnemonic = text.text = "exit";
    text.kind = Class::kBranch;
    program_->texts.push_back(text);
  }

  void place_registers() {
    const Allocation allocation = allocate_registers(code_, uses_, body_.registers, alone_,
                                                     program_->specials.size() * kNarrowBytes);
    for (const Hole& hole : holes_) {
      const Place place = allocation.places[hole.number];
      if (hole.in_list) {
        program_->lists[hole.index] = place;
      } else {
        code_[hole.index].at[hole.operand] = place;
      }
    }
    program_->register_bytes = allocation.bytes;
    program_->code = std::move(code_);
  }

  const ModuleText& module_;
  const KernelText& kernel_;
  const FindVariable& find_variable_;
  Body body_;
  std::unique_ptr<Program> program_;
  const Statement* statement_ = nullptr;
  bool wide_list_ = false;
  std::vector<Instruction> code_;
  std::vector<RegisterUse> uses_;
  std::vector<Hole> holes_;
  std::vector<bool> alone_;
  std::vector<Place> predicate_of_;
  std::vector<uint8_t> constants_;
  std::map<std::pair<uint64_t, bool>, Place> constant_places_;
  std::unordered_map<std::string, uint32_t> shared_;
};

}  // namespace

std::unique_ptr<Program> decode(const ModuleText& module, const KernelText& kernel,
                                const FindVariable& find_variable) {
  return Decoder(module, kernel, find_variable).decode();
}

}  // namespace fk::softgpu
