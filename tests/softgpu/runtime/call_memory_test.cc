#include "softgpu/runtime/call_memory.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "softgpu/runtime/device.h"
#include "softgpu/runtime/errors.h"
#include "softgpu/runtime/kernels_test.h"

namespace fk::softgpu {
namespace {

DLTensor tensor_at(void* data, int ndim, int64_t* shape, int64_t* strides) {
  return {data, {kDLCUDA, 0}, ndim, {kDLFloat, 16, 1}, shape, strides, 0};
}

TEST(CallMemory, ARangeEndsWithTheLastElement) {
  char data[1024];
  char* middle = data + 512;
  int64_t shape[] = {3, 4}, strides[] = {20, 2};
  DLTensor tensor = tensor_at(middle, 2, shape, strides);
  EXPECT_EQ(range_of(tensor).begin, middle);
  EXPECT_EQ(range_of(tensor).bytes, 2u * (2 * 20 + 3 * 2 + 1));
  tensor.strides = nullptr;  // row by row
  EXPECT_EQ(range_of(tensor).bytes, 24u);
  int64_t backwards[] = {-20, 0};
  tensor.strides = backwards;
  tensor.byte_offset = 8;
  EXPECT_EQ(range_of(tensor).begin, middle + 8 - 80);
  EXPECT_EQ(range_of(tensor).bytes, 82u);
  shape[1] = 0;
  EXPECT_EQ(range_of(tensor).bytes, 0u);
  tensor.ndim = 0;
  EXPECT_EQ(range_of(tensor).bytes, 2u);
}

TEST(CallMemory, IsTheGpusUntilTheCallEnds) {
  float x[32] = {};
  const auto bytes = [&](size_t n) { return ByteRange{reinterpret_cast<char*>(x), n}; };
  {
    CallMemory memory;
    memory.add(bytes(sizeof x), "x", true);
    EXPECT_EQ(launch_add_one_unchecked({dim3(1), dim3(32)}, x), cudaSuccess);
    EXPECT_EQ(x[31], 1);
    EXPECT_FALSE(Device::get().memory().contains(x, sizeof x + 1));
  }
  EXPECT_EQ(launch_add_one_unchecked({dim3(1), dim3(32)}, x), cudaErrorIllegalAddress);
  forget_problems();
  CallMemory shorter;
  shorter.add(bytes(sizeof x - sizeof *x), "x", true);
  EXPECT_EQ(launch_add_one_unchecked({dim3(1), dim3(32)}, x), cudaErrorIllegalAddress);
  EXPECT_NE(forget_problems().find("31"), std::string::npos);  // the thread
}

TEST(CallMemory, AnInputIsNotWritten) {
  float x[32] = {};
  CallMemory memory;
  const ByteRange all = {reinterpret_cast<char*>(x), sizeof x};
  memory.add(all, "x", false);
  EXPECT_EQ(launch_add_one_unchecked({dim3(1), dim3(32)}, x), cudaErrorIllegalAddress);
  forget_problems();
  // The kernel may write where an output lies on the input.
  memory.add(all, "y", true);
  EXPECT_EQ(launch_add_one_unchecked({dim3(1), dim3(32)}, x), cudaSuccess);
}

}  // namespace
}  // namespace fk::softgpu
