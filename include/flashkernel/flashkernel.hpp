// FlashKernel's C++ API: the C ABI with defaults, exceptions and a tensor view that owns its shape.
//
//   std::vector<float> x(rows * cols), y(rows * cols);
//   fk::View xv(x.data(), {rows, cols}), yv(y.data(), {rows, cols});
//   fk::RmsNormFwd args;
//   args.x = xv;
//   args.y = yv;
//   fk::rms_norm_fwd(args);
#pragma once

#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "flashkernel/abi.h"

namespace fk {

// Thrown by every call that does not return FK_OK, and by a View that cannot be.
class Error : public std::invalid_argument {
 public:
  Error(fk_status status, const std::string& message)
      : std::invalid_argument(message), status_(status) {}
  fk_status status() const { return status_; }

 private:
  fk_status status_;
};

// DLPack's dtype of a C++ type. float16, bfloat16 and float8_e4m3fn have no C++ type: give their
// DLDataType.
template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DLDataType value = {kDLFloat, 32, 1};
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DLDataType value = {kDLInt, 32, 1};
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DLDataType value = {kDLInt, 64, 1};
};
constexpr DLDataType kFloat16 = {kDLFloat, 16, 1};
constexpr DLDataType kBFloat16 = {kDLBfloat, 16, 1};
constexpr DLDataType kFloat8E4M3 = {FLASHKERNEL_DL_FLOAT8_E4M3FN, 8, 1};

// A borrowed tensor. The memory is the caller's; the shape and strides live in the view.
class View {
 public:
  template <class T>
  View(T* data, std::vector<int64_t> shape, DLDevice device = {kDLCPU, 0})
      : View(const_cast<void*>(static_cast<const void*>(data)),
             DTypeOf<std::remove_const_t<T>>::value, std::move(shape), {}, device) {}

  // Strides in elements; empty: row-major contiguous.
  View(void* data, DLDataType dtype, std::vector<int64_t> shape, std::vector<int64_t> strides = {},
       DLDevice device = {kDLCPU, 0})
      : shape_(std::move(shape)), strides_(std::move(strides)) {
    if (!strides_.empty() && strides_.size() != shape_.size()) {
      throw Error(FK_INVALID_ARGUMENT, "View: strides: expected " + std::to_string(shape_.size()) +
                                           ", one for each dimension, got " +
                                           std::to_string(strides_.size()));
    }
    tensor_.data = data;
    tensor_.device = device;
    tensor_.ndim = static_cast<int32_t>(shape_.size());
    tensor_.dtype = dtype;
    tensor_.shape = shape_.data();
    tensor_.strides = strides_.empty() ? nullptr : strides_.data();
    tensor_.byte_offset = 0;
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  operator const DLTensor*() const { return &tensor_; }

 private:
  std::vector<int64_t> shape_, strides_;
  DLTensor tensor_;
};

// Where a call runs. Without a workspace, CPU calls take what they need from the heap for the
// duration of the call; CUDA calls must be given theirs (fk_op_workspace says how much).
struct Run {
  void* stream = nullptr;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  bool deterministic = false;
};

namespace detail {

struct HeapWorkspace {
  void* memory = nullptr;
  ~HeapWorkspace() { std::free(memory); }
  static void* allocate(void* self, size_t bytes) {
    auto* heap = static_cast<HeapWorkspace*>(self);
    heap->memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    return heap->memory;
  }
};

inline void call(const fk_op* op, const fk_slot* slots, const Run& run) {
  fk_exec exec = FK_EXEC_DEFAULTS;
  exec.stream = run.stream;
  exec.workspace = run.workspace;
  exec.workspace_bytes = run.workspace_bytes;
  exec.deterministic = run.deterministic;
  HeapWorkspace heap;
  // Every op's first slot is a tensor; it says where the call runs. Pinned memory is the CPU's.
  const DLTensor* first = slots[0].tensor;
  if (first != nullptr &&
      (first->device.device_type == kDLCPU || first->device.device_type == kDLCUDAHost)) {
    exec.allocate = HeapWorkspace::allocate;
    exec.allocator = &heap;
  }
  const fk_status status = fk_op_call(op, slots, &exec);
  if (status != FK_OK) throw Error(status, fk_last_error());
}

}  // namespace detail
}  // namespace fk

#include "flashkernel/ops.hpp"
