#include "softgpu/runtime/call_memory.h"

#include <cstdint>
#include <mutex>

#include "softgpu/runtime/device.h"

namespace fk::softgpu {

ByteRange range_of(const DLTensor& tensor) {
  int64_t first = 0, last = 0;  // of the elements, from the tensor's address
  int64_t packed = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] == 0) return {};
    const int64_t stride = tensor.strides == nullptr ? packed : tensor.strides[i];
    packed *= tensor.shape[i];
    (stride < 0 ? first : last) += (tensor.shape[i] - 1) * stride;
  }
  const int64_t element = (int64_t{tensor.dtype.bits} * tensor.dtype.lanes + 7) / 8;
  char* data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  return {data + first * element, static_cast<size_t>((last - first + 1) * element)};
}

CallMemory::~CallMemory() {
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  for (const ByteRange& range : ranges_) device.memory().remove_external(range.begin, range.bytes);
}

void CallMemory::add(const ByteRange& range, const std::string& what, bool writable) {
  Device& device = Device::get();
  const std::lock_guard<std::mutex> lock(device.mutex);
  if (range.bytes == 0 || device.memory().is_allocated(range.begin)) return;
  device.memory().add_external(range.begin, range.bytes, what, writable);
  ranges_.push_back(range);
}

}  // namespace fk::softgpu
