// Serves the custom calls that Elixir's EXLA makes. EXLA tells XLA nothing about the layout of
// operands, and XLA's compiler for GPUs then may hand over transposed memory. So Elixir passes
// every tensor flat, and its shape as an attribute:
//   operand_shapes   for each input that is present: its dtype, its rank, its sizes
//   result_shapes    the same for each output
// Nx has no empty tensors: one of them stands in these lists alone and has no buffer. Everything
// else is as in bindings/jax/xla_call.cc, which this file calls with the shapes put back.
#include <cstring>
#include <vector>

#include "../jax/xla_ffi.h"
#include "core/last_error.h"
#include "core/tensor.h"
#include "flashkernel/abi.h"

extern "C" fk::xla::Error* fk_xla_call_cpu(fk::xla::CallFrame*);
extern "C" fk::xla::Error* fk_xla_call_cuda_allocating(fk::xla::CallFrame*);

namespace fk::xla {
namespace {

// What an empty tensor's data points to.
char nothing[64];

const Array* find_array(const Attributes& attributes, const char* name) {
  const size_t length = std::strlen(name);
  for (int64_t i = 0; i < attributes.size; ++i) {
    const ByteSpan& n = *attributes.names[i];
    if (n.size != length || std::memcmp(n.data, name, length) != 0) continue;
    if (attributes.types[i] != AttributeType::kArray) return nullptr;
    const auto* array = static_cast<const Array*>(attributes.values[i]);
    return array->dtype == DataType::kS64 ? array : nullptr;
  }
  return nullptr;
}

// The tensors that a list of shapes describes, on the flat buffers that XLA gave. Returns false
// where the two do not fit together.
bool put_shapes_back(const Array& list, int64_t count, void** flat, std::vector<Buffer>* out) {
  auto* next = static_cast<int64_t*>(list.data);
  int64_t* const end = next + list.size;
  int64_t used = 0;
  while (next < end) {
    if (end - next < 2) return false;
    const auto dtype = static_cast<DataType>(*next++);
    const int64_t rank = *next++;
    if (rank < 0 || rank > kMaxDims || rank > end - next) return false;
    int64_t elements = 1;
    for (int64_t i = 0; i < rank; ++i) {
      if (next[i] < 0 || __builtin_mul_overflow(elements, next[i], &elements)) return false;
    }
    Buffer tensor{sizeof(Buffer), nullptr, dtype, nothing, rank, next};
    if (elements > 0) {
      if (used == count) return false;
      const auto& buffer = *static_cast<const Buffer*>(flat[used++]);
      if (buffer.rank != 1 || buffer.dims[0] != elements || buffer.dtype != dtype) return false;
      tensor.data = buffer.data;
    }
    out->push_back(tensor);
    next += rank;
  }
  return used == count;
}

Error* fail(const CallFrame& frame, ErrorCode code, const char* message) {
  ErrorCreateArgs args{sizeof(ErrorCreateArgs), nullptr, message, code};
  return frame.api->error_create(&args);
}

Error* call_with_shapes(CallFrame* frame, Handler handler) {
  const Array* operand_shapes = find_array(frame->attributes, "operand_shapes");
  const Array* result_shapes = find_array(frame->attributes, "result_shapes");
  std::vector<Buffer> operands, results;
  if (operand_shapes == nullptr || result_shapes == nullptr ||
      !put_shapes_back(*operand_shapes, frame->arguments.size, frame->arguments.values,
                       &operands) ||
      !put_shapes_back(*result_shapes, frame->results.size, frame->results.values, &results)) {
    return fail(*frame, ErrorCode::kInvalidArgument,
                "flashkernel call: expected operand_shapes and result_shapes that fit the buffers");
  }
  std::vector<void*> operand_values, result_values;
  for (Buffer& b : operands) operand_values.push_back(&b);
  for (Buffer& b : results) result_values.push_back(&b);
  std::vector<ArgumentType> operand_types(operands.size(), ArgumentType::kBuffer);
  std::vector<ResultType> result_types(results.size(), ResultType::kBuffer);
  CallFrame shaped = *frame;
  shaped.arguments.size = static_cast<int64_t>(operands.size());
  shaped.arguments.types = operand_types.data();
  shaped.arguments.values = operand_values.data();
  shaped.results.size = static_cast<int64_t>(results.size());
  shaped.results.types = result_types.data();
  shaped.results.values = result_values.data();
  return handler(&shaped);
}

Error* handle(CallFrame* frame, Handler handler) {
  // The other handler answers what XLA asks before it runs a program.
  if (frame->extension_start != nullptr || frame->stage != Stage::kExecute) return handler(frame);
  return without_exceptions(
      [&] { return call_with_shapes(frame, handler); },
      [&](const char* why) { return fail(*frame, ErrorCode::kInternal, why); });
}

}  // namespace
}  // namespace fk::xla

extern "C" {

FK_API fk::xla::Error* fk_exla_call_cpu(fk::xla::CallFrame* frame) {
  return fk::xla::handle(frame, fk_xla_call_cpu);
}

// The workspace is no result of EXLA's calls, so the handler asks XLA for it.
FK_API fk::xla::Error* fk_exla_call_cuda(fk::xla::CallFrame* frame) {
  return fk::xla::handle(frame, fk_xla_call_cuda_allocating);
}

}  // extern "C"
