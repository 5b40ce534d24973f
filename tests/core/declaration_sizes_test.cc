// Sizes that follow from others: whole blocks of an axis, and symbols that have another's size
// unless an input tells their own. The selective scan has both.
#include <gtest/gtest.h>

#include <vector>

#include "core/infer.h"
#include "core/op.h"

namespace fk {
namespace {

TEST(BlockCount, CountsWholeBlocks) {
  EXPECT_EQ(block_count(200, 1), 200);
  EXPECT_EQ(block_count(200, 64), 3);
  EXPECT_EQ(block_count(192, 64), 3);
  EXPECT_EQ(block_count(63, 64), 0);
  EXPECT_EQ(block_count(0, 64), 0);
}

TEST(BlockCount, ZeroIsNone) { EXPECT_EQ(block_count(200, 0), 0); }

TEST(BlockCount, BelowZeroIsTheSquareRootRoundedUp) {
  EXPECT_EQ(block_length(200, -1), 15);
  EXPECT_EQ(block_count(200, -1), 13);
  EXPECT_EQ(block_length(225, -1), 15);
  EXPECT_EQ(block_length(226, -1), 16);
  EXPECT_EQ(block_count(1, -1), 1);
  EXPECT_EQ(block_count(0, -1), 0);
}

// The outputs of a scan with u (batch, 200, 6) and 4 states, as told from its inputs.
class Inferred {
 public:
  Inferred(int64_t batch, int64_t checkpoint, int64_t offsets) : op_(*find()) {
    const auto tensor = [&](const char* name, std::vector<int64_t> shape, DLDataType dtype) {
      shapes_.push_back(std::move(shape));
      tensors_.push_back({});
      DLTensor& t = tensors_.back();
      t.device = {kDLCPU, 0};
      t.ndim = static_cast<int32_t>(shapes_.back().size());
      t.dtype = dtype;
      t.shape = shapes_.back().data();
      slots_[op_.find(name)].tensor = &t;
    };
    shapes_.reserve(8);
    tensors_.reserve(8);
    slots_.resize(op_.fields.size());
    const DLDataType f32{kDLFloat, 32, 1};
    tensor("u", {batch, 200, 6}, f32);
    tensor("delta", {batch, 200, 6}, f32);
    tensor("A", {6, 4}, f32);
    tensor("B", {batch, 200, 4}, f32);
    tensor("C", {batch, 200, 4}, f32);
    if (offsets > 0) tensor("cu_seqlens", {offsets}, {kDLInt, 32, 1});
    slots_[op_.find("checkpoint")].integer = checkpoint;
  }

  std::vector<int64_t> shape(const char* output) {
    const OutputInference inference(op_, slots_.data());
    OutputType type;
    EXPECT_TRUE(inference.infer(op_.fields[op_.find(output)], &type).ok());
    return {type.shape, type.shape + type.ndim};
  }

 private:
  static const OpDeclaration* find() {
    return &Registry::get().find("selective_scan_fwd")->declaration;
  }
  const OpDeclaration& op_;
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<DLTensor> tensors_;
  std::vector<fk_slot> slots_;
};

TEST(InferredSizes, BlocksOfAnAxis) {
  EXPECT_EQ(Inferred(2, 64, 0).shape("checkpoints"), (std::vector<int64_t>{2, 3, 4, 6}));
  EXPECT_EQ(Inferred(2, 0, 0).shape("checkpoints"), (std::vector<int64_t>{2, 0, 4, 6}));
  EXPECT_EQ(Inferred(2, -1, 0).shape("checkpoints"), (std::vector<int64_t>{2, 13, 4, 6}));
}

TEST(InferredSizes, AnotherSizeUnlessGiven) {
  EXPECT_EQ(Inferred(2, 64, 0).shape("last_state"), (std::vector<int64_t>{2, 6, 4}));
  EXPECT_EQ(Inferred(1, 64, 8).shape("last_state"), (std::vector<int64_t>{7, 6, 4}));
}

}  // namespace
}  // namespace fk
