// This file tests the stand-in for the CUDA runtime through the functions that the library calls.
// FK_SOFTGPU_ARCH chooses the chip, as everywhere.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "softgpu/runtime/device.h"
#include "softgpu/runtime/errors.h"
#include "softgpu/runtime/kernels_test.h"

namespace fk::softgpu {
namespace {

const Chip& chip() { return Device::get().chip(); }

bool says(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class Runtime : public testing::Test {
 protected:
  void SetUp() override {
    forget_problems();
    EXPECT_EQ(allocations(), 0u);
  }
  void TearDown() override {
    EXPECT_EQ(forget_problems(), "");
    EXPECT_EQ(allocations(), 0u);
  }
  static size_t allocations() { return Device::get().memory().leaks().size(); }
};

// Holds floats on the device.
struct Floats {
  explicit Floats(size_t n) : count(n) {
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data), n * sizeof(float)), cudaSuccess);
  }
  ~Floats() { cudaFree(data); }
  std::vector<float> read() const {
    std::vector<float> host(count);
    EXPECT_EQ(cudaMemcpy(host.data(), data, count * sizeof(float), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return host;
  }
  void write(const std::vector<float>& host) const {
    EXPECT_EQ(cudaMemcpy(data, host.data(), count * sizeof(float), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  size_t count;
  float* data = nullptr;
};

TEST_F(Runtime, RunsAKernel) {
  const int n = 1000;
  const Floats x(n);
  std::vector<float> expected(n);
  std::iota(expected.begin(), expected.end(), 0.0f);
  x.write(expected);
  EXPECT_EQ(launch_add_one({dim3(8), dim3(128)}, x.data, n), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
  for (float& value : expected) value += 1;
  EXPECT_EQ(x.read(), expected);
}

TEST_F(Runtime, PassesParametersOfEverySize) {
  double* out = nullptr;
  ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&out), sizeof *out), cudaSuccess);
  EXPECT_EQ(launch_sum(out, 1, 0.5, 20, int64_t{1} << 40, 0.25f, {300, 4000}), cudaSuccess)
      << cudaGetErrorString(cudaGetLastError());
  double sum = 0;
  EXPECT_EQ(cudaMemcpy(&sum, out, sizeof sum, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(sum, 1 + 0.5 + 20 + static_cast<double>(int64_t{1} << 40) + 0.25 + 300 + 4000);
  EXPECT_EQ(cudaFree(out), cudaSuccess);
}

TEST_F(Runtime, LaunchesAsHostCodeOfCuda12Does) {
  const Floats x(2);
  x.write({1, 2});
  int n = 2;
  float* data = x.data;
  void* arguments[] = {&data, &n};
  EXPECT_EQ(cudaLaunchKernel(add_one_kernel(), dim3(1), dim3(32), arguments, 0, nullptr),
            cudaSuccess);
  EXPECT_EQ(x.read(), (std::vector<float>{2, 3}));
}

TEST_F(Runtime, RunsOtherPtxWhereItIsGiven) {
  Device& device = Device::get();
  const Floats x(4);
  x.write({0, 0, 0, 0});
  EXPECT_NE(device.replace_ptx("nothing", "x"), "");
  Kernel* kernel = nullptr;
  const KernelInfo* info = nullptr;
  Module* module = nullptr;
  ASSERT_EQ(device.find(add_one_kernel(), &kernel, &info, &module), cudaSuccess);
  std::string ptx = device.ptx_of(kernel->name);
  const std::string one = "0f3F800000", three = "0f40400000";
  ASSERT_NE(ptx.find(one), std::string::npos);
  ptx.replace(ptx.find(one), one.size(), three);
  EXPECT_EQ(device.replace_ptx(kernel->name, ptx), "");
  EXPECT_EQ(launch_add_one({dim3(1), dim3(4)}, x.data, 4), cudaSuccess);
  EXPECT_EQ(x.read(), std::vector<float>(4, 3));
  EXPECT_NE(device.replace_ptx(kernel->name, ".target sm_80\nnonsense"), "");
  EXPECT_EQ(device.replace_ptx(kernel->name, ""), "");
  EXPECT_EQ(launch_add_one({dim3(1), dim3(4)}, x.data, 4), cudaSuccess);
  EXPECT_EQ(x.read(), std::vector<float>(4, 4));
}

TEST_F(Runtime, TakesLaunchesFromManyThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      const Floats x(64);
      x.write(std::vector<float>(64, 0));
      for (int i = 0; i < 20; ++i) {
        EXPECT_EQ(launch_add_one({dim3(2), dim3(32)}, x.data, 64), cudaSuccess);
      }
      EXPECT_EQ(x.read(), std::vector<float>(64, 20));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(Runtime, RefusesShapesThatNoChipTakes) {
  const Shape none = {dim3(0), dim3(1)}, high = {dim3(1, 65536), dim3(1)},
              wide = {dim3(1), dim3(1025)}, deep = {dim3(1), dim3(1, 1, 65)};
  for (const Shape& shape : {none, high, wide, deep}) {
    EXPECT_EQ(launch_add_one(shape, nullptr, 0), cudaErrorInvalidConfiguration);
  }
  EXPECT_EQ(launch_bounded({dim3(1), dim3(64)}), cudaSuccess);
  EXPECT_EQ(launch_bounded({dim3(1), dim3(65)}), cudaErrorLaunchOutOfResources);
}

TEST_F(Runtime, SharedMemoryPast48KilobytesMustBeAskedFor) {
  const size_t by_default = 48 << 10;
  EXPECT_EQ(launch_with_shared({dim3(1), dim3(1), by_default}), cudaSuccess);
  EXPECT_EQ(launch_with_shared({dim3(1), dim3(1), by_default + 16}), cudaErrorInvalidValue);
  const int most = chip().shared_bytes_per_block;
  const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  EXPECT_EQ(cudaFuncSetAttribute(with_shared(), attribute, most + 1), cudaErrorInvalidValue);
  EXPECT_TRUE(says(cudaGetErrorString(cudaGetLastError()), std::to_string(most)));
  EXPECT_EQ(cudaFuncSetAttribute(with_shared(), attribute, most), cudaSuccess);
  EXPECT_EQ(launch_with_shared({dim3(1), dim3(1), static_cast<size_t>(most)}), cudaSuccess);
  EXPECT_EQ(launch_with_shared({dim3(1), dim3(1), static_cast<size_t>(most) + 16}),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaFuncSetAttribute(with_shared(), attribute, 0), cudaSuccess);
}

TEST_F(Runtime, ClustersNeedHopperAndAGridOfThem) {
  int* out = nullptr;
  ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&out), 8 * sizeof(int)), cudaSuccess);
  if (chip().architecture < 90) {
    EXPECT_EQ(launch_clustered(dim3(8), dim3(2), out), cudaErrorInvalidClusterSize);
  } else {
    EXPECT_EQ(launch_clustered(dim3(8), dim3(4), out), cudaSuccess);
    std::vector<int> ranks(8);
    EXPECT_EQ(cudaMemcpy(ranks.data(), out, 8 * sizeof(int), cudaMemcpyDeviceToHost), cudaSuccess);
    EXPECT_EQ(ranks, (std::vector<int>{0, 1, 2, 3, 0, 1, 2, 3}));
    EXPECT_EQ(launch_clustered(dim3(8), dim3(3), out), cudaErrorInvalidClusterSize);
    EXPECT_EQ(launch_clustered(dim3(16), dim3(16), out), cudaErrorInvalidClusterSize);
  }
  cudaGetLastError();
  EXPECT_EQ(cudaFree(out), cudaSuccess);
}

TEST_F(Runtime, AnErrorStaysWithItsThreadUntilItIsTaken) {
  EXPECT_EQ(cudaSetDevice(3), cudaErrorInvalidDevice);
  std::thread([] { EXPECT_EQ(cudaGetLastError(), cudaSuccess); }).join();
  EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);  // which does not take it
  const cudaError_t error = cudaGetLastError();
  EXPECT_EQ(error, cudaErrorInvalidDevice);
  EXPECT_STREQ(cudaGetErrorName(error), "cudaErrorInvalidDevice");
  EXPECT_STREQ(cudaGetErrorString(error), "invalid device ordinal: device 3 of 1");
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(Runtime, AKernelThatWritesOutOfBoundsCorruptsTheProcess) {
  {
    const Floats x(40);
    x.write(std::vector<float>(40, 0));
    EXPECT_EQ(launch_add_one_unchecked({dim3(1), dim3(64)}, x.data), cudaErrorIllegalAddress);
    const std::string text = cudaGetErrorString(cudaErrorIllegalAddress);
    EXPECT_TRUE(says(text, "an illegal memory access was encountered: ")) << text;
    EXPECT_TRUE(says(text, "kernels_test.cu:")) << text;
    // Every later call fails, on every thread, and nothing takes the error away.
    EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
    EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
    void* pointer = nullptr;
    EXPECT_EQ(cudaMalloc(&pointer, 1), cudaErrorIllegalAddress);
    EXPECT_EQ(launch_add_one({dim3(1), dim3(1)}, x.data, 1), cudaErrorIllegalAddress);
    std::thread([] { EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaErrorIllegalAddress); }).join();
  }
  EXPECT_TRUE(says(forget_problems(), "add_one_unchecked"));
  EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
}

TEST_F(Runtime, CopiesStayWithinTheirMemory) {
  const Floats x(16);
  std::vector<float> host(32, 0);
  EXPECT_EQ(cudaMemcpy(x.data, host.data(), 17 * sizeof(float), cudaMemcpyHostToDevice),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host.data(), x.data + 8, 9 * sizeof(float), cudaMemcpyDeviceToHost),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host.data(), x.data, sizeof(float), cudaMemcpyHostToDevice),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(x.data, x.data, sizeof(float), cudaMemcpyHostToDevice),
            cudaErrorInvalidMemcpyDirection);
  EXPECT_EQ(cudaMemsetAsync(x.data, 0, 17 * sizeof(float), nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemsetAsync(x.data, 0, 16 * sizeof(float), nullptr), cudaSuccess);
  EXPECT_EQ(x.read(), std::vector<float>(16, 0));
  cudaGetLastError();
}

TEST_F(Runtime, FreshMemoryIsNaN) {
  const Floats x(4);
  for (const float value : x.read()) EXPECT_TRUE(value != value);
}

TEST_F(Runtime, MemoryIsFreedOnceAndWhatIsNotIsTold) {
  void* pointer = nullptr;
  ASSERT_EQ(cudaMalloc(&pointer, 12345), cudaSuccess);
  const std::vector<std::string> leaks = Device::get().memory().leaks();
  ASSERT_EQ(leaks.size(), 1u);
  EXPECT_TRUE(says(leaks[0], "12345")) << leaks[0];
  EXPECT_EQ(cudaFree(pointer), cudaSuccess);
  EXPECT_EQ(cudaFree(pointer), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(nullptr), cudaSuccess);
  cudaGetLastError();
}

TEST_F(Runtime, MemoryEnds) {
  void* pointer = nullptr;
  EXPECT_EQ(cudaMalloc(&pointer, chip().memory_bytes + 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
}

TEST_F(Runtime, OnlyTheDefaultStreamsAreThere) {
  int somewhere = 0;
  const auto stream = reinterpret_cast<cudaStream_t>(&somewhere);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(launch_add_one({dim3(1), dim3(1)}, nullptr, 0, stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(launch_add_one({dim3(1), dim3(1)}, nullptr, 0, cudaStreamPerThread), cudaSuccess);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  EXPECT_EQ(cudaStreamIsCapturing(nullptr, &status), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusNone);
}

TEST_F(Runtime, DescribesTheChip) {
  int value = 0;
  EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
  EXPECT_EQ(value, chip().multiprocessors);
  EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrClusterLaunch, 0), cudaSuccess);
  EXPECT_EQ(value, chip().architecture >= 90 ? 1 : 0);
  EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrPciBusId, 0), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  cudaDeviceProp properties;
  EXPECT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
  EXPECT_EQ(10 * properties.major + properties.minor, chip().architecture);
  cudaFuncAttributes attributes;
  EXPECT_EQ(cudaFuncGetAttributes(&attributes, with_shared()), cudaSuccess);
  EXPECT_EQ(attributes.ptxVersion, chip().architecture);
  EXPECT_EQ(cudaFuncGetAttributes(&attributes, &properties), cudaErrorInvalidDeviceFunction);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDeviceFunction);
}

TEST_F(Runtime, EncodesTensorMaps) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult result;
  EXPECT_EQ(
      cudaGetDriverEntryPointByVersion("cuNothing", &entry, 12000, cudaEnableDefault, &result),
      cudaSuccess);
  EXPECT_EQ(result, cudaDriverEntryPointSymbolNotFound);
  EXPECT_EQ(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                             cudaEnableDefault, &result),
            cudaSuccess);
  ASSERT_EQ(result, cudaDriverEntryPointSuccess);
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  alignas(64) CUtensorMap map;
  alignas(16) static char data[4096];
  const auto call = [&](cuuint64_t stride, cuuint32_t step) {
    const cuuint64_t sizes[] = {64, 8}, strides[] = {stride};
    const cuuint32_t box[] = {64, 4}, steps[] = {1, step};
    return encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data, sizes, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  EXPECT_EQ(call(160, 1), CUDA_SUCCESS);
  TensorMap decoded;
  ASSERT_TRUE(decode_tensor_map(&map, &decoded));
  EXPECT_EQ(decoded.address, reinterpret_cast<uint64_t>(data));
  EXPECT_EQ(decoded.element_bytes, 2u);
  EXPECT_EQ(decoded.strides[1], 160u);
  EXPECT_EQ(decoded.box[1], 4u);
  EXPECT_EQ(decoded.swizzle, Swizzle::k128);
  EXPECT_EQ(call(130, 1), CUDA_ERROR_INVALID_VALUE);  // not a multiple of 16
  EXPECT_EQ(call(160, 2), CUDA_ERROR_NOT_SUPPORTED);
}

}  // namespace
}  // namespace fk::softgpu
