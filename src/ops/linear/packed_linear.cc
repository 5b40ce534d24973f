#include "ops/linear/packed_linear.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string>
#include <string_view>

#include "core/kept_memory.h"
#include "core/last_error.h"
#include "core/overlap.h"
#include "core/rows.h"
#include "core/thread_pool.h"
#include "cpu/gemm/multiply.h"
#include "flashkernel/linear.h"

namespace fk {
namespace {

// Integer sums over more than this could overflow.
constexpr int64_t kMostInt8 = 1 << 17;

bool is_float(DType t) {
  return t == DType::kFloat32 || t == DType::kFloat16 || t == DType::kBFloat16;
}

Status expect(const char* name, const char* what, const std::string& got) {
  return invalid(std::string(name) + ": expected " + what + ", got " + got);
}

Status named(const char* name, const Status& status) {
  return status.ok() ? Status()
                     : Status(status.code(), std::string(name) + ": " + status.message());
}

// The caller's way to run, or one on the process's own threads.
fk_exec with_threads(const fk_exec* given) {
  fk_exec exec = FK_EXEC_DEFAULTS;
  if (given != nullptr) exec = *given;
  if (exec.parallel_for == nullptr) exec.parallel_for = pool_parallel_for;
  return exec;
}

Status check_array(const char* name, const Tensor& t) {
  if (t.device != Device::kCpu) return expect(name, "a tensor on the CPU", "one on a GPU");
  if (!is_float(t.dtype)) return expect(name, "float32, float16 or bfloat16", name_of(t.dtype));
  return {};
}

// Memory that calls of a thread share, so that a call for a single row does not wait for the system
// to hand out pages. What a large call needed is given back, and every call's where a sanitizer
// watches.
class ThreadWorkspace {
 public:
  ~ThreadWorkspace() { std::free(memory_); }
  void* of(size_t bytes) {
    if (bytes <= size_ && !kMemoryIsWatched) return memory_;
    release();
    memory_ = KeptMemory::allocate(bytes);
    if (memory_ != nullptr) size_ = bytes;
    return memory_;
  }
  void shrink() {
    constexpr size_t kKept = size_t{8} << 20;
    if (size_ > kKept) release();
  }

 private:
  void release() {
    std::free(memory_);
    memory_ = nullptr;
    size_ = 0;
  }
  void* memory_ = nullptr;
  size_t size_ = 0;
};

}  // namespace

void PackedLinear::Free::operator()(void* memory) const { std::free(memory); }

int64_t PackedLinear::bytes() const { return panels_.cell_bytes() + panels_.scale_bytes(); }

Status PackedLinear::make(const Tensor& weight, const Tensor& bias, DType dtype,
                          Activation activation, std::unique_ptr<PackedLinear>* made) {
  FK_RETURN_IF_ERROR(check_array("weight", weight));
  if (weight.ndim != 2) return expect("weight", "shape (out, in)", shape_string(weight));
  const int64_t out = weight.size(0), in = weight.size(1);
  if (dtype == DType::kInt8 && in > kMostInt8) {
    return expect("weight", "at most 131072 columns for int8", std::to_string(in));
  }
  std::unique_ptr<PackedLinear> p(new PackedLinear());
  p->activation_ = activation;
  if (bias) {
    FK_RETURN_IF_ERROR(check_array("bias", bias));
    if (bias.ndim != 1 || bias.size(0) != out) {
      return expect("bias", ("shape (" + std::to_string(out) + ",) to fit weight").c_str(),
                    shape_string(bias));
    }
  }
  p->panels_ = {dtype, in, out, cpu::panel_columns()};
  void* memory = KeptMemory::allocate(static_cast<size_t>(std::max<int64_t>(p->bytes(), 1)));
  if (memory == nullptr) return {FK_INTERNAL, "out of memory"};
  p->memory_.reset(memory);
  p->panels_.cells = memory;
  p->panels_.scales =
      reinterpret_cast<float*>(static_cast<char*>(memory) + p->panels_.cell_bytes());
  if (bias) {
    p->bias_.resize(static_cast<size_t>(cpu::padded_columns(out)));
    cpu::copy_rows(bias, p->bias_.data());
    p->bias_tensor_ = bias;
    p->bias_tensor_.data = p->bias_.data();
    p->bias_tensor_.dtype = DType::kFloat32;
    p->bias_tensor_.strides[0] = 1;
  }
  if (!cpu::pack_panels(weight, p->panels_, Exec(with_threads(nullptr)))) {
    return expect("weight", "finite numbers for int8", "some that are not");
  }
  *made = std::move(p);
  return {};
}

Status PackedLinear::check(const Tensor& x, const Tensor& y) const {
  FK_RETURN_IF_ERROR(check_array("x", x));
  if (x.ndim < 1 || x.size(-1) != in()) {
    return expect("x", ("shape (..., " + std::to_string(in()) + ") to fit the weight").c_str(),
                  shape_string(x));
  }
  if (y.device != Device::kCpu || y.dtype != x.dtype) {
    return expect("y", "x's device and dtype", name_of(y.dtype));
  }
  const bool same = y.ndim == x.ndim && std::equal(x.shape, x.shape + x.ndim - 1, y.shape);
  if (!same || y.size(-1) != out()) {
    return expect("y", ("x's shape with " + std::to_string(out()) + " last").c_str(),
                  shape_string(y));
  }
  const int dim = repeated_dim(y);
  if (dim >= 0) {
    return expect(
        "y", "an output without repeated elements",
        "stride " + std::to_string(y.strides[dim]) + " in dimension " + std::to_string(dim));
  }
  if (overlap(x, y)) return expect("y", "memory of its own", "some of x's");
  return {};
}

Status PackedLinear::call(const Tensor& x, const Tensor& y, const fk_exec& given) const {
  FK_RETURN_IF_ERROR(check(x, y));
  if (y.numel() == 0) return {};
  static thread_local ThreadWorkspace memory;
  LinearFwd a;
  a.x = x;
  a.y = y;
  a.bias = bias_tensor_;
  a.activation = static_cast<int64_t>(activation_);
  fk_exec exec = given;
  exec.workspace = memory.of(std::max<size_t>(cpu::packed_workspace(a, panels_), 1));
  if (exec.workspace == nullptr) return {FK_INTERNAL, "out of memory"};
  cpu::run_packed(a, panels_, Exec(exec));
  memory.shrink();
  return {};
}

}  // namespace fk

