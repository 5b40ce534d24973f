// A linear layer whose weight is packed once, for many calls without a gradient on the CPU: in
// float32, in bfloat16 (half the memory), or in int8 with a scale for each row of the weight (a
// quarter), where each row of x is quantized too, with a scale of its own.
#pragma once

#include <memory>
#include <vector>

#include "core/exec.h"
#include "cpu/gemm/panels.h"
#include "ops/linear/linear.h"

namespace fk {

class PackedLinear {
 public:
  // `weight` is (out, in) and `bias`, which may be undefined, (out), both of any float dtype and
  // strides. Both are copied.
  static Status make(const Tensor& weight, const Tensor& bias, DType dtype, Activation activation,
                     std::unique_ptr<PackedLinear>* made);

  // y = act(x W^T + bias); x is (..., in), and y, of x's dtype, (..., out). Any number of threads
  // may call at once.
  Status call(const Tensor& x, const Tensor& y, const fk_exec& exec) const;

  int64_t in() const { return panels_.depth; }
  int64_t out() const { return panels_.columns; }
  int64_t bytes() const;

 private:
  struct Free {
    void operator()(void* memory) const;
  };

  PackedLinear() = default;
  Status check(const Tensor& x, const Tensor& y) const;

  cpu::Panels panels_;
  std::unique_ptr<void, Free> memory_;
  std::vector<float> bias_;
  Tensor bias_tensor_;
  Activation activation_ = Activation::kNone;
};

namespace cpu {
// The forward of a product with `weight` in a.weight's place.
size_t packed_workspace(const LinearFwd& a, const Panels& weight);
void run_packed(const LinearFwd& a, const Panels& weight, const Exec& exec);
}  // namespace cpu

}  // namespace fk
