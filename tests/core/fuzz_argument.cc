// Tensor arguments of hostile calls.
#include <cstring>

#include "fuzz_abi.h"

namespace fk::fuzz {
namespace {

DLDataType dlpack_dtype(DType dtype) {
  const auto bits = static_cast<uint8_t>(8 * size_of(dtype));
  switch (dtype) {
    case DType::kFloat8E4M3:
      return {FLASHKERNEL_DL_FLOAT8_E4M3FN, bits, 1};
    case DType::kBFloat16:
      return {kDLBfloat, bits, 1};
    case DType::kInt32:
    case DType::kInt64:
      return {kDLInt, bits, 1};
    default:
      return {kDLFloat, bits, 1};
  }
}

}  // namespace

void Argument::set(DType dtype, const std::vector<int64_t>& sizes,
                   const std::vector<int64_t>& steps) {
  is_present = true;
  tensor.device = {kDLCPU, 0};
  tensor.ndim = static_cast<int32_t>(sizes.size());
  tensor.dtype = dlpack_dtype(dtype);
  std::copy(sizes.begin(), sizes.end(), shape.begin());
  std::copy(steps.begin(), steps.end(), strides.begin());
  tensor.shape = shape.data();
  tensor.strides = strides.data();
}

bool Argument::reach(int64_t* below, int64_t* above) const {
  int64_t count = 1;
  *below = *above = 0;
  if (tensor.ndim < 0 || tensor.ndim > kMaxRank) return false;
  int64_t without_gaps = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    const int64_t size = shape[static_cast<size_t>(i)];
    if (size <= 0) {
      *below = *above = -1;  // no element
      return size == 0;
    }
    const int64_t stride =
        tensor.strides == nullptr ? without_gaps : strides[static_cast<size_t>(i)];
    int64_t span;
    if (__builtin_mul_overflow(count, size, &count) || count > kMostElements) return false;
    if (__builtin_mul_overflow(size - 1, stride, &span)) return false;
    if (span < -kMostElements || span > kMostElements) return false;
    (span < 0 ? *below : *above) += span < 0 ? -span : span;
    without_gaps *= size;
  }
  return *below + *above < kMostElements;
}

void Argument::spoil(Random* random) {
  DLTensor& t = tensor;
  const auto rank = static_cast<size_t>(std::clamp(t.ndim, 0, kMaxRank - 1));
  const size_t d = rank > 0 ? random->below(rank) : 0;
  switch (random->below(15)) {
    case 0:
      __builtin_add_overflow(shape[d], random->one_in(2) ? 1 : -1, &shape[d]);
      break;
    case 1:
      shape[d] = random->size();
      break;
    case 2:
      shape[d] = random->between(0, 2);
      break;
    case 3:  // a dimension less
      if (rank == 0) break;
      for (size_t k = d; k + 1 < rank; ++k) shape[k] = shape[k + 1];
      t.ndim = static_cast<int32_t>(rank) - 1;
      t.strides = nullptr;
      break;
    case 4:  // a dimension more
      for (size_t k = rank; k > d; --k) shape[k] = shape[k - 1];
      shape[d] = random->between(1, 2);
      t.ndim = static_cast<int32_t>(rank) + 1;
      t.strides = nullptr;
      break;
    case 5: {
      static constexpr int32_t kRanks[] = {-1, 0, 8, 9, 10, 1 << 20, INT32_MAX, INT32_MIN};
      t.ndim = random->pick(kRanks);
      break;
    }
    case 6:
      strides[d] = random->size();
      break;
    case 7:
      strides[d] = random->one_in(2) ? 0 : static_cast<int64_t>(-static_cast<uint64_t>(strides[d]));
      break;
    case 8:
      t.strides = nullptr;
      break;
    case 9:
      t.dtype = {static_cast<uint8_t>(random->below(20)),
                 static_cast<uint8_t>(8 << random->below(5)),
                 static_cast<uint16_t>(random->below(3))};
      break;
    case 10: {
      const auto type = static_cast<int32_t>(random->between(-1, 20));
      std::memcpy(&t.device.device_type, &type, sizeof type);
      t.device.device_id = static_cast<int32_t>(random->between(-2, 2));
      break;
    }
    case 11: {
      static constexpr uint64_t kOffsets[] = {
          1, 2, 3, 4, 8, uint64_t{1} << 40, uint64_t{1} << 56, uint64_t{1} << 58, UINT64_MAX};
      t.byte_offset = random->pick(kOffsets);
      break;
    }
    case 12:
      loses_data = true;
      break;
    case 13:
      t.shape = nullptr;
      break;
    default:
      is_present = !is_present;
      break;
  }
}

size_t Argument::provide() {
  int64_t below, above;
  const uint64_t offset = tensor.byte_offset;
  is_right = reach(&below, &above) && offset <= 8 && tensor.shape != nullptr;
  tensor.data = nullptr;
  if (!is_right) return 0;
  const int64_t elements = below < 0 ? 0 : below + above + 1;
  const auto bytes = static_cast<size_t>(elements * item()) + (elements > 0 ? offset : 0);
  memory.reset(new char[bytes]);
  if (!loses_data) tensor.data = memory.get();
  if (below > 0) tensor.byte_offset += static_cast<uint64_t>(below * item());
  return bytes;
}

void Argument::share_with(Argument* other) const {
  int64_t below, above, other_below, other_above;
  if (!is_present || !other->is_present || memory == nullptr || other->memory == nullptr) return;
  if (!reach(&below, &above) || !other->reach(&other_below, &other_above)) return;
  if (tensor.byte_offset != 0 || other->tensor.byte_offset != 0 || other_below != 0) return;
  if ((other_above + 1) * other->item() <= (above + 1) * item()) other->tensor.data = tensor.data;
}

void run_backwards(void*, int64_t count, int64_t grain, fk_range_body body, void* context) {
  grain = std::max<int64_t>(grain, 1);
  for (int64_t begin = (count - 1) / grain * grain; begin >= 0; begin -= grain) {
    body(begin, std::min(count, begin + grain), context);
  }
}

}  // namespace fk::fuzz
