// The tensors of one model's files by name, and how they become a decoder's weights.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/status.h"
#include "model/decoder.h"

namespace fk::model {

struct StoredTensor {
  const std::string* file = nullptr;  // outlives the table
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

  // False where there is one of that name already.
  bool add(std::string name, StoredTensor tensor);
  const StoredTensor* find(const std::string& name) const;
  bool has(const std::string& name) const { return find(name) != nullptr; }
  size_t size() const { return tensors_.size(); }

  // From now on every weight that is asked for is there, with this type and at this address: what
  // a configuration without weights gives. Optional vectors are not.
  void make_up(WeightType type, const void* data);
  bool made_up() const { return made_up_ != nullptr; }

  // A weight of exactly this shape; an error where it is missing or not so.
  Status matrix(const std::string& name, int64_t rows, int64_t columns, Weight* weight) const;
  // A matrix stored as (columns, rows).
  Status transposed(const std::string& name, int64_t rows, int64_t columns, Weight* weight) const;
  // A vector of floats (F32, F16 or BF16).
  Status vector(const std::string& name, int64_t size, Weight* weight) const;
  // As `vector`, but the weight stays undefined where the files have none.
  Status optional_vector(const std::string& name, int64_t size, Weight* weight) const;

 private:
  Status find_weight(const std::string& name, const std::vector<int64_t>& shape,
                     Weight* weight) const;

  std::string file_;  // for errors about what is missing
  const void* made_up_ = nullptr;
  WeightType made_up_type_ = WeightType::kF32;
  std::map<std::string, StoredTensor> tensors_;
};

// Rows [begin, begin + rows) of a matrix, or that part of a vector.
Weight slice(const Weight& weight, int64_t begin, int64_t rows);

// "(32, 64)"
std::string shown_shape(const std::vector<int64_t>& shape);

}  // namespace fk::model
