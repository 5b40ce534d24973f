// Packs panels. It runs once for each weight, so plain loops do; the conversion of a panel's
// columns to float, which knows dtypes and strides, is the products' own.
#include "cpu/gemm/panels.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/gemm/multiply.h"

namespace fk::cpu {
namespace {

// Rounds to nearest, ties to even.
uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Returns the cell of `count` numbers; those that it lacks are 0.
uint32_t cell_of(const float* x, int64_t count, DType dtype, float inverse) {
  uint32_t cell = 0;
  if (dtype == DType::kFloat32) {
    if (count > 0) std::memcpy(&cell, x, 4);
  } else if (dtype == DType::kBFloat16) {
    for (int64_t i = 0; i < count; ++i) cell |= uint32_t{to_bfloat16(x[i])} << (16 * i);
  } else {
    for (int64_t i = 0; i < 4; ++i) {
      const float code = i < count ? std::nearbyint(x[i] * inverse) : 0.0f;
      cell |= static_cast<uint32_t>(static_cast<int32_t>(code) + 128) << (8 * i);
    }
  }
  return cell;
}

// Computes the scale of a column, and `inverse`, by which its numbers are multiplied to become
// codes. Returns false if a number is not finite.
bool find_scale(const float* x, int64_t count, float* scale, float* inverse) {
  float most = 0;
  bool finite = true;
  for (int64_t k = 0; k < count; ++k) {
    finite = finite && std::isfinite(x[k]);
    most = std::max(most, std::fabs(x[k]));
  }
  *scale = most / 127.0f;
  *inverse = 127.0f / most;
  if (!std::isfinite(*inverse)) *inverse = 0;
  return finite;
}

}  // namespace

bool pack_panels(const Tensor& weight, const Panels& out, const Exec& exec) {
  std::atomic<bool> finite{true};
  const int64_t count = (padded_columns(out.columns) + out.panel - 1) / out.panel;
  const int64_t stride = padded_columns(out.depth), in_cell = Panels::in_cell(out.dtype);
  const int64_t workers = std::min(worker_limit(), count);
  std::vector<float> all_rows(static_cast<size_t>(workers * stride * out.panel));
  std::vector<float> all_inverses(static_cast<size_t>(workers * out.panel));
  run_on_workers(exec, workers, count, [&](int64_t worker, int64_t item) {
    float* const rows = all_rows.data() + worker * stride * out.panel;
    float* const inverses = all_inverses.data() + worker * out.panel;
    const int64_t first = item * out.panel, width = out.width_of(first);
    const int64_t columns = std::min(width, out.columns - first);
    Tensor part = weight;
    part.data = weight.ptr<char>() + first * weight.stride(0) * size_of(weight.dtype);
    part.shape[0] = columns;
    copy_rows(part, rows);
    for (int64_t c = 0; out.dtype == DType::kInt8 && c < width; ++c) {
      const int64_t numbers = c < columns ? out.depth : 0;
      if (!find_scale(rows + c * stride, numbers, out.scales + first + c, inverses + c)) {
        finite = false;
      }
    }
    if (!finite) return;
    auto* to = const_cast<uint32_t*>(out.at(first, 0));
    for (int64_t k = 0; k < out.depth; k += in_cell, to += width) {
      const int64_t numbers = std::min(in_cell, out.depth - k);
      for (int64_t c = 0; c < width; ++c) {
        to[c] = cell_of(rows + c * stride + k, c < columns ? numbers : 0, out.dtype, inverses[c]);
      }
    }
  });
  return finite;
}

}  // namespace fk::cpu
