// Calls of linear layers whose weight is packed once.
#include <cstring>

#include "core/access.h"
#include "fuzz_abi.h"

namespace fk::fuzz {
namespace {

constexpr DType kFloats[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr const char* kKept[] = {nullptr, "float32", "bfloat16", "int8", "int8", "float16", "\xff"};
constexpr const char* kActivations[] = {nullptr, "", "gelu", "silu", "relu2", "tanh", "swish"};

}  // namespace

PackedFuzzer::~PackedFuzzer() {
  for (const Layer& layer : layers_) fk_packed_linear_close(layer.handle);
}

// A tensor of such a shape whose dimensions lie in memory in any order, at times with gaps.
void PackedFuzzer::draw(Argument* a, DType dtype, const std::vector<int64_t>& shape) {
  std::vector<size_t> order(shape.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (random_.one_in(4) && order.size() > 1)
    std::swap(order[0], order[1 + random_.below(order.size() - 1)]);
  std::vector<int64_t> strides(shape.size());
  int64_t step = random_.one_in(8) ? 2 : 1;
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = random_.one_in(16) ? -step : step;
    step = step * std::max<int64_t>(shape[order[i]], 1) + (random_.one_in(8) ? 3 : 0);
  }
  a->set(dtype, shape, strides);
  if (random_.one_in(2)) a->tensor.strides = nullptr;
}

// Gives it memory of small numbers, or of what is none.
void PackedFuzzer::fill(Argument* a, DType dtype) {
  const size_t bytes = a->provide();
  if (bytes == 0) return;
  std::memset(a->memory.get(), random_.one_in(2) ? 0 : 0xff, bytes);
  if (random_.one_in(8)) return;
  Tensor view;
  view.dtype = dtype;
  view.data = a->memory.get();
  const auto count = static_cast<int64_t>(bytes) / size_of(dtype);
  for (int64_t i = 0; i < count; ++i) {
    store(view, i, static_cast<double>(random_.between(-100, 100)) * 0.01);
  }
}

bool PackedFuzzer::open(Layer* layer) {
  Layer fresh;
  fresh.out = random_.between(0, random_.one_in(4) ? 300 : 20);
  fresh.in = random_.between(0, random_.one_in(4) ? 150 : 20);
  const DType weight_dtype = random_.pick(kFloats), bias_dtype = random_.pick(kFloats);
  Argument weight, bias;
  draw(&weight, weight_dtype, {fresh.out, fresh.in});
  draw(&bias, bias_dtype, {fresh.out});
  bool is_right = true;
  if (random_.one_in(2)) {
    (random_.one_in(2) ? weight : bias).spoil(&random_);
    is_right = false;
  }
  fill(&weight, weight_dtype);
  fill(&bias, bias_dtype);
  const bool with_bias = bias.is_present && random_.one_in(2);
  const fk_status status = fk_packed_linear_open(weight.is_present ? &weight.tensor : nullptr,
                                                 with_bias ? &bias.tensor : nullptr,
                                                 random_.pick(kKept), random_.pick(kActivations),
                                                 random_.one_in(64) ? nullptr : &fresh.handle);
  require_message(status);
  if (status != FK_OK || !is_right) {  // a spoiled one may have another shape
    fk_packed_linear_close(fresh.handle);
    return status == FK_OK;
  }
  fk_packed_linear_close(layer->handle);
  *layer = fresh;
  return true;
}

// A weight of one element, repeated, that no memory holds.
bool PackedFuzzer::open_huge() {
  float one[2] = {1, 1};
  const int64_t most = int64_t{1} << random_.between(50, 58), out = int64_t{1} << random_.below(58);
  int64_t shape[2] = {out, std::max<int64_t>(most / out, 1)}, strides[2] = {0, 0};
  DLTensor weight{one, {kDLCPU, 0}, 2, {kDLFloat, 16, 1}, shape, strides, 0}, bias = weight;
  bias.ndim = 1;
  fk_packed_linear* packed = nullptr;
  const fk_status status = fk_packed_linear_open(&weight, random_.one_in(2) ? &bias : nullptr,
                                                 random_.pick(kKept), nullptr, &packed);
  require_message(status);
  fk_packed_linear_close(packed);
  return status == FK_OK;
}

bool PackedFuzzer::call() {
  Layer& layer = layers_[random_.below(std::size(layers_))];
  if (layer.handle == nullptr || random_.one_in(16)) return open(&layer);
  if (random_.one_in(512)) return open_huge();
  (void)fk_packed_linear_bytes(random_.one_in(8) ? nullptr : layer.handle);
  std::vector<int64_t> shape(1 + random_.below(4));
  for (int64_t& size : shape) size = random_.between(random_.one_in(16) ? 0 : 1, 4);
  if (shape.size() == 2 && random_.one_in(4)) shape[0] = random_.between(0, 70);
  const DType dtype = random_.pick(kFloats);
  Argument x, y;
  shape.back() = layer.in;
  draw(&x, dtype, shape);
  shape.back() = layer.out;
  draw(&y, dtype, shape);
  if (random_.one_in(2)) (random_.one_in(2) ? x : y).spoil(&random_);
  fill(&x, dtype);
  fill(&y, dtype);
  if (random_.one_in(8)) x.share_with(&y);
  fk_exec exec = FK_EXEC_DEFAULTS;
  if (random_.one_in(2)) exec.parallel_for = run_backwards;
  const fk_status status = fk_packed_linear_call(
      random_.one_in(64) ? nullptr : layer.handle, x.is_present ? &x.tensor : nullptr,
      y.is_present ? &y.tensor : nullptr, random_.one_in(2) ? nullptr : &exec);
  require_message(status);
  return status == FK_OK;
}

}  // namespace fk::fuzz
