// From slots to a kernel: unpack into the op's argument struct, check every argument against the
// declaration, choose an implementation, run it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "core/access.h"
#include "core/op.h"
#include "core/thread_pool.h"
#include "cpu/targets.h"
#if FK_HAVE_CUDA
#include "cuda/indices_on_host.h"
#include "cuda/runtime.h"
#endif

namespace fk {
namespace {

constexpr size_t kMaxArgsBytes = 8192;

bool deterministic_by_environment() {
  static const bool value = [] {
    const char* env = std::getenv("FK_DETERMINISTIC");
    return env != nullptr && std::strcmp(env, "0") != 0 && *env != '\0';
  }();
  return value;
}

// What the tensors seen so far say about the symbols, the leading dims and the forms of one call.
struct Bindings {
  int64_t size[kMaxSymbols];
  const Field* from[kMaxSymbols] = {};
  const Field* leading_from = nullptr;
  int leading_ndim = 0;
  int64_t leading[kMaxDims] = {};
  int form[kMaxForms];  // number of the alternative
  const Field* form_from[kMaxForms] = {};
  const Field* activation_from = nullptr;
  DType activation = DType::kFloat32;
};

class Call {
 public:
  Call(const fk_op& op, const fk_slot* slots, void* args)
      : op_(op.declaration), slots_(slots), args_(static_cast<char*>(args)) {}

