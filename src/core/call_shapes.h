// The shapes of one call: what its arguments say about the sizes of symbols ("N"), about the
// leading dims ("...") and about which of the alternative shapes its tensors have. Dispatch
// compares tensors with declared shapes here, the bindings learn here what outputs to allocate, and
// `fk check` makes shapes of the sizes it has drawn.
#pragma once

#include <cstdint>
#include <string>

#include "core/declaration.h"
#include "core/status.h"
#include "core/tensor.h"

namespace fk {

class CallShapes {
 public:
  // `slots` are the call's arguments: the values of attributes are read from them, and the shapes
  // of tensors that others share (`@name`).
  CallShapes(const OpDeclaration& op, const fk_slot* slots) : op_(op), slots_(slots) {}

  // Gives a symbol its size, as the argument `from` tells it.
  void tell(int symbol, int64_t size, const Field& from) {
    size_[symbol] = size;
    from_[symbol] = &from;
  }
  // Gives the symbols that no input told the sizes that they have then (size_unless_given).
  void tell_sizes_not_given();

  // Compares a tensor's shape with the field's declared one, its axis moved last, and learns what
  // was not known before. The error shows the whole expected shape with every known size filled in.
  Status match(const Field& field, int ndim, const int64_t* shape);

  // Writes the shape that an output has, its axis still last.
  Status infer_shape(const Field& field, int* ndim, int64_t* shape) const;

  // Returns the size that a dim has, below 0 where no such tensor can be. `symbol_size` is that of
  // its symbol.
  int64_t dim_size(const Dim& dim, int64_t symbol_size) const;

  bool knows(int symbol) const { return from_[symbol] != nullptr; }
  int64_t size(int symbol) const { return size_[symbol]; }
  const Field& told_by(int symbol) const { return *from_[symbol]; }

 private:
  const Dims* alternative(const Field& field, int ndim);
  bool match_leading(const Field& field, int leading, const int64_t* shape);
  Status match_another(const Field& field, int ndim, const int64_t* shape) const;
  Status too_small(const Dim& dim) const;
  Status misfit(const Field& field, int ndim, const int64_t* shape, const Field* from) const;
  std::string known_text(const Dim& dim, const Field** from) const;

  const OpDeclaration& op_;
  const fk_slot* slots_;
  int64_t size_[kMaxSymbols];
  const Field* from_[kMaxSymbols] = {};  // who told it; NULL: not known
  const Field* leading_from_ = nullptr;
  int leading_ndim_ = 0;
  int64_t leading_[kMaxDims];
  int form_[kMaxForms];  // by the declaration's forms, the number of the alternative
  const Field* form_from_[kMaxForms] = {};
};

}  // namespace fk
