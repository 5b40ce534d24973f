// Reads the safetensors container: eight bytes of header length, a JSON header, and one buffer that
// the tensors fill without gap or overlap.
#pragma once

#include <string>
#include <string_view>

#include "core/status.h"
#include "model/tensor_table.h"

namespace fk::model {

// Adds the tensors of one file to the table. `file` is the name for errors and must outlive the
// table, as must `bytes`.
Status read_safetensors(const std::string& file, std::string_view bytes, TensorTable* table);

}  // namespace fk::model