  Status unpack(bool needs_data) {
    for (size_t i = 0; i < op_.fields.size(); ++i) {
      const Field& f = op_.fields[i];
      switch (f.kind) {
        case Kind::kInput:
        case Kind::kOutput:
          FK_RETURN_IF_ERROR(unpack_tensor(f, slots_[i], needs_data));
          break;
        case Kind::kNumber:
          FK_RETURN_IF_ERROR(check_number(f, slots_[i].number));
          member<double>(f) = slots_[i].number;
          break;
        case Kind::kInteger:
          FK_RETURN_IF_ERROR(check_integer(f, slots_[i].integer));
          member<int64_t>(f) = slots_[i].integer;
          bind_symbol_attribute(f, slots_[i].integer);
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

  Status check() {
    bind_activation();
    bool inputs_seen = false;  // they are declared before the outputs
    for (const Field& f : op_.fields) {
      if (f.kind != Kind::kInput && f.kind != Kind::kOutput) continue;
      const Tensor& t = member<Tensor>(f);
      if (!t) continue;
      if (f.kind == Kind::kOutput && !inputs_seen) {
        inputs_seen = true;
        bind_sizes_not_given();
      }
      FK_RETURN_IF_ERROR(check_device(f, t));
      FK_RETURN_IF_ERROR(check_dtype(f, t));
      FK_RETURN_IF_ERROR(check_shape(f, t));
      FK_RETURN_IF_ERROR(check_offsets(f, t));
      if (f.kind == Kind::kOutput) FK_RETURN_IF_ERROR(check_writable(f, t));
    }
    return {};
  }

  // Outputs may be left out, but not all of them, and not one that a flag asks for.
  Status check_outputs() {
    const auto missing = [](const Field& f, const std::string& reason) {
      return error(f, "expected a tensor " + f.type + ", since " + reason + ", got none");
    };
    bool any = false;
    for (size_t i = 0; i < op_.fields.size(); ++i) {
      const Field& f = op_.fields[i];
      if (f.kind != Kind::kOutput) continue;
      if (slots_[i].tensor != nullptr) {
        any = true;
      } else if (f.asked_by >= 0 && slots_[f.asked_by].integer != 0) {
        return missing(f, op_.fields[f.asked_by].name + " is true");
      }
    }
    if (any) return {};
    for (const Field& f : op_.fields) {
      if (f.kind != Kind::kOutput || !output_wanted(op_, f, slots_)) continue;
      return missing(f, "no other output is given");
    }
    return {};
  }

  // What the declaration says of the values in index tensors, once these can be read.
  Status check_values() {
    for (const Field& f : op_.fields) {
      if (f.kind != Kind::kInput || !member<Tensor>(f)) continue;
      FK_RETURN_IF_ERROR(check_offsets(f, member<Tensor>(f)));
    }
    return {};
  }

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

  // Kernels compute with floats.
  static Status check_number(const Field& f, double number) {
    if (std::fabs(number) <= std::numeric_limits<float>::max()) {
      if (number >= f.least && number <= f.most) return {};
      return error(f, "expected " + range_string(f) + ", got " + number_string(number));
    }
    if (f.nullable && number == kLeftOut) return {};
    if (std::isnan(number)) return error(f, "expected a number, got NaN");
    return error(f, (std::isinf(number) ? "expected a finite number, got "
                                        : "expected a number that float32 can hold, got ") +
                        number_string(number));
  }

  static Status check_integer(const Field& f, int64_t number) {
    if (static_cast<double>(number) >= f.least && static_cast<double>(number) <= f.most) return {};
    return error(f, "expected " + range_string(f) + ", got " + std::to_string(number));
  }

  static std::string number_string(double number) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", number);
    return text;
  }

  static std::string range_string(const Field& f) {
    if (f.most == kLeftOut) return "at least " + number_string(f.least);
    if (f.least == -kLeftOut) return "at most " + number_string(f.most);
    return number_string(f.least) + " to " + number_string(f.most);
  }

  Status unpack_tensor(const Field& f, const fk_slot& slot, bool needs_data) {
    if (slot.tensor == nullptr) {
      if (f.kind == Kind::kInput && !f.optional) {
        return error(f, "expected a tensor " + f.type + ", got none");
      }
      return {};
    }
    const Status status = from_dlpack(*slot.tensor, needs_data, &member<Tensor>(f));
    if (!status.ok()) return error(f, status.message());
    return {};
  }

  // The axis is counted in the first tensor that has it, an input or, if only outputs do, an
  // output.
  Status move_axis_last() {
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

  void bind_symbol_attribute(const Field& f, int64_t value) {
    if (f.symbol < 0) return;
    bound_.size[f.symbol] = value;
    bound_.from[f.symbol] = &f;
  }

  void bind_sizes_not_given() {
    for (const auto& [symbol, other] : op_.size_unless_given) {
      const int to = symbol_of(symbol), from = symbol_of(other);
      if (bound_.from[to] != nullptr || bound_.from[from] == nullptr) continue;
      bound_.size[to] = bound_.size[from];
      bound_.from[to] = bound_.from[from];
    }
  }

  int symbol_of(const std::string& name) const {
    return static_cast<int>(std::find(op_.symbols.begin(), op_.symbols.end(), name) -
                            op_.symbols.begin());
  }

  // A parameter may stand before the first activation, whose dtype it is checked against.
  void bind_activation() {
    for (const Field& f : op_.fields) {
      if (f.kind != Kind::kInput || f.dtype_rule != DTypeRule::kActivation) continue;
      if (member<Tensor>(f) && check_dtype(f, member<Tensor>(f)).ok()) return;
    }
  }

  Status check_device(const Field& f, const Tensor& t) {
    if (first_ == nullptr) {
      first_ = &t;
      first_field_ = &f;
      return {};
    }
    if (t.device == first_->device && t.device_id == first_->device_id) return {};
    return error(f, "expected " + device_string(*first_) + ", where " + first_field_->name +
                        " is, got " + device_string(t));
  }

  static std::string device_string(const Tensor& t) {
    return t.device == Device::kCpu ? "cpu" : "cuda:" + std::to_string(t.device_id);
  }

  // The dtype of outputs T.
  DType result() const { return result_dtype(bound_.activation); }

  Status check_dtype(const Field& f, const Tensor& t) {
    if (f.with_float8 && bound_.activation != DType::kFloat8E4M3) {
      return error(f, std::string("expected none, since ") + bound_.activation_from->name + " is " +
                          name_of(bound_.activation) + " and not float8_e4m3fn, got a tensor");
    }
    const auto wrong = [&](const std::string& expected) {
      return error(f, "expected " + expected + ", got " + name_of(t.dtype));
    };
    switch (f.dtype_rule) {
      case DTypeRule::kActivation:
        if (bound_.activation_from == nullptr) {
          const bool float8 = op_.float8 && t.dtype == DType::kFloat8E4M3;
          if (t.dtype != DType::kFloat32 && t.dtype != DType::kFloat16 &&
              t.dtype != DType::kBFloat16 && !float8) {
            return wrong(op_.float8 ? "float32, float16, bfloat16 or float8_e4m3fn"
                                    : "float32, float16 or bfloat16");
          }
          bound_.activation_from = &f;
          bound_.activation = t.dtype;
        } else if (f.kind == Kind::kOutput && t.dtype == result()) {
          return {};
        } else if (f.kind == Kind::kOutput && result() != bound_.activation) {
          return wrong(std::string(name_of(result())) + ", since " + bound_.activation_from->name +
                       " is " + name_of(bound_.activation));
        } else if (t.dtype != bound_.activation) {
          return wrong(std::string(name_of(bound_.activation)) + ", the dtype of " +
                       bound_.activation_from->name);
        }
        return {};
      case DTypeRule::kParameter:
        if (t.dtype == DType::kFloat32) return {};
        if (bound_.activation_from == nullptr) {
          return wrong("float32");
        }
        if (t.dtype != result()) {
          return wrong(result() == DType::kFloat32 ? "float32"
                       : result() != bound_.activation
                           ? std::string("float32 or ") + name_of(result())
                           : std::string("float32 or ") + name_of(bound_.activation) +
                                 ", the dtype of " + bound_.activation_from->name);
        }
        return {};
      case DTypeRule::kFloat32:
        return t.dtype == DType::kFloat32 ? Status() : wrong("float32");
      case DTypeRule::kIndex:
        return t.dtype == DType::kInt32 || t.dtype == DType::kInt64 ? Status()
                                                                    : wrong("int32 or int64");
      case DTypeRule::kInt32:
        return t.dtype == DType::kInt32 ? Status() : wrong("int32");
      case DTypeRule::kSameAs: {
        const Field& other = op_.fields[f.dtype_of];
        const Tensor& o = member<Tensor>(other);
        if (!o) return error(f, "needs " + other.name + ", which is absent");
        return t.dtype == o.dtype
                   ? Status()
                   : wrong(std::string(name_of(o.dtype)) + ", the dtype of " + other.name);
      }
    }
    return {};
  }

  // Binds unbound symbols and compares bound ones. On a mismatch the message shows the whole
  // expected shape with every size already known filled in.
  Status check_shape(const Field& f, const Tensor& t) {
    if (f.shape_of >= 0) return check_same_shape(f, t, op_.fields[f.shape_of]);
    const std::vector<Dim>* shape = alternative(f, t);
    if (shape == nullptr) return shape_error(f, t);
    const bool has_leading = !shape->empty() && (*shape)[0].symbol == Dim::kEllipsis;
    const int trailing = static_cast<int>(shape->size()) - (has_leading ? 1 : 0);
    const int leading = t.ndim - trailing;
    if (has_leading) {
      if (bound_.leading_from == nullptr) {
        bound_.leading_from = &f;
        bound_.leading_ndim = leading;
        for (int i = 0; i < leading; ++i) bound_.leading[i] = t.shape[i];
      } else if (leading != bound_.leading_ndim) {
        return shape_error(f, t, bound_.leading_from);
      }
      for (int i = 0; i < leading; ++i) {
        if (t.shape[i] != bound_.leading[i]) return shape_error(f, t, bound_.leading_from);
      }
    }
    for (int i = 0; i < trailing; ++i) {
      const Dim& dim = (*shape)[i + (has_leading ? 1 : 0)];
      const int64_t size = t.shape[leading + i];
      if (dim.symbol == Dim::kNumber) {
        if (size != dim.offset) return shape_error(f, t);
      } else if (dim.blocks_of >= 0) {
        if (size != blocks(dim)) return shape_error(f, t, bound_.from[dim.symbol]);
      } else if (dim.or_one && size == 1) {
        continue;
      } else if (bound_.from[dim.symbol] == nullptr) {
        if (size < dim.offset) return shape_error(f, t);
        bound_.size[dim.symbol] = size - dim.offset;
        bound_.from[dim.symbol] = &f;
      } else if (bound_.size[dim.symbol] + dim.offset < 0) {
        return error(*bound_.from[dim.symbol], "expected " + op_.symbols[dim.symbol] +
                                                   " to be at least " +
                                                   std::to_string(-dim.offset) + ", got " +
                                                   std::to_string(bound_.size[dim.symbol]));
      } else if (size != bound_.size[dim.symbol] + dim.offset) {
        return shape_error(f, t, bound_.from[dim.symbol]);
      }
    }
    return {};
  }

  // The alternative of a field's shapes that its tensor must have, or NULL where its rank is not
  // that one's. The first tensor of a form decides which that is.
  const std::vector<Dim>* alternative(const Field& f, const Tensor& t) {
    if (f.form_index >= 0 && bound_.form_from[f.form_index] == nullptr) {
      for (size_t i = 0; i < f.shapes.size(); ++i) {
        if (!rank_fits(f.shapes[i], t.ndim)) continue;
        bound_.form[f.form_index] = static_cast<int>(i);
        bound_.form_from[f.form_index] = &f;
        return &f.shapes[i];
      }
      return nullptr;
    }
    const std::vector<Dim>& shape = f.shapes[f.form_index < 0 ? 0 : bound_.form[f.form_index]];
    return rank_fits(shape, t.ndim) ? &shape : nullptr;
  }

  int64_t blocks(const Dim& dim) {
    return block_count(bound_.size[dim.symbol], member<int64_t>(op_.fields[dim.blocks_of]));
  }

  Status check_same_shape(const Field& f, const Tensor& t, const Field& other) {
    const Tensor& o = member<Tensor>(other);
    if (t.ndim == o.ndim && std::equal(t.shape, t.shape + t.ndim, o.shape)) return {};
    return error(f, "expected shape " + shape_string(o) + ", that of " + other.name + ", got " +
                        shape_string(t));
  }

  // Offsets into packed sequences. Only where the data can be read: on a GPU, kernels keep
  // themselves inside the tensors whatever it says.
  Status check_offsets(const Field& f, const Tensor& t) {
    if (f.rises_to.empty() || !readable(t) || t.size(0) == 0) return {};
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
    for (size_t s = 0; s < op_.symbols.size(); ++s) {
      if (op_.symbols[s] != f.rises_to || bound_.from[s] == nullptr) continue;
      if (previous == bound_.size[s]) continue;
      return error(f, "expected the last value to be " + std::to_string(bound_.size[s]) +
                          ", the rows of " + bound_.from[s]->name + ", got " +
                          std::to_string(previous));
    }
    return {};
  }

  static bool rank_fits(const std::vector<Dim>& shape, int ndim) {
    const int named = static_cast<int>(shape.size());
    const bool has_leading = named > 0 && shape[0].symbol == Dim::kEllipsis;
    return has_leading ? ndim >= named - 1 : ndim == named;
  }

  // `from`: the field that told what is wrong here; NULL: one that tells some of the sizes.
  Status shape_error(const Field& f, const Tensor& t, const Field* from = nullptr) {
    std::string expected;
    const Field* form_from = f.form_index < 0 ? nullptr : bound_.form_from[f.form_index];
    const bool decided = form_from != nullptr && form_from != &f;
    if (from == nullptr && decided) from = form_from;
    for (size_t k = 0; k < f.shapes.size(); ++k) {
      if (decided && static_cast<int>(k) != bound_.form[f.form_index]) continue;
      const std::vector<Dim>& shape = f.shapes[k];
      if (!expected.empty()) expected += " or ";
      expected += "(";
      for (size_t i = 0; i < shape.size(); ++i) {
        if (i > 0) expected += ", ";
        expected += dim_string(shape[i], &from);
      }
      expected += shape.size() == 1 && shape[0].symbol != Dim::kEllipsis ? ",)" : ")";
    }
    if (from != nullptr && from != &f) expected += " to fit " + from->name;
    return error(f, "expected shape " + expected + ", got " + shape_string(t));
  }

  std::string dim_string(const Dim& dim, const Field** from) {
    if (dim.symbol == Dim::kNumber) return std::to_string(dim.offset);
    if (dim.symbol == Dim::kEllipsis) {
      if (bound_.leading_from == nullptr) return "...";
      if (*from == nullptr) *from = bound_.leading_from;
      std::string s;
      for (int i = 0; i < bound_.leading_ndim; ++i) {
        if (i > 0) s += ", ";
        s += std::to_string(bound_.leading[i]);
      }
      return s.empty() ? "no leading dims" : s;
    }
    if (dim.blocks_of >= 0) {
      if (bound_.from[dim.symbol] != nullptr) return std::to_string(blocks(dim));
      return op_.symbols[dim.symbol] + "/" + op_.fields[dim.blocks_of].name;
    }
    if (bound_.from[dim.symbol] != nullptr) {
      if (*from == nullptr) *from = bound_.from[dim.symbol];
      const std::string size = std::to_string(bound_.size[dim.symbol] + dim.offset);
      return dim.or_one ? size + " or 1" : size;
    }
    std::string s = op_.symbols[dim.symbol];
    if (dim.offset != 0) s += (dim.offset > 0 ? "+" : "-") + std::to_string(std::abs(dim.offset));
    return dim.or_one ? s + " or 1" : s;
  }

  // Two elements of an output must never share an address: from the shortest stride to the longest,
  // each passes over all that the shorter ones reach.
  Status check_writable(const Field& f, const Tensor& t) {
    if (t.numel() == 0) return {};  // NumPy gives empty arrays strides of 0
    int order[kMaxDims];
    int dims = 0;
    for (int i = t.ndim - 1; i >= 0; --i) {
      if (t.shape[i] == 1) continue;
      int place = dims++;
      for (; place > 0 && std::abs(t.strides[order[place - 1]]) > std::abs(t.strides[i]); --place) {
        order[place] = order[place - 1];
      }
      order[place] = i;
    }
    int64_t reach = 0;
    for (int k = 0; k < dims; ++k) {
      const int64_t stride = std::abs(t.strides[order[k]]);
      if (stride <= reach) {
        return error(overwritten_by(f, t),
                     "expected an output without repeated elements, got stride " +
                         std::to_string(t.strides[order[k]]) + " in dimension " +
                         std::to_string(order[k]));
      }
      reach += (t.shape[order[k]] - 1) * stride;
    }
    return {};
  }

  // The input that an output is written over, which is what callers know it as; or the output.
  const Field& overwritten_by(const Field& output, const Tensor& t) {
    const std::string& name = output.updates.empty() ? output.may_alias : output.updates;
    for (const Field& f : op_.fields) {
      if (f.name == name && member<Tensor>(f).data == t.data) return f;
    }
    return output;
  }

  const OpDeclaration& op_;
  const fk_slot* slots_;
  char* args_;
  const Field* axis_ = nullptr;
  const Tensor* first_ = nullptr;
  const Field* first_field_ = nullptr;
  Bindings bound_;
};

// The argument struct of one call, on the stack.
struct Arguments {
  alignas(16) char storage[kMaxArgsBytes];
};

// `caller`: NULL for a query, which comes without data.
Status prepare(const fk_op& op, const fk_slot* slots, const fk_exec* caller, Arguments* args,
               const fk_op::Implementation** chosen, int* device_id) {
  if (slots == nullptr) return invalid("expected arguments, got NULL");
  if (op.args_bytes > kMaxArgsBytes) {
    return {FK_INTERNAL, "the argument struct is larger than dispatch allows"};
  }
  op.construct_args(args->storage);
  Call call(op, slots, args->storage);
  FK_RETURN_IF_ERROR(call.unpack(/*needs_data=*/caller != nullptr));
  FK_RETURN_IF_ERROR(call.check());
  if (caller != nullptr) FK_RETURN_IF_ERROR(call.check_outputs());
  if (op.validate != nullptr) FK_RETURN_IF_ERROR(op.validate(args->storage));

  const Device device = call.first_tensor().device;
  *device_id = device == Device::kCuda ? call.first_tensor().device_id : -1;
#if FK_HAVE_CUDA
  if (device == Device::kCuda && caller != nullptr && cuda::checks_values()) {
    const cuda::IndicesOnHost on_host(op.declaration, args->storage, *device_id, caller->stream);
    FK_RETURN_IF_ERROR(on_host.status());
    FK_RETURN_IF_ERROR(call.check_values());
    if (op.validate != nullptr) FK_RETURN_IF_ERROR(op.validate(args->storage));
  }
#endif
  const char* device_name = device == Device::kCpu ? "CPU" : "CUDA";
  if (const fk_op::Implementation* forced = op.forced.load(std::memory_order_relaxed)) {
    if (forced->device != device || !forced->accepts(forced->typed.get(), args->storage)) {
      return unsupported("the forced implementation '" + forced->name + "' does not take this " +
                         device_name + " call");
    }
    *chosen = forced;
  } else {
    *chosen = nullptr;
    for (const fk_op::Implementation& i : op.implementations) {
      if (i.device == device && i.accepts(i.typed.get(), args->storage)) {
        *chosen = &i;
        break;
      }
    }
    if (*chosen == nullptr) {
      return unsupported(std::string("this build has no ") + device_name +
                         " implementation for these arguments");
    }
  }
  return {};
}

}  // namespace

bool logs_dispatch() {
  static const bool value = [] {
    const char* env = std::getenv("FK_LOG");
    if (env == nullptr || *env == '\0') return false;
    if (std::strstr(env, "dispatch") != nullptr) return true;
    std::fprintf(stderr, "flashkernel: FK_LOG: expected dispatch, got \"%s\"; ignored\n", env);
    return false;
  }();
  return value;
}

Status call(const fk_op& op, const fk_slot* slots, const fk_exec& caller) {
  Arguments args;
  const fk_op::Implementation* chosen = nullptr;
  int device_id = -1;
  FK_RETURN_IF_ERROR(prepare(op, slots, &caller, &args, &chosen, &device_id));
  const size_t needed = chosen->workspace(chosen->typed.get(), args.storage);
  fk_exec exec = caller;
  if (needed > exec.workspace_bytes && exec.allocate != nullptr) {
    exec.workspace = exec.allocate(exec.allocator, needed);
    exec.workspace_bytes = exec.workspace == nullptr ? 0 : needed;
  }
  if (needed > 0 && (exec.workspace == nullptr || exec.workspace_bytes < needed)) {
    return invalid("workspace: expected at least " + std::to_string(needed) + " bytes, got " +
                   std::to_string(exec.workspace == nullptr ? 0 : exec.workspace_bytes));
  }
  if (needed > 0 && reinterpret_cast<uintptr_t>(exec.workspace) % 64 != 0) {
    return invalid("workspace: expected 64-byte alignment");
  }
  if (exec.parallel_for == nullptr) exec.parallel_for = pool_parallel_for;
  if (deterministic_by_environment()) exec.deterministic = 1;
  op.last.store(chosen, std::memory_order_relaxed);
  if (logs_dispatch()) {
    const bool simd = chosen->device == Device::kCpu && chosen->rank != kReference;
    const char* target = simd ? cpu::active_target() : "";
    std::fprintf(stderr, "flashkernel: %s -> %s (%s%sworkspace %zu bytes)\n",
                 op.declaration.name.c_str(), chosen->name.c_str(), target, *target ? ", " : "",
                 needed);
  }
#if FK_HAVE_CUDA
  if (device_id >= 0) {
    const cuda::DeviceGuard guard(device_id);
    FK_RETURN_IF_ERROR(guard.status());
    return chosen->run(chosen->typed.get(), args.storage, Exec(exec));
  }
#endif
  return chosen->run(chosen->typed.get(), args.storage, Exec(exec));
}

Status query_workspace(const fk_op& op, const fk_slot* slots, size_t* bytes) {
  Arguments args;
  const fk_op::Implementation* chosen = nullptr;
  int device_id = -1;
  FK_RETURN_IF_ERROR(prepare(op, slots, nullptr, &args, &chosen, &device_id));
  *bytes = chosen->workspace(chosen->typed.get(), args.storage);
  return {};
}

Status query_implementation(const fk_op& op, const fk_slot* slots, const char** name) {
  Arguments args;
  const fk_op::Implementation* chosen = nullptr;
  int device_id = -1;
  FK_RETURN_IF_ERROR(prepare(op, slots, nullptr, &args, &chosen, &device_id));
  *name = chosen->name.c_str();
  return {};
}

}  // namespace fk
