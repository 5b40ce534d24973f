#include "core/call_dtypes.h"

#include <string>

namespace fk {

Status CallDTypes::match(const Field& f, DType dtype, const DType* another) {
  if (f.with_float8 && activation_ != DType::kFloat8E4M3) {
    return invalid(f.name + ": expected none, since " + activation_from_->name + " is " +
                   name_of(activation_) + " and not float8_e4m3fn, got a tensor");
  }
  const auto wrong = [&](const std::string& expected) {
    return invalid(f.name + ": expected " + expected + ", got " + name_of(dtype));
  };
  switch (f.dtype_rule) {
    case DTypeRule::kActivation:
      if (activation_from_ == nullptr) {
        const bool float8 = op_.float8 && dtype == DType::kFloat8E4M3;
        if (dtype != DType::kFloat32 && dtype != DType::kFloat16 && dtype != DType::kBFloat16 &&
            !float8) {
          return wrong(op_.float8 ? "float32, float16, bfloat16 or float8_e4m3fn"
                                  : "float32, float16 or bfloat16");
        }
        activation_from_ = &f;
        activation_ = dtype;
      } else if (f.kind == Kind::kOutput && dtype == result()) {
        return {};
      } else if (f.kind == Kind::kOutput && result() != activation_) {
        return wrong(std::string(name_of(result())) + ", since " + activation_from_->name + " is " +
                     name_of(activation_));
      } else if (dtype != activation_) {
        return wrong(std::string(name_of(activation_)) + ", the dtype of " +
                     activation_from_->name);
      }
      return {};
    case DTypeRule::kParameter:
      if (dtype == DType::kFloat32) return {};
      if (activation_from_ == nullptr) {
        return wrong("float32");
      }
      if (dtype != result()) {
        return wrong(result() == DType::kFloat32 ? "float32"
                     : result() != activation_   ? std::string("float32 or ") + name_of(result())
                                               : std::string("float32 or ") + name_of(activation_) +
                                                     ", the dtype of " + activation_from_->name);
      }
      return {};
    case DTypeRule::kFloat32:
      return dtype == DType::kFloat32 ? Status() : wrong("float32");
    case DTypeRule::kIndex:
      return dtype == DType::kInt32 || dtype == DType::kInt64 ? Status() : wrong("int32 or int64");
    case DTypeRule::kInt32:
      return dtype == DType::kInt32 ? Status() : wrong("int32");
    case DTypeRule::kSameAs: {
      const std::string& other = op_.fields[f.dtype_of].name;
      if (another == nullptr) return invalid(f.name + ": needs " + other + ", which is absent");
      return dtype == *another ? Status()
                               : wrong(std::string(name_of(*another)) + ", the dtype of " + other);
    }
  }
  return {};
}

}  // namespace fk
