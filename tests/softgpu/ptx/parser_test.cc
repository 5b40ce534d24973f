#include <gtest/gtest.h>

#include "softgpu/ptx/syntax.h"

namespace fk::softgpu {
namespace {

// The text is as nvcc writes it, and as it stands in fat binaries, without blanks ahead of the
// lines.
TEST(Parser, SharedVariablesOfAKernel) {
  for (const std::string indent : {"\t", ""}) {
    const std::string text = ".version 9.0\n.target sm_80\n.address_size 64\n.entry k(\n" + indent +
                             ".param .align 8 .b8 k_param_0[480],\n" + indent +
                             ".param .u32 k_param_1\n)\n.maxntid 128, 1, 1\n{\n" + indent +
                             ".reg .b32 %r<9>;\n" + indent + ".shared .align 4 .b8 scratch[30];\n" +
                             indent + ".shared .align 8 .u32 place;\n" + indent +
                             "ld.shared.u32 %r1, [place];\nret;\n}\n";
    const ModuleText module = parse_module(text);
    ASSERT_EQ(module.kernels.size(), 1u);
    const KernelInfo& info = module.kernels[0].info;
    EXPECT_EQ(module.architecture, 80);
    EXPECT_EQ(info.static_shared_bytes, 36u);
    EXPECT_EQ(info.parameter_bytes, 484u);
    EXPECT_EQ(info.parameters[1].offset, 480u);
    EXPECT_EQ(info.threads_limit(), 128);
    EXPECT_EQ(parse_body(module.kernels[0]).shared.size(), 2u);
  }
}

TEST(Parser, RegistersOfInnerBracesHideOuterOnes) {
  const std::string text =
      ".version 9.0\n.target sm_90a\n.address_size 64\n.entry k()\n{\n.reg .pred %p<2>;\n"
      ".reg .b32 %r<3>;\n.loc 2 17 5\n{\n.reg .pred p;\nsetp.ne.b32 p, %r1, 0;\n"
      "@!p bra $done;\n}\n.pragma \"used_bytes_mask 15\";\n$done:\n"
      "@%p1 mma {%r1, %r2}, [%r1+-4], -1, 0f3F800000, _, %r1|%p1;\n}\n";
  const Body body = parse_body(parse_module(text).kernels[0]);
  ASSERT_EQ(body.statements.size(), 3u);
  EXPECT_EQ(body.registers.size(), 6u);
  EXPECT_EQ(body.statements[0].operands[0].value, 5u);
  EXPECT_EQ(body.statements[0].source_line, 17);
  EXPECT_TRUE(body.statements[1].guard_negated);
  EXPECT_EQ(body.labels.at("$done"), 2);
  const Statement& last = body.statements[2];
  EXPECT_EQ(last.used_bytes, 15);
  ASSERT_EQ(last.operands.size(), 6u);
  EXPECT_EQ(last.operands[0].parts.size(), 2u);
  EXPECT_EQ(last.operands[1].offset, -4);
  EXPECT_EQ(last.operands[2].value, ~uint64_t{0});
  EXPECT_EQ(last.operands[3].value, 0x3f800000u);
  EXPECT_EQ(last.operands[4].kind, Operand::Kind::kNone);
  EXPECT_EQ(last.operands[5].kind, Operand::Kind::kPair);
}

TEST(Parser, WhatIsWrongIsNamedWithItsLine) {
  try {
    parse_module(".version 9.0\n.target sm_80\n.nonsense 3\n");
    FAIL();
  } catch (const ParseError& error) {
    EXPECT_EQ(error.line, 3);
  }
}

}  // namespace
}  // namespace fk::softgpu
