// Sequences along the steps of a tensor (B, L, D), as scans, convolutions and recurrent ops read
// them: a row of the batch each, or packed one after another in one row.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/tensor.h"

namespace fk {

// The steps [begin, end) of a row of the batch that a sequence has.
struct SequenceSteps {
  int64_t batch;
  int64_t begin, end;
};

struct Sequences {
  bool packed = false;               // otherwise every row of the batch is a sequence
  const int32_t* offsets = nullptr;  // where packed sequences begin along L, in device memory on a
                                     // GPU; NULL as well in a query without data
  int64_t offsets_stride = 0;
  int64_t count = 0;
  int64_t length = 0;  // L

  // On a GPU the offsets may be anything. Whatever they say, steps stay inside the tensors.
  FK_HOST_DEVICE SequenceSteps operator[](int64_t s) const {
    if (!packed) return {s, 0, length};
    const int64_t begin = clamp(offsets[s * offsets_stride]);
    const int64_t end = clamp(offsets[(s + 1) * offsets_stride]);
    return {0, begin, end > begin ? end : begin};
  }

 private:
  FK_HOST_DEVICE int64_t clamp(int64_t x) const { return x < 0 ? 0 : x > length ? length : x; }
};

inline Sequences sequences_of(const Tensor& x, const Tensor& cu_seqlens) {
  Sequences s;
  s.length = x.size(1);
  s.count = x.size(0);
  if (cu_seqlens) {
    s.packed = true;
    s.offsets = cu_seqlens.ptr<const int32_t>();
    s.offsets_stride = cu_seqlens.stride(0);
    s.count = cu_seqlens.size(0) - 1;
  }
  return s;
}

// A tensor (B, L, D) as (batch, step, channel), strides in elements.
struct StepView {
  void* data = nullptr;  // NULL where there is no such tensor
  DType dtype = DType::kFloat32;
  int64_t batch = 0, step = 0, channel = 0;
};

inline StepView step_view(const Tensor& t) {
  if (!t) return {};
  return {t.data, t.dtype, t.stride(0), t.stride(1), t.stride(2)};
}

}  // namespace fk
