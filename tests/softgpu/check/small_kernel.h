// This file makes kernels of a few PTX statements for tests: the frame around them, a GPU that runs
// them.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "softgpu.h"

namespace fk::softgpu {

// Tests begin with these statements: %rd9 becomes the place of this thread in words behind %rd0.
inline const char* const kOwnWord = "mul.wide.u32 %rd8, %r0, 4;\nadd.s64 %rd9, %rd0, %rd8;\n";
// %r20 becomes the place of this thread in shared memory, %r21 that of the thread 32 further in its
// ring.
inline const char* const kOwnShared =
    "mov.u32 %r19, dynamic;\nshl.b32 %r20, %r0, 2;\nadd.s32 %r20, %r20, %r19;\n"
    "add.s32 %r21, %r0, 32;\nand.b32 %r21, %r21, 63;\nshl.b32 %r21, %r21, 2;\n"
    "add.s32 %r21, %r21, %r19;\n";

class SmallKernel : public ::testing::Test {
 protected:
  // The statements find their parameters, all of 64 bits, in %rd0, %rd1 and so on, the thread in
  // %r0, the block in %r1, and dynamic shared memory under the name `dynamic`.
  static std::string text(int parameters, const std::string& statements,
                          const std::string& declarations = "") {
    std::string head, loads;
    for (int p = 0; p < parameters; ++p) {
      const std::string n = std::to_string(p);
      head += (p == 0 ? ".param .u64 p" : ", .param .u64 p") + n;
      loads += "ld.param.u64 %rd" + n + ", [p" + n + "];\n";
    }
    return ".version 9.0\n.target sm_90a\n.address_size 64\n" + declarations +
           "\n.extern .shared .align 1024 .b8 dynamic[];\n.visible .entry test(" + head +
           ")\n{\n.reg .pred %p<20>;\n.reg .b16 %rs<40>;\n.reg .b32 %r<200>;\n.reg .f32 %f<300>;\n"
           ".reg .b64 %rd<100>;\n.reg .f64 %fd<20>;\n" +
           loads + "mov.u32 %r0, %tid.x;\nmov.u32 %r1, %ctaid.x;\n" + statements + "\nret;\n}\n";
  }

  LaunchResult run(const std::string& ptx, const std::vector<const void*>& parameters,
                   uint32_t threads = 32, uint32_t blocks = 1) {
    module_ = Module::parse(ptx, "test");
    Launch launch;
    launch.module = module_.get();
    launch.kernel = "test";
    launch.grid[0] = blocks;
    launch.block[0] = threads;
    launch.cluster[0] = cluster_;
    launch.dynamic_shared_bytes = launch.max_dynamic_shared_bytes = shared_bytes_;
    launch.parameters = parameters.data();
    launch.early = early_;
    return gpu_->launch(launch, options_);
  }

  // Holds memory of the GPU that holds these values.
  template <class T>
  T* put(const std::vector<T>& values) {
    auto* to = static_cast<T*>(gpu_->memory().allocate(values.size() * sizeof(T), "data"));
    std::memcpy(to, values.data(), values.size() * sizeof(T));
    return to;
  }
  template <class T>
  T* space(size_t count) {
    return static_cast<T*>(gpu_->memory().allocate(count * sizeof(T), "space"));
  }

  static std::string all(const LaunchResult& result) {
    std::string text;
    for (const Report& report : result.reports) text += report.to_string() + "\n";
    return text;
  }
  // Expects that the launch did this wrong, first of all.
  static void expect_problem(const LaunchResult& result, Problem problem,
                             const std::string& words = "") {
    ASSERT_FALSE(result.ok());
    EXPECT_EQ(name_of(result.reports[0].problem), std::string(name_of(problem))) << all(result);
    EXPECT_NE(result.reports[0].text.find(words), std::string::npos) << all(result);
  }

  std::unique_ptr<Gpu> gpu_ = Gpu::create(h200());
  std::unique_ptr<Module> module_;
  LaunchOptions options_;
  size_t shared_bytes_ = 0;
  uint32_t cluster_ = 1;
  bool early_ = false;
};

}  // namespace fk::softgpu
