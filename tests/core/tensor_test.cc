#include "core/tensor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "core/rows.h"

namespace fk {
namespace {

class FromDlpack : public testing::Test {
 protected:
  FromDlpack() {
    in_.data = data_;
    in_.device = {kDLCPU, 0};
    in_.ndim = 2;
    in_.dtype = {kDLFloat, 32, 1};
    in_.shape = shape_;
  }

  // The message of the error, "" if there is none.
  std::string error(bool needs_data = true) {
    out_ = {};
    return from_dlpack(in_, needs_data, &out_).message();
  }

  float data_[64] = {};
  int64_t shape_[9] = {3, 5, 1, 1, 1, 1, 1, 1, 1};
  int64_t strides_[9] = {};
  DLTensor in_{};
  Tensor out_;
};

TEST_F(FromDlpack, ContiguousByDefault) {
  ASSERT_EQ(error(), "");
  EXPECT_TRUE(out_.defined);
  EXPECT_EQ(out_.data, data_);
  EXPECT_EQ(out_.dtype, DType::kFloat32);
  EXPECT_EQ(out_.device, Device::kCpu);
  EXPECT_EQ(out_.ndim, 2);
  EXPECT_EQ(out_.size(0), 3);
  EXPECT_EQ(out_.size(-1), 5);
  EXPECT_EQ(out_.stride(0), 5);
  EXPECT_EQ(out_.stride(-1), 1);
  EXPECT_EQ(out_.numel(), 15);
  EXPECT_TRUE(out_.contiguous());
}

TEST_F(FromDlpack, KeepsStrides) {
  strides_[0] = 1;
  strides_[1] = 3;
  in_.strides = strides_;
  ASSERT_EQ(error(), "");
  EXPECT_EQ(out_.stride(0), 1);
  EXPECT_EQ(out_.stride(1), 3);
  EXPECT_FALSE(out_.contiguous());
}

TEST_F(FromDlpack, AppliesByteOffset) {
  in_.byte_offset = 12;
  ASSERT_EQ(error(), "");
  EXPECT_EQ(out_.data, data_ + 3);
}

TEST_F(FromDlpack, Scalar) {
  in_.ndim = 0;
  in_.shape = nullptr;
  ASSERT_EQ(error(), "");
  EXPECT_EQ(out_.numel(), 1);
  EXPECT_TRUE(out_.contiguous());
}

TEST_F(FromDlpack, Rank) {
  in_.ndim = kMaxDims;
  EXPECT_EQ(error(), "");
  in_.ndim = kMaxDims + 1;
  EXPECT_EQ(error(), "expected at most 8 dimensions, got 9");
  in_.ndim = -1;
  EXPECT_EQ(error(), "expected at most 8 dimensions, got -1");
  in_.ndim = std::numeric_limits<int32_t>::max();
  EXPECT_NE(error(), "");
}

TEST_F(FromDlpack, DTypes) {
  struct Row {
    uint8_t code, bits;
    DType expected;
  };
  for (const Row& row : {Row{kDLFloat, 32, DType::kFloat32}, Row{kDLFloat, 16, DType::kFloat16},
                         Row{kDLBfloat, 16, DType::kBFloat16}, Row{kDLFloat, 64, DType::kFloat64},
                         Row{kDLInt, 32, DType::kInt32}, Row{kDLInt, 64, DType::kInt64},
                         Row{kDLInt, 8, DType::kInt8}, Row{kDLUInt, 8, DType::kUInt8},
                         Row{FLASHKERNEL_DL_FLOAT8_E4M3FN, 8, DType::kFloat8E4M3}}) {
    in_.dtype = {row.code, row.bits, 1};
    ASSERT_EQ(error(), "") << name_of(row.expected);
    EXPECT_EQ(out_.dtype, row.expected);
  }
}

TEST_F(FromDlpack, UnknownDType) {
  in_.dtype = {kDLComplex, 64, 1};
  EXPECT_EQ(error(), "unknown dtype (DLPack code 5, 64 bits, 1 lanes)");
  in_.dtype = {kDLFloat, 32, 4};
  EXPECT_EQ(error(), "unknown dtype (DLPack code 2, 32 bits, 4 lanes)");
  in_.dtype = {kDLFloat, 8, 1};
  EXPECT_NE(error(), "");
}

TEST_F(FromDlpack, Devices) {
  in_.device = {kDLCUDAHost, 3};
  ASSERT_EQ(error(), "");
  EXPECT_EQ(out_.device, Device::kCpu);
  EXPECT_EQ(out_.device_id, 0);
  in_.device = {kDLCUDA, 3};
  ASSERT_EQ(error(), "");
  EXPECT_EQ(out_.device, Device::kCuda);
  EXPECT_EQ(out_.device_id, 3);
  const int32_t unknown = 1234;  // no value of the enum, so not to be cast to it
  std::memcpy(&in_.device.device_type, &unknown, sizeof unknown);
  EXPECT_EQ(error(), "expected a CPU or CUDA tensor, got DLPack device type 1234");
}

TEST_F(FromDlpack, NegativeSize) {
  shape_[1] = -1;
  EXPECT_EQ(error(), "expected sizes of at least 0, got (3, -1)");
}

// More than any address space holds is refused, so that kernels may add and multiply sizes.
TEST_F(FromDlpack, SizesThatNoMemoryHolds) {
  shape_[0] = shape_[1] = int64_t{1} << 31;
  EXPECT_EQ(error(), "shape (2147483648, 2147483648) is too large to address");
  shape_[1] = int64_t{1} << 24;  // 2^57 bytes
  EXPECT_EQ(error(), "");
  shape_[1] = int64_t{1} << 25;
  EXPECT_NE(error(), "");
}

TEST_F(FromDlpack, SizesBesideOnesThatAreZero) {
  shape_[0] = 0;
  shape_[1] = int64_t{1} << 40;
  EXPECT_EQ(error(), "");
  EXPECT_EQ(out_.numel(), 0);
  EXPECT_TRUE(out_.contiguous());
  shape_[1] = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(error(), "shape (0, 9223372036854775807) is too large to address");
}

TEST_F(FromDlpack, StridesThatNoMemoryHolds) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  in_.strides = strides_;
  strides_[0] = kMost;
  strides_[1] = 1;
  EXPECT_EQ(error(), "strides (9223372036854775807, 1) reach too far to address");
  strides_[0] = std::numeric_limits<int64_t>::min();
  EXPECT_EQ(error(), "strides (-9223372036854775808, 1) reach too far to address");
  strides_[0] = int64_t{1} << 55;  // 2 * 2^55 elements of 4 bytes
  EXPECT_NE(error(), "");
  strides_[0] = int64_t{1} << 53;
  EXPECT_EQ(error(), "");
  strides_[1] = -(int64_t{1} << 54);  // 2 up, 4 times 2 down
  EXPECT_NE(error(), "");
  strides_[0] = kMost / 2;
  strides_[1] = kMost / 4;
  EXPECT_NE(error(), "");
}

// Nobody moves along these, but kernels multiply with them all the same.
TEST_F(FromDlpack, StridesThatNoElementTakesBecomeHarmless) {
  in_.strides = strides_;
  strides_[0] = std::numeric_limits<int64_t>::max();
  strides_[1] = std::numeric_limits<int64_t>::min();
  shape_[0] = shape_[1] = 1;
  EXPECT_EQ(error(), "");
  EXPECT_EQ(out_.strides[0], 1);
  EXPECT_EQ(out_.strides[1], 1);
  shape_[0] = 3;
  shape_[1] = 0;
  EXPECT_EQ(error(), "");
  EXPECT_EQ(out_.strides[0], 1);
  EXPECT_EQ(out_.strides[1], 1);
  shape_[0] = 1;
  shape_[1] = 5;
  strides_[1] = 7;
  EXPECT_EQ(error(), "");
  EXPECT_EQ(out_.strides[0], 35) << "as without gaps";
  EXPECT_EQ(out_.strides[1], 7) << "and what counts stays";
}

TEST_F(FromDlpack, ByteOffsetThatNoMemoryHolds) {
  in_.byte_offset = std::numeric_limits<uint64_t>::max();
  EXPECT_EQ(error(), "byte_offset 18446744073709551615 is too large to address");
  shape_[0] = 0;
  EXPECT_NE(error(), "");
  shape_[0] = 3;
  in_.byte_offset = uint64_t{1} << 58;
  EXPECT_NE(error(), "");
}

TEST_F(FromDlpack, DataOutOfAlignment) {
  in_.byte_offset = 2;
  EXPECT_EQ(error(), "expected data aligned to the 4 bytes of float32, got an address that is not");
  in_.dtype = {kDLFloat, 16, 1};
  EXPECT_EQ(error(), "");
  in_.dtype = {kDLFloat, 32, 1};
  shape_[0] = 0;
  EXPECT_EQ(error(), "");
}

TEST_F(FromDlpack, NullData) {
  in_.data = nullptr;
  EXPECT_EQ(error(), "data is NULL");
  EXPECT_EQ(error(/*needs_data=*/false), "");
  shape_[0] = 0;
  EXPECT_EQ(error(), "");
}

TEST_F(FromDlpack, NullShape) {
  in_.shape = nullptr;
  EXPECT_EQ(error(), "shape is NULL");
}

TEST(Tensor, ContiguousIgnoresStridesOfSizeOne) {
  Tensor t;
  t.ndim = 3;
  const int64_t shape[] = {2, 1, 4}, strides[] = {4, 77, 1};
  for (int i = 0; i < 3; ++i) {
    t.shape[i] = shape[i];
    t.strides[i] = strides[i];
  }
  EXPECT_TRUE(t.contiguous());
  t.strides[0] = 5;
  EXPECT_FALSE(t.contiguous());
}

TEST(Tensor, ShapeString) {
  const int64_t shape[] = {2, 768};
  EXPECT_EQ(shape_string(shape, 0), "()");
  EXPECT_EQ(shape_string(shape, 1), "(2,)");
  EXPECT_EQ(shape_string(shape, 2), "(2, 768)");
}

// Every row's start, counted out dimension by dimension.
std::vector<int64_t> row_starts(const Tensor& t, int inner) {
  std::vector<int64_t> starts = {0};
  for (int d = 0; d < t.ndim - inner; ++d) {
    std::vector<int64_t> next;
    for (int64_t start : starts) {
      for (int64_t i = 0; i < t.shape[d]; ++i) next.push_back(start + i * t.strides[d]);
    }
    starts = next;
  }
  return starts;
}

TEST(Rows, FindsEveryRow) {
  struct Case {
    std::vector<int64_t> shape, strides;
    int merged;  // leading dims that remain
  };
  const Case cases[] = {
      {{7}, {1}, 0},
      {{3, 7}, {7, 1}, 1},
      {{2, 3, 7}, {21, 7, 1}, 1},
      {{2, 3, 7}, {30, 10, 1}, 1},
      {{2, 3, 7}, {7, 14, 1}, 2},
      {{2, 3, 5, 7}, {5, 10, 1, 100}, 3},
      {{2, 1, 5, 7}, {5, 99, 1, 100}, 1},
      {{4, 3, 7}, {0, 7, 1}, 2},
      {{4, 3, 7}, {-21, 7, 1}, 2},
      {{0, 3, 7}, {21, 7, 1}, 1},
      {{1, 1, 7}, {1, 1, 1}, 0},
  };
  for (const Case& c : cases) {
    Tensor t;
    t.ndim = static_cast<int>(c.shape.size());
    std::copy(c.shape.begin(), c.shape.end(), t.shape);
    std::copy(c.strides.begin(), c.strides.end(), t.strides);
    const Rows rows = rows_of(t);
    const std::vector<int64_t> expected = row_starts(t, 1);
    ASSERT_EQ(rows.count, static_cast<int64_t>(expected.size())) << shape_string(t);
    EXPECT_EQ(rows.ndim, c.merged) << shape_string(t);
    for (int64_t r = 0; r < rows.count; ++r) {
      EXPECT_EQ(rows.offset(r), expected[r]) << shape_string(t) << " row " << r;
    }
  }
}

TEST(Rows, OffsetsPastTwoToThe31) {
  Tensor t;
  t.ndim = 2;
  t.shape[0] = int64_t{1} << 20;
  t.shape[1] = t.strides[0] = int64_t{1} << 13;
  t.strides[1] = 1;
  EXPECT_EQ(rows_of(t).offset((1 << 20) - 1), ((int64_t{1} << 20) - 1) << 13);
}

}  // namespace
}  // namespace fk
