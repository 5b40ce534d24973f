// This file holds the tensors of one model's files by name, from which a decoder's weights are
// taken.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/status.h"
#include "model/decoder.h"

namespace fk::model {

// Describes a tensor in a mapped file.
struct StoredTensor {
  const std::string* file = nullptr;  // the file's name for errors; it outlives the table
  const char* data = nullptr;
  int64_t bytes = 0;
  std::vector<int64_t> shape;  // outermost first
  bool readable = true;        // false: a type that is never a weight (a mask of booleans)
  WeightType type = WeightType::kF32;
  std::string type_name;  // as the file spells it
};

class TensorTable {
 public:
  explicit TensorTable(std::string file) : file_(std::move(file)) {}

  // Adds a tensor; returns false if there already is one of that name.
  bool add(std::string name, StoredTensor tensor);
  // Returns the tensor of that name, or null.
  const StoredTensor* find(const std::string& name) const;
  bool has(const std::string& name) const { return find(name) != nullptr; }
  size_t size() const { return tensors_.size(); }

  // Makes the table pretend that every weight it is asked for exists, with this type and at this
  // address, for configurations without weights. Optional vectors still do not exist.
  void make_up(WeightType type, const void* data);
  bool made_up() const { return made_up_ != nullptr; }

  // These set *weight to a weight of exactly this shape, or return an error if it is missing or
  // different. This one finds a matrix.
  Status matrix(const std::string& name, int64_t rows, int64_t columns, Weight* weight) const;
  // Finds a matrix that is stored as (columns, rows).
  Status transposed(const std::string& name, int64_t rows, int64_t columns, Weight* weight) const;
  // Finds a vector of floats (F32, F16 or BF16).
  Status vector(const std::string& name, int64_t size, Weight* weight) const;
  // Does the same as `vector`, but leaves *weight as it is if the files have no such tensor.
  Status optional_vector(const std::string& name, int64_t size, Weight* weight) const;

 private:
  // Finds a weight of that shape, outermost dimension first.
  Status find_weight(const std::string& name, const std::vector<int64_t>& shape,
                     Weight* weight) const;

  std::string file_;  // the name in errors about missing tensors
  const void* made_up_ = nullptr;
  WeightType made_up_type_ = WeightType::kF32;
  std::map<std::string, StoredTensor> tensors_;
};

// Returns rows [begin, begin + rows) of a matrix, or these elements of a vector.
Weight slice(const Weight& weight, int64_t begin, int64_t rows);

// Returns a shape as an error shows it, such as "(32, 64)".
std::string shown_shape(const std::vector<int64_t>& shape);

}  // namespace fk::model
