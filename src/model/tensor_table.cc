// Finds a decoder's weights among the tensors of its files and checks their shapes.
#include "model/tensor_table.h"

#include "model/mapped_file.h"

namespace fk::model {

std::string shown_shape(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + ")";
}

bool TensorTable::add(std::string name, StoredTensor tensor) {
  return tensors_.emplace(std::move(name), std::move(tensor)).second;
}

const StoredTensor* TensorTable::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

void TensorTable::make_up(WeightType type, const void* data) {
  made_up_ = data;
  made_up_type_ = type;
}

Status TensorTable::find_weight(const std::string& name, const std::vector<int64_t>& shape,
                                Weight* weight) const {
  const StoredTensor* tensor = find(name);
  StoredTensor made_up;
  if (made_up_ != nullptr) {
    made_up.data = static_cast<const char*>(made_up_);
    made_up.shape = shape;
    made_up.type = made_up_type_;
    tensor = &made_up;
  }
  if (tensor == nullptr) return file_error(file_, "tensor " + name + ": is missing");
  const std::string where = "tensor " + name + ": ";
  if (!tensor->readable) {
    return file_error(*tensor->file,
                      where + "expected a type that weights have, got " + tensor->type_name);
  }
  if (tensor->shape != shape) {
    return file_error(*tensor->file, where + "expected the shape " + shown_shape(shape) + ", got " +
                                         shown_shape(tensor->shape));
  }
  const WeightTypeInfo& info = type_info(tensor->type);
  *weight = {};
  weight->data = tensor->data;
  weight->type = tensor->type;
  weight->rows = shape.size() == 1 ? 1 : shape[0];
  weight->columns = shape.back();
  weight->row_bytes = weight->columns / info.block * info.bytes;
  return {};
}

Status TensorTable::matrix(const std::string& name, int64_t rows, int64_t columns,
                           Weight* weight) const {
  return find_weight(name, {rows, columns}, weight);
}

Status TensorTable::transposed(const std::string& name, int64_t rows, int64_t columns,
                               Weight* weight) const {
  FK_RETURN_IF_ERROR(find_weight(name, {columns, rows}, weight));
  std::swap(weight->rows, weight->columns);
  weight->transposed = true;
  return {};
}

Status TensorTable::vector(const std::string& name, int64_t size, Weight* weight) const {
  FK_RETURN_IF_ERROR(find_weight(name, {size}, weight));
  if (type_info(weight->type).block != 1) {
    return file_error(*find(name)->file, "tensor " + name + ": expected F32, F16 or BF16, got " +
                                             type_info(weight->type).name);
  }
  return {};
}

Status TensorTable::optional_vector(const std::string& name, int64_t size, Weight* weight) const {
  if (!has(name)) return {};
  return vector(name, size, weight);
}

Weight slice(const Weight& weight, int64_t begin, int64_t rows) {
  Weight part = weight;
  const char* data = static_cast<const char*>(weight.data);
  const int64_t element = type_info(weight.type).bytes;
  if (weight.rows == 1 && !weight.transposed) {  // a vector
    part.data = data + begin * element;
    part.columns = rows;
    part.row_bytes = rows * element;
    return part;
  }
  part.data = data + begin * (weight.transposed ? element : weight.row_bytes);
  part.rows = rows;
  return part;
}

}  // namespace fk::model
