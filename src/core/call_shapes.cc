#include "core/call_shapes.h"

#include <algorithm>

#include "core/integers.h"

namespace fk {
namespace {

constexpr int64_t kNoSize = -1;

}  // namespace

void CallShapes::tell_sizes_not_given() {
  for (const auto& [symbol, other] : op_.size_unless_given) {
    const int to = op_.find_symbol(symbol), from = op_.find_symbol(other);
    if (to < 0 || from < 0 || knows(to) || !knows(from)) continue;
    tell(to, size_[from], *from_[from]);
  }
}

int64_t CallShapes::dim_size(const Dim& dim, int64_t symbol_size) const {
  if (dim.blocks_of >= 0) return block_count(symbol_size, slots_[dim.blocks_of].integer);
  int64_t size = 0;
  if (__builtin_mul_overflow(symbol_size, dim.factor, &size) ||
      __builtin_add_overflow(size, dim.offset, &size)) {
    return kNoSize;
  }
  return size;
}

Status CallShapes::match(const Field& field, int ndim, const int64_t* shape) {
  if (field.shape_of >= 0) return match_another(field, ndim, shape);
  const Dims* dims = alternative(field, ndim);
  if (dims == nullptr) return misfit(field, ndim, shape, nullptr);
  const int named = static_cast<int>(dims->size());
  int first = 0;  // of the dims that have names
  if (has_leading_dims(*dims)) {
    first = 1;
    if (!match_leading(field, ndim - named + 1, shape)) {
      return misfit(field, ndim, shape, leading_from_);
    }
  }
  for (int i = first; i < named; ++i) {
    const Dim dim = in_call(field, (*dims)[i]);
    const int64_t size = shape[ndim - named + i];
    if (dim.symbol == Dim::kNumber) {
      if (size != dim.offset) return misfit(field, ndim, shape, nullptr);
    } else if (dim.or_one && size == 1) {
      continue;
    } else if (from_[dim.symbol] != nullptr) {
      const bool is_symbol = dim.factor == 1 && dim.offset == 0 && dim.blocks_of < 0;
      if (is_symbol && size == size_[dim.symbol]) continue;  // as nearly always
      const int64_t expected = dim_size(dim, size_[dim.symbol]);
      if (size == expected) continue;
      if (expected < 0) return too_small(dim);
      return misfit(field, ndim, shape, from_[dim.symbol]);
    } else if (dim.blocks_of < 0) {
      const int64_t rest = size - dim.offset;
      if (rest < 0 || (dim.factor != 1 && rest % dim.factor != 0)) {
        return misfit(field, ndim, shape, nullptr);
      }
      tell(dim.symbol, dim.factor == 1 ? rest : rest / dim.factor, field);
    }
  }
  return {};
}

// Returns the alternative of a field's shapes that its tensor must have, or NULL where its rank is
// not that one's. The first tensor of a form decides which that is.
const Dims* CallShapes::alternative(const Field& field, int ndim) {
  if (field.form_index >= 0 && form_from_[field.form_index] == nullptr) {
    for (size_t i = 0; i < field.shapes.size(); ++i) {
      if (!rank_fits(field.shapes[i], ndim)) continue;
      form_[field.form_index] = static_cast<int>(i);
      form_from_[field.form_index] = &field;
      return &field.shapes[i];
    }
    return nullptr;
  }
  const Dims& dims = field.shapes[field.form_index < 0 ? 0 : form_[field.form_index]];
  return rank_fits(dims, ndim) ? &dims : nullptr;
}

bool CallShapes::match_leading(const Field& field, int leading, const int64_t* shape) {
  if (leading_from_ != nullptr) {
    if (leading != leading_ndim_) return false;
    for (int i = 0; i < leading; ++i) {  // few, so that calling memcmp would take longer
      if (shape[i] != leading_[i]) return false;
    }
    return true;
  }
  leading_from_ = &field;
  leading_ndim_ = leading;
  std::copy_n(shape, leading, leading_);
  return true;
}

// Compares a tensor with the shape of another, both as the caller gave them.
Status CallShapes::match_another(const Field& field, int ndim, const int64_t* shape) const {
  const DLTensor& other = *slots_[field.shape_of].tensor;
  const int64_t* given = slots_[&field - op_.fields.data()].tensor->shape;
  if (ndim == other.ndim && std::equal(given, given + ndim, other.shape)) return {};
  return invalid(field.name + ": expected shape " + shape_string(other.shape, other.ndim) +
                 ", that of " + op_.fields[field.shape_of].name + ", got " +
                 shape_string(shape, ndim));
}

// Tells of a symbol whose size is known, and too small for there to be such a dim.
Status CallShapes::too_small(const Dim& dim) const {
  const int64_t least = ceil_div(-dim.offset, dim.factor);
  const std::string expected = size_[dim.symbol] < least
                                   ? "at least " + std::to_string(least)
                                   : "small enough for " + dim_text(op_, dim) + " to be a size";
  return invalid(from_[dim.symbol]->name + ": expected " + op_.symbols[dim.symbol] + " to be " +
                 expected + ", got " + std::to_string(size_[dim.symbol]));
}

// Tells what does not fit. `from` is the field that told what is wrong here, or NULL for one that
// tells some of the sizes.
Status CallShapes::misfit(const Field& field, int ndim, const int64_t* shape,
                          const Field* from) const {
  std::string expected;
  const Field* form_from = field.form_index < 0 ? nullptr : form_from_[field.form_index];
  const bool decided = form_from != nullptr && form_from != &field;
  if (from == nullptr && decided) from = form_from;
  for (size_t k = 0; k < field.shapes.size(); ++k) {
    if (decided && static_cast<int>(k) != form_[field.form_index]) continue;
    const Dims& dims = field.shapes[k];
    if (!expected.empty()) expected += " or ";
    expected += "(";
    for (size_t i = 0; i < dims.size(); ++i) {
      if (i > 0) expected += ", ";
      expected += known_text(in_call(field, dims[i]), &from);
    }
    expected += dims.size() == 1 && !has_leading_dims(dims) ? ",)" : ")";
  }
  if (from != nullptr && from != &field) expected += " to fit " + from->name;
  return invalid(field.name + ": expected shape " + expected + ", got " +
                 shape_string(shape, ndim));
}

// Writes a dim with the size that it has, where that is known; `from` becomes a field that told it.
std::string CallShapes::known_text(const Dim& dim, const Field** from) const {
  if (dim.symbol == Dim::kEllipsis) {
    if (leading_from_ == nullptr) return "...";
    if (*from == nullptr) *from = leading_from_;
    std::string text;
    for (int i = 0; i < leading_ndim_; ++i) {
      text += (i > 0 ? ", " : "") + std::to_string(leading_[i]);
    }
    return text.empty() ? "no leading dims" : text;
  }
  if (dim.symbol == Dim::kNumber || !knows(dim.symbol)) return dim_text(op_, dim);
  if (*from == nullptr && dim.blocks_of < 0) *from = from_[dim.symbol];
  const std::string size = std::to_string(dim_size(dim, size_[dim.symbol]));
  return dim.or_one ? size + " or 1" : size;
}

Status CallShapes::infer_shape(const Field& field, int* ndim, int64_t* shape) const {
  const auto unknown = [&] {
    return invalid(field.name + ": its shape cannot be told from the inputs");
  };
  *ndim = 0;
  if (field.shape_of >= 0) {
    const DLTensor* other = slots_[field.shape_of].tensor;
    if (other == nullptr || other->ndim > kMaxDims) return unknown();
    *ndim = other->ndim;
    std::copy_n(other->shape, other->ndim, shape);
    return {};
  }
  if (field.form_index >= 0 && form_from_[field.form_index] == nullptr) return unknown();
  for (const Dim& dim : field.shapes[field.form_index < 0 ? 0 : form_[field.form_index]]) {
    const bool leading = dim.symbol == Dim::kEllipsis;
    if (leading ? leading_from_ == nullptr : dim.symbol >= 0 && !knows(dim.symbol)) {
      return unknown();
    }
    if (*ndim + (leading ? leading_ndim_ : 1) > kMaxDims) return unknown();
    if (leading) {
      std::copy_n(leading_, leading_ndim_, shape + *ndim);
      *ndim += leading_ndim_;
      continue;
    }
    const int64_t size = dim.symbol == Dim::kNumber ? dim.offset : dim_size(dim, size_[dim.symbol]);
    if (size < 0) {
      return invalid(field.name + ": its size " + dim_text(op_, dim) + " cannot be, " +
                     op_.symbols[dim.symbol] + " being " + std::to_string(size_[dim.symbol]));
    }
    shape[(*ndim)++] = size;
  }
  return {};
}

}  // namespace fk
