// Copies a call's index tensors to the host and points its arguments at the copies.
#include <utility>

#include "cuda/indices_on_host.h"
#include "cuda/launch.h"

namespace fk::cuda {

IndicesOnHost::IndicesOnHost(const OpDeclaration& op, void* args, int device, void* stream)
    : status_(move_all(op, static_cast<char*>(args), device, static_cast<cudaStream_t>(stream))) {}

Status IndicesOnHost::move_all(const OpDeclaration& op, char* args, int device,
                               cudaStream_t stream) {
  std::vector<Tensor*> indices;
  for (const Field& f : op.fields) {
    if (f.kind != Kind::kInput) continue;
    auto* t = reinterpret_cast<Tensor*>(args + f.offset);
    const bool is_index = t->dtype == DType::kInt32 || t->dtype == DType::kInt64;
    if (*t && is_index && t->numel() > 0) indices.push_back(t);
  }
  if (indices.empty()) return {};
  const DeviceGuard guard(device);
  FK_RETURN_IF_ERROR(guard.status());
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  FK_RETURN_IF_ERROR(check(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing"));
  if (capture != cudaStreamCaptureStatusNone) return {};
  FK_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream), "cudaStreamSynchronize"));
  for (Tensor* t : indices) FK_RETURN_IF_ERROR(move(t));
  return {};
}

// Copies all memory from the tensor's first to its last element in one piece, gaps included, so
// that the strides stay as they are.
Status IndicesOnHost::move(Tensor* t) {
  int64_t first = 0, last = 0;  // offsets from t->data, in elements
  for (int i = 0; i < t->ndim; ++i) {
    const int64_t reach = (t->shape[i] - 1) * t->strides[i];
    (reach < 0 ? first : last) += reach;
  }
  const int64_t size = size_of(t->dtype);
  Moved moved{t, *t, std::vector<char>(static_cast<size_t>((last - first + 1) * size))};
  FK_RETURN_IF_ERROR(check(cudaMemcpy(moved.copy.data(), t->ptr<const char>() + first * size,
                                      moved.copy.size(), cudaMemcpyDeviceToHost),
                           "cudaMemcpy to the host"));
  t->device = Device::kCpu;
  t->data = moved.copy.data() - first * size;
  moved_.push_back(std::move(moved));
  return {};
}

IndicesOnHost::~IndicesOnHost() {
  for (const Moved& moved : moved_) *moved.tensor = moved.original;
}

}  // namespace fk::cuda
