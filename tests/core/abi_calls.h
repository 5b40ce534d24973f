// Calls through the C ABI, as every binding makes them: tensors and slots for tests.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "core/op.h"
#include "flashkernel/abi.h"

namespace fk::test {

inline constexpr DLDataType kF32 = {kDLFloat, 32, 1};
inline constexpr DLDataType kF64 = {kDLFloat, 64, 1};
inline constexpr DLDataType kF16 = {kDLFloat, 16, 1};
inline constexpr DLDataType kI32 = {kDLInt, 32, 1};
inline constexpr DLDataType kI64 = {kDLInt, 64, 1};

// A tensor with memory of its own, zero at first.
class Array {
 public:
  Array(std::initializer_list<int64_t> shape, DLDataType dtype = kF32) : shape_(shape) {
    int64_t count = 1;
    for (int64_t size : shape) count *= size;
    bytes_.resize(count * dtype.bits / 8 + 1);
    tensor_.data = bytes_.data();
    tensor_.device = {kDLCPU, 0};
    tensor_.ndim = static_cast<int32_t>(shape.size());
    tensor_.dtype = dtype;
    tensor_.shape = shape_.data();
  }
  Array(const Array&) = delete;

  DLTensor& tensor() { return tensor_; }
  template <class T = float>
  T* data() {
    return reinterpret_cast<T*>(bytes_.data());
  }

 private:
  std::vector<int64_t> shape_;
  std::vector<char> bytes_;
  DLTensor tensor_{};
};

// An op's slots by name, attributes at their defaults.
class Call {
 public:
  explicit Call(const char* op) : op_(fk_find_op(op)) {
    for (const fk::Field& f : op_->declaration.fields) {
      fk_slot slot{};
      if (f.kind == fk::Kind::kNumber) {
        slot.number = f.number_default;
      } else if (f.kind != fk::Kind::kInput && f.kind != fk::Kind::kOutput) {
        slot.integer = f.integer_default;
      }
      slots_.push_back(slot);
    }
  }

  fk_slot& operator[](const char* name) { return slots_[op_->declaration.find(name)]; }
  Call& with(const char* name, Array& array) {
    (*this)[name].tensor = &array.tensor();
    return *this;
  }

  // "" where the call succeeds, otherwise the message.
  std::string operator()(const fk_exec* exec = nullptr, fk_status code = FK_INVALID_ARGUMENT) {
    const fk_status status = fk_op_call(op_, slots_.data(), exec);
    if (status == FK_OK) return "";
    EXPECT_EQ(status, code);
    return fk_last_error();
  }

  const fk_op* op() const { return op_; }
  const fk_slot* slots() const { return slots_.data(); }

 private:
  const fk_op* op_;
  std::vector<fk_slot> slots_;
};

// A call of rms_norm that succeeds, for tests to spoil.
class RmsNorm : public testing::Test {
 protected:
  RmsNorm() {
    call_.with("x", x_).with("y", y_);
    for (int i = 0; i < 8; ++i) x_.data()[i] = static_cast<float>(i - 3);
  }

  Array x_{{2, 4}}, y_{{2, 4}};
  Call call_{"rms_norm_fwd"};
};

}  // namespace fk::test