struct fk_packed_linear {
  std::unique_ptr<fk::PackedLinear> layer;
};

extern "C" {

fk_status fk_packed_linear_open(const DLTensor* weight, const DLTensor* bias, const char* dtype,
                                const char* activation, fk_packed_linear** packed) {
  return fk::guarded("PackedLinear", [&]() -> fk::Status {
    if (weight == nullptr) return fk::null("weight");
    if (packed == nullptr) return fk::null("packed");
    fk::Tensor w, b;
    FK_RETURN_IF_ERROR(fk::named("weight", fk::from_dlpack(*weight, true, &w)));
    if (bias != nullptr) FK_RETURN_IF_ERROR(fk::named("bias", fk::from_dlpack(*bias, true, &b)));
    using fk::DType;
    DType kind = w.dtype == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat32;
    if (dtype != nullptr) {
      constexpr DType kKept[] = {DType::kFloat32, DType::kBFloat16, DType::kInt8};
      const auto same = [&](DType kept) { return std::string_view(fk::name_of(kept)) == dtype; };
      const DType* found = std::find_if(std::begin(kKept), std::end(kKept), same);
      if (found == std::end(kKept)) {
        return fk::expect("dtype", "float32, bfloat16 or int8", dtype);
      }
      kind = *found;
    }
    const std::vector<std::string> names = fk::activation_names();
    const auto found =
        std::find(names.begin(), names.end(), activation == nullptr ? "" : activation);
    if (found == names.end()) return fk::expect("activation", "one of linear's", activation);
    auto made = std::make_unique<fk_packed_linear>();
    FK_RETURN_IF_ERROR(fk::PackedLinear::make(
        w, b, kind, static_cast<fk::Activation>(found - names.begin()), &made->layer));
    *packed = made.release();
    return {};
  });
}

void fk_packed_linear_close(fk_packed_linear* packed) { delete packed; }

int64_t fk_packed_linear_bytes(const fk_packed_linear* packed) {
  return packed == nullptr ? 0 : packed->layer->bytes();
}

fk_status fk_packed_linear_call(const fk_packed_linear* packed, const DLTensor* x, DLTensor* y,
                                const fk_exec* exec) {
  return fk::guarded("PackedLinear", [&]() -> fk::Status {
    if (packed == nullptr) return fk::null("packed");
    if (x == nullptr) return fk::null("x");
    if (y == nullptr) return fk::null("y");
    fk::Tensor in, out;
    FK_RETURN_IF_ERROR(fk::named("x", fk::from_dlpack(*x, true, &in)));
    FK_RETURN_IF_ERROR(fk::named("y", fk::from_dlpack(*y, true, &out)));
    return packed->layer->call(in, out, fk::with_threads(exec));
  });
}

}  // extern "C"
