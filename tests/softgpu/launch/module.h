// This file declares a module with its variables and the programs made of its kernels.
#pragma once

#include <map>
#include <memory>
#include <unordered_map>

#include "program/instruction.h"
#include "ptx/syntax.h"
#include "softgpu.h"

namespace fk::softgpu {

class ParsedModule : public Module {
 public:
  ParsedModule(const std::string& ptx, const std::string& name);
  int architecture() const override { return text_.architecture; }
  const std::vector<KernelInfo>& kernels() const override { return infos_; }
  const KernelInfo* find(const std::string& kernel) const override;
  void decode_all() override;
  std::map<std::string, int> mnemonics() const override;
  void* variable(const std::string& name, size_t* bytes) override;

  // Returns nullptr where there is no such kernel.
  Program* program(const std::string& kernel);
  const std::map<int, std::string>& files() const { return text_.files; }
  struct Stored {
    AlignedArray<uint8_t> bytes;
    size_t size = 0;
    bool constant = false;
  };
  const std::unordered_map<std::string, Stored>& variables() const { return variables_; }

 private:
  std::string ptx_;  // the texts below point into it
  std::string name_;
  ModuleText text_;
  std::vector<KernelInfo> infos_;
  std::unordered_map<std::string, size_t> numbers_;  // of kernels
  std::unordered_map<std::string, Stored> variables_;
  std::vector<std::unique_ptr<Program>> programs_;
};

}  // namespace fk::softgpu
