#include "core/arguments.h"

#include <cmath>
#include <cstdio>
#include <limits>

#include "core/access.h"
#include "core/overlap.h"

namespace fk {
namespace {

bool is_index(const Field& f) {
  return f.dtype_rule == DTypeRule::kIndex || f.dtype_rule == DTypeRule::kInt32;
}

bool is_within(const Field& f, double number) { return number >= f.least && number <= f.most; }

bool fits_float(double number) { return std::fabs(number) <= std::numeric_limits<float>::max(); }

// Nearly every number is allowed by these two; if not, check_number decides.
bool surely_allowed(const Field& f, double number) {
  return fits_float(number) && is_within(f, number);
}

}  // namespace

Status CallArguments::unpack(bool needs_data) {
  for (size_t i = 0; i < op_.fields.size(); ++i) {
    const Field& f = op_.fields[i];
    switch (f.kind) {
      case Kind::kInput:
      case Kind::kOutput:
        if (slots_[i].tensor != nullptr || (f.kind == Kind::kInput && !f.optional)) {
          FK_RETURN_IF_ERROR(unpack_tensor(f, slots_[i], needs_data));
        }
        break;
      case Kind::kNumber:
        if (!surely_allowed(f, slots_[i].number)) {
          FK_RETURN_IF_ERROR(check_number(f, slots_[i].number));
        }
        member<double>(f) = slots_[i].number;
        break;
      case Kind::kInteger:
        if (!is_within(f, static_cast<double>(slots_[i].integer))) {
          return error(
              f, "expected " + range_string(f) + ", got " + std::to_string(slots_[i].integer));
        }
        member<int64_t>(f) = slots_[i].integer;
        if (f.symbol >= 0) shapes_.tell(f.symbol, slots_[i].integer, f);
        break;
      case Kind::kBoolean:
        member<bool>(f) = slots_[i].integer != 0;
        break;
      case Kind::kChoice: {
        const int64_t choice = slots_[i].integer;
        if (choice < 0 || choice >= static_cast<int64_t>(f.choices.size())) {
          return error(f, "expected a choice from 0 to " + std::to_string(f.choices.size() - 1) +
                              ", got " + std::to_string(choice));
        }
        member<int64_t>(f) = choice;
        break;
      }
      case Kind::kAxis:
        member<int64_t>(f) = slots_[i].integer;
        axis_ = &f;
        break;
    }
  }
  if (axis_ != nullptr) FK_RETURN_IF_ERROR(move_axis_last());
  return {};
}

Status CallArguments::check() {
  // The first argument is an activation as a rule, which its own check below notes.
  if (op_.fields[0].dtype_rule != DTypeRule::kActivation || op_.fields[0].optional) {
    bind_activation();
  }
  bool inputs_seen = false;  // they are declared before the outputs
  bool any_index = false;    // whether an index tensor with data is among them
  for (const Field& f : op_.fields) {
    if (f.kind != Kind::kInput && f.kind != Kind::kOutput) continue;
    const Tensor& t = member<Tensor>(f);
    if (!t) {
      if (f.asked_by >= 0 && missing_ == nullptr && slots_[f.asked_by].integer != 0) missing_ = &f;
      continue;
    }
    if (f.kind == Kind::kOutput && !inputs_seen) {
      inputs_seen = true;
      shapes_.tell_sizes_not_given();
    }
    // Each of these takes a few nanoseconds, and a call of a small op takes a hundred: what is
    // right in nearly every call is seen here.
    if (!is_on_same_device(f, t)) return wrong_device(f, t);
    if (!dtypes_.surely_match(f, t.dtype)) FK_RETURN_IF_ERROR(check_dtype(f, t));
    FK_RETURN_IF_ERROR(shapes_.match(f, t.ndim, t.shape));
    if (!f.rises_to.empty()) FK_RETURN_IF_ERROR(check_offsets(f, t));
    if (f.kind == Kind::kInput) {
      any_index = any_index || (is_index(f) && t.data != nullptr);
      continue;
    }
    any_output_ = true;
    FK_RETURN_IF_ERROR(check_writable(f, t));
    if (any_index && t.data != nullptr) FK_RETURN_IF_ERROR(check_apart(f, t));
  }
  return {};
}

Status CallArguments::error_of_outputs() const {
  const auto missing = [](const Field& f, const std::string& reason) {
    return error(f, "expected a tensor " + f.type + ", since " + reason + ", got none");
  };
  if (missing_ != nullptr) {
    return missing(*missing_, op_.fields[missing_->asked_by].name + " is true");
  }
  for (const Field& f : op_.fields) {
    if (f.kind != Kind::kOutput || !output_wanted(op_, f, slots_)) continue;
    return missing(f, "no other output is given");
  }
  return {};
}

Status CallArguments::check_values() {
  for (const Field& f : op_.fields) {
    if (f.kind != Kind::kInput || f.rises_to.empty() || !member<Tensor>(f)) continue;
    FK_RETURN_IF_ERROR(check_offsets(f, member<Tensor>(f)));
  }
  return {};
}

Status CallArguments::check_number(const Field& f, double number) {
  if (fits_float(number)) {
    if (is_within(f, number)) return {};
    return error(f, "expected " + range_string(f) + ", got " + number_string(number));
  }
  if ((f.nullable || f.may_be_infinite) && number == kLeftOut) return {};
  if (std::isnan(number)) return error(f, "expected a number, got NaN");
  return error(f, (std::isinf(number) ? "expected a finite number, got "
                                      : "expected a number that float32 can hold, got ") +
                      number_string(number));
}

std::string CallArguments::number_string(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", number);
  return text;
}

std::string CallArguments::range_string(const Field& f) {
  if (f.most == kLeftOut) return "at least " + number_string(f.least);
  if (f.least == -kLeftOut) return "at most " + number_string(f.most);
  return number_string(f.least) + " to " + number_string(f.most);
}

Status CallArguments::unpack_tensor(const Field& f, const fk_slot& slot, bool needs_data) {
  if (slot.tensor == nullptr) return error(f, "expected a tensor " + f.type + ", got none");
  const Status status = from_dlpack(*slot.tensor, needs_data, &member<Tensor>(f));
  if (!status.ok()) return error(f, status.message());
  return {};
}

Status CallArguments::move_axis_last() {
  int64_t& axis = member<int64_t>(*axis_);
  for (const Field& f : op_.fields) {
    if (!f.along_axis || !member<Tensor>(f)) continue;
    Tensor& t = member<Tensor>(f);
    if (t.ndim == 0) return error(f, "expected at least 1 dimension, got a scalar");
    if (axis < -t.ndim || axis >= t.ndim) {
      return error(*axis_, "expected " + std::to_string(-t.ndim) + " to " +
                               std::to_string(t.ndim - 1) + " for " + f.name + " of shape " +
                               shape_string(t) + ", got " + std::to_string(axis));
    }
    const int a = static_cast<int>(axis < 0 ? axis + t.ndim : axis);
    const int64_t size = t.shape[a], stride = t.strides[a];
    for (int i = a; i + 1 < t.ndim; ++i) {
      t.shape[i] = t.shape[i + 1];
      t.strides[i] = t.strides[i + 1];
    }
    t.shape[t.ndim - 1] = size;
    t.strides[t.ndim - 1] = stride;
  }
  return {};
}

Status CallArguments::check_dtype(const Field& f, const Tensor& t) {
  const Tensor* another = f.dtype_of < 0 ? nullptr : &member<Tensor>(op_.fields[f.dtype_of]);
  return dtypes_.match(f, t.dtype, another != nullptr && *another ? &another->dtype : nullptr);
}

void CallArguments::bind_activation() {
  for (const Field& f : op_.fields) {
    if (f.kind != Kind::kInput || f.dtype_rule != DTypeRule::kActivation) continue;
    if (member<Tensor>(f) && check_dtype(f, member<Tensor>(f)).ok()) return;
  }
}

Status CallArguments::wrong_device(const Field& f, const Tensor& t) const {
  return error(f, "expected " + device_string(*first_) + ", where " + first_field_->name +
                      " is, got " + device_string(t));
}

std::string CallArguments::device_string(const Tensor& t) {
  return t.device == Device::kCpu ? "cpu" : "cuda:" + std::to_string(t.device_id);
}

Status CallArguments::check_offsets(const Field& f, const Tensor& t) {
  if (!readable(t) || t.size(0) == 0) return {};
  const int64_t count = t.size(0);
  int64_t previous = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t value = load_index(t, i * t.stride(0));
    if (i == 0 ? value != 0 : value < previous) {
      return error(f, "expected values that rise from 0, got " + std::to_string(value) + " at " +
                          std::to_string(i));
    }
    previous = value;
  }
  const int symbol = op_.find_symbol(f.rises_to);
  if (symbol < 0 || !shapes_.knows(symbol) || previous == shapes_.size(symbol)) return {};
  return error(f, "expected the last value to be " + std::to_string(shapes_.size(symbol)) +
                      ", the rows of " + shapes_.told_by(symbol).name + ", got " +
                      std::to_string(previous));
}

Status CallArguments::check_writable(const Field& f, const Tensor& t) {
  const int dim = repeated_dim(t);
  if (dim >= 0) {
    return error(overwritten_by(f, t), "expected an output without repeated elements, got stride " +
                                           std::to_string(t.strides[dim]) + " in dimension " +
                                           std::to_string(dim));
  }
  return {};
}

Status CallArguments::check_apart(const Field& f, const Tensor& t) {
  for (const Field& input : op_.fields) {
    if (input.kind != Kind::kInput || !is_index(input)) continue;
    const Tensor& index = member<Tensor>(input);
    if (!index || index.data == nullptr || !overlap(index, t)) continue;
    return error(input, "expected memory that nothing is written to, got some of " +
                            overwritten_by(f, t).name + "'s");
  }
  return {};
}

const Field& CallArguments::overwritten_by(const Field& output, const Tensor& t) {
  const std::string& name = output.updates.empty() ? output.may_alias : output.updates;
  for (const Field& f : op_.fields) {
    if (f.name == name && member<Tensor>(f).data == t.data) return f;
  }
  return output;
}

}  // namespace fk
