#include "launch/module.h"

#include <cstring>

#include "program/decoder.h"

namespace fk::softgpu {

int KernelInfo::threads_limit() const {
  if (required_threads[0] > 0) {
    return required_threads[0] * required_threads[1] * required_threads[2];
  }
  if (max_threads[0] > 0) return max_threads[0] * max_threads[1] * max_threads[2];
  return 1024;
}

std::unique_ptr<Module> Module::parse(const std::string& ptx, const std::string& name) {
  return std::make_unique<ParsedModule>(ptx, name);
}

ParsedModule::ParsedModule(const std::string& ptx, const std::string& name)
    : ptx_(ptx), name_(name), text_(parse_module(ptx_)) {
  for (size_t k = 0; k < text_.kernels.size(); ++k) {
    infos_.push_back(text_.kernels[k].info);
    numbers_[infos_.back().name] = k;
  }
  programs_.resize(infos_.size());
  for (const Variable& variable : text_.variables) {
    if (variable.space == Space::kShared) continue;
    Stored& stored = variables_[variable.name];
    stored.size = variable.bytes;
    stored.constant = variable.space == Space::kConstant;
    stored.bytes = aligned_array<uint8_t>(variable.bytes + 256);
    std::memset(stored.bytes.get(), 0, variable.bytes);
    if (!variable.initial.empty()) {
      std::memcpy(stored.bytes.get(), variable.initial.data(), variable.initial.size());
    }
  }
}

const KernelInfo* ParsedModule::find(const std::string& kernel) const {
  const auto found = numbers_.find(kernel);
  return found == numbers_.end() ? nullptr : &infos_[found->second];
}

Program* ParsedModule::program(const std::string& kernel) {
  const auto found = numbers_.find(kernel);
  if (found == numbers_.end()) return nullptr;
  std::unique_ptr<Program>& program = programs_[found->second];
  if (!program) {
    program = softgpu::decode(text_, text_.kernels[found->second], [&](std::string_view name) {
      const auto variable = variables_.find(std::string(name));
      return variable == variables_.end()
                 ? uint64_t{0}
                 : reinterpret_cast<uint64_t>(variable->second.bytes.get());
    });
  }
  return program.get();
}

void ParsedModule::decode_all() {
  for (const KernelInfo& info : infos_) program(info.name);
}

std::map<std::string, int> ParsedModule::mnemonics() const {
  std::map<std::string, int> result;
  for (const KernelText& kernel : text_.kernels) {
    for (const Statement& statement : parse_body(kernel).statements) {
      ++result[std::string(statement.mnemonic)];
    }
  }
  return result;
}

void* ParsedModule::variable(const std::string& name, size_t* bytes) {
  const auto found = variables_.find(name);
  if (found == variables_.end()) return nullptr;
  if (bytes != nullptr) *bytes = found->second.size;
  return found->second.bytes.get();
}

}  // namespace fk::softgpu
