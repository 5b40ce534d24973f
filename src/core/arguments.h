// Takes the arguments of one call from slots into the op's argument struct, and checks each against
// the declaration. Every error names the argument.
#pragma once

#include <cstdint>
#include <string>

#include "core/call_dtypes.h"
#include "core/call_shapes.h"
#include "core/declaration.h"
#include "core/status.h"
#include "core/tensor.h"

namespace fk {

class CallArguments {
 public:
  CallArguments(const OpDeclaration& op, const fk_slot* slots, void* args)
      : op_(op), slots_(slots), args_(static_cast<char*>(args)), shapes_(op, slots), dtypes_(op) {}

  // Fills the argument struct, and checks each attribute on the way. The axis that an op works
  // along is moved last in the tensors that have it.
  Status unpack(bool needs_data);
  // Checks every tensor: its device, dtype and shape, and that an output can be written.
  Status check();
  // Checks that some output is given, and every one that a flag asks for, by what check() saw.
  Status check_outputs() const {
    return any_output_ && missing_ == nullptr ? Status() : error_of_outputs();
  }
  // Checks the values in index tensors again, once they can be read.
  Status check_values();

  // The first tensor that is given, which tells the device of the call.
  const Tensor& first_tensor() const {
    static const Tensor none;
    return first_ == nullptr ? none : *first_;
  }

 private:
  template <class T>
  T& member(const Field& f) {
    return *reinterpret_cast<T*>(args_ + f.offset);
  }

  static Status error(const Field& f, const std::string& what) {
    return invalid(f.name + ": " + what);
  }

  // Checks that float32 can hold a number, since kernels compute with floats, and its range.
  static Status check_number(const Field& f, double number);
  static std::string number_string(double number);
  static std::string range_string(const Field& f);
  // Takes a tensor that is given, or has to be.
  Status unpack_tensor(const Field& f, const fk_slot& slot, bool needs_data);
  // Moves the axis last. It is counted in the first tensor that has it: an input or, if only
  // outputs do, an output.
  Status move_axis_last();
  Status check_dtype(const Field& f, const Tensor& t);
  // Looks for the activations' dtype before any tensor is checked, since a parameter may be
  // declared before the first activation.
  void bind_activation();
  // Tells whether a tensor is where the first one is; the first one says where.
  bool is_on_same_device(const Field& f, const Tensor& t) {
    if (first_ == nullptr) {
      first_ = &t;
      first_field_ = &f;
    }
    return t.device == first_->device && t.device_id == first_->device_id;
  }
  Status error_of_outputs() const;
  Status wrong_device(const Field& f, const Tensor& t) const;
  static std::string device_string(const Tensor& t);
  // Checks the offsets of packed sequences, which a field with `rises_to` has, where they can be
  // read. On a GPU they cannot: kernels keep themselves inside the tensors whatever the offsets
  // say.
  Status check_offsets(const Field& f, const Tensor& t);
  // Checks that no two elements of an output share an address.
  Status check_writable(const Field& f, const Tensor& t);
  // Checks that an output does not lie over the values of an index tensor: they may be checked,
  // then overwritten, and then used to address memory.
  Status check_apart(const Field& f, const Tensor& t);
  // Finds the input that an output is written over, by whose name callers know it; otherwise it is
  // the output itself.
  const Field& overwritten_by(const Field& output, const Tensor& t);

  const OpDeclaration& op_;
  const fk_slot* slots_;
  char* args_;
  const Field* axis_ = nullptr;  // the attribute, once it was met
  const Tensor* first_ = nullptr;
  const Field* first_field_ = nullptr;
  const Field* missing_ = nullptr;  // the first output that a flag asks for and that is not given
  bool any_output_ = false;
  CallShapes shapes_;
  CallDTypes dtypes_;
};

}  // namespace fk
