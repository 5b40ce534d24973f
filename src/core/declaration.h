// One declaration per op. An op's argument struct lists its tensors and attributes as members and
// names each once in `declare`; the C header, the argument checks, the Python, torch and JAX calls
// and `fk check` are all derived from what is said there.
//
//   struct RmsNormFwd {
//     static constexpr const char* kName = "rms_norm_fwd";
//     static constexpr const char* kDoc = "Root-mean-square norm over the last axis ...";
//     Tensor x, weight, y;
//     double eps;
//     static void declare(Declaration<RmsNormFwd>& d) {
//       d.input("x", &RmsNormFwd::x, "T[..., N]", "activations");
//       d.input("weight", &RmsNormFwd::weight, "P[N]", "scale").optional();
//       d.attribute("eps", &RmsNormFwd::eps, 1e-6, "added to the mean square");
//       d.output("y", &RmsNormFwd::y, "T[..., N]", "the norm");
//     }
//   };
//
// The type of a tensor is written DTYPE[dim, dim, ...], with `|` between alternative shapes. The
// dtypes are:
//   T        the activations' dtype: float32, float16 or bfloat16, the same for all T of a call; of
//            an op that takes_float8 also float8_e4m3fn, and then outputs T are bfloat16
//   P        a parameter: float32 or the outputs' T
//   F        float32
//   I        int32 or int64
//   J        int32
//   @name    the dtype of the tensor `name`; without brackets its shape as well
// core/dim.h explains the dims: numbers, symbols (`N`, the same size wherever it stands), what
// follows from a symbol's size (`W-1`, `4*H`, `N?`, `L/checkpoint`), any number of leading dims
// (`...`), and last dims that may be missing (`H, (P)`).
//
// Alternatives belong together: the tensors of one call all have the first of theirs, or all the
// second, and so on, outputs included. The first tensor that has alternatives decides by its rank
// which it is, the call's form; another tensor in another form is an error. Tensors whose choice
// has nothing to do with the call's form say so: `form("name")` ties only those of that name to
// each other, and a tensor of its `own_form()`, as one whose last dims may be missing, is tied to
// no other.
//
// Inputs give every symbol of an output its size; where an optional input does, the output exists
// only with it (`when`, `@name`), or the size has a default (`size_unless_given`). Inputs are
// declared before outputs. A declaration that breaks either rule aborts, since a tensor whose size
// nothing tells could have any.
//
// A symbol may have a role in the op, which tells how a call can be cut into calls on parts of its
// tensors, on several devices say: `batch`, `independent`, `reduced` below. A symbol without one
// must stay whole. A test cuts calls accordingly.
//
// Gradients are matched by name. An op `<name>_fwd` is differentiable if there is an op
// `<name>_bwd`; that op's input `d<out>` is the gradient of the forward output <out>, its other
// inputs and attributes are the forward's arguments and outputs of the same name, and its output
// `d<in>` is the gradient of the forward input <in>. An integer attribute of an op that bears the
// name of a shape symbol is that symbol's size (how a backward learns a size it has no tensor for).
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/dim.h"
#include "core/tensor.h"

namespace fk {

enum class Kind : uint8_t { kInput, kOutput, kNumber, kInteger, kBoolean, kChoice, kAxis };

enum class DTypeRule : uint8_t { kActivation, kParameter, kFloat32, kIndex, kInt32, kSameAs };

// The dtype that an op's activations take inside a torch.autocast region, as torch has it for its
// own ops. Without a region they must have one dtype.
enum class Autocast : uint8_t {
  kWidest,        // the widest that they come in, as where torch promotes types
  kLower,         // the region's dtype: torch's matrix products, attention and convolutions
  kFloat32OnGpu,  // float32 on a GPU, on a CPU the widest: torch's norms, softmaxes and sums
};

// This is the default of a number that may be left out (None in Python). No number given is
// infinite.
constexpr double kLeftOut = std::numeric_limits<double>::infinity();

// An op has at most so many symbols and forms, since each call keeps what it learns of them on the
// stack.
constexpr int kMaxSymbols = 16, kMaxForms = 8;

// The role of a symbol says how a call can be cut along the dims that have it. The parts are calls
// of their own: each takes its part of the tensors that have the symbol, and all of every other
// tensor. The outputs that have the symbol are then put together from those of the parts, and the
// outputs without it (gradients of what the parts share, say) are sums of theirs.
enum class Role : uint8_t {
  kWhole,        // it cannot be cut: results depend on all elements along it
  kBatch,        // it counts problems, which share parameters at most
  kIndependent,  // it counts parts of a problem that do not see each other: channels, features
  kReduced,      // the outputs are sums over it
};

struct Field {
  std::string name;
  Kind kind;
  std::string doc;
  size_t offset = 0;          // of the member in the argument struct
  bool optional = false;      // inputs: may be NULL
  bool keyword_only = false;  // languages with keyword arguments take it by name
  std::string group;          // languages with tuples take it as part of one, under this name
  bool stacked = false;       // languages with lists take one, stacked along a new first axis

  // Tensors.
  std::string type;  // as written
  DTypeRule dtype_rule = DTypeRule::kActivation;
  int dtype_of = -1;             // kSameAs: index of the field
  std::vector<Dims> shapes;      // alternatives, told apart by rank
  int shape_of = -1;             // instead: index of the field whose shape it has
  std::string form;              // whose alternatives belong together; "": the call's
  int form_index = -1;           // of `form` in OpDeclaration::forms; -1: one shape alone
  bool along_axis = false;       // the kernel sees the axis attribute's axis moved last
  bool saved = false;            // an output only the backward needs
  std::string saved_unless;      // likewise, unless this flag asks for it
  std::string when;              // an output that exists only under this condition
  int asked_by = -1;             // index of the flag among these conditions, if it is one
  std::string may_alias;         // an output that may share memory with this input
  std::string updates;           // likewise; languages whose arrays can change update it
  std::string below;             // an index input whose values lie in [0, symbol)
  std::string rises_to;          // an index input whose values rise from 0 to the symbol's size
  std::string prefer;            // a backward's input: this forward output instead, where it exists
  std::string also_gradient_of;  // a backward's output: the gradient of this forward input as well
  std::string repeats;  // an output that is this input, repeated along the axis: it may be a view
  double drawn_from = 0, drawn_to = 0;  // values that checks draw; both 0: of any sign and size
  bool with_float8 = false;             // an input that only calls with 8-bit activations have
  std::string factors_unless;           // an input without which alone the dims have their factors
  int factors_unless_index = -1;        // that input's index

  // Attributes.
  double number_default = 0;
  int64_t integer_default = 0;
  int symbol = -1;        // kInteger: the shape symbol that bears its name; -1: there is none
  bool nullable = false;  // None is allowed: all axes, or a number left out (kLeftOut)
  double least = -kLeftOut, most = kLeftOut;  // what a number or an integer may be
  std::vector<std::string> choices;           // kChoice; "" is spelled None in Python
};

// This is a declaration without the type of the argument struct. Its fields stand in the order in
// which they were declared, which is that of a call's slots.
struct OpDeclaration {
  std::string name;
  std::string doc;
  std::vector<Field> fields;
  std::vector<std::string> symbols;
  std::vector<Role> roles;           // by symbol
  Role leading_role = Role::kWhole;  // of the leading dims
  std::vector<std::string> forms;    // of fields with alternatives
  bool multiplies = false;  // kernels may round what they multiply to the activations' dtype
  bool reorders = false;    // kernels may take products and sums in another order
  std::vector<std::pair<std::string, std::string>> size_unless_given;  // symbol, whose size it has
  bool float8 = false;  // activations may be 8-bit floats; there is no gradient then
  Autocast autocast = Autocast::kWidest;

  int find(const std::string& field) const;          // -1 if there is none
  int find_symbol(const std::string& symbol) const;  // -1 if there is none
  // Parses `type` into the field's dtype rule and shapes. Aborts on a malformed declaration.
  void set_type(Field& field, const std::string& type);
  // Finds the fields that others name, once all are declared. Aborts on a malformed declaration.
  void finish(const std::vector<std::string>& along_axis);
  // Gives a symbol, or the leading dims ("..."), its role. Aborts on a malformed declaration.
  void set_role(const std::string& symbol, Role role);
};

// Ends the process: a declaration is part of the program, so that a malformed one is a bug, found
// the first time that it loads.
[[noreturn]] void malformed(const std::string& op, const std::string& what);

// Gives the dtype of results, which follows from that of the activations.
constexpr DType result_dtype(DType activation) {
  return activation == DType::kFloat8E4M3 ? DType::kBFloat16 : activation;
}

// Tells whether the output `field` exists in a call, by its attributes and by which tensors it has.
bool output_wanted(const OpDeclaration& op, const Field& field, const fk_slot* slots);

class FieldOptions {
 public:
  FieldOptions(OpDeclaration& op, size_t index) : op_(op), index_(index) {}

  FieldOptions& optional() { return field().optional = true, *this; }
  FieldOptions& stacked() { return field().stacked = true, *this; }
  FieldOptions& saved() { return field().saved = true, *this; }
  FieldOptions& saved_unless(const char* flag) { return field().saved_unless = flag, *this; }
  // Conditions: "input" (it is given), "flag" (it is true), "!flag" (it is false), "choice=value",
  // "choice!=value".
  FieldOptions& when(const char* condition) { return field().when = condition, *this; }
  FieldOptions& may_alias(const char* input) { return field().may_alias = input, *this; }
  // The output is the input's next value: NumPy and torch write it there and do not return it, JAX
  // returns it.
  FieldOptions& updates(const char* input) { return field().updates = input, *this; }
  FieldOptions& drawn_between(double from, double to) {
    return field().drawn_from = from, field().drawn_to = to, *this;
  }
  FieldOptions& prefer(const char* output) { return field().prefer = output, *this; }
  FieldOptions& also_gradient_of(const char* input) {
    return field().also_gradient_of = input, *this;
  }
  FieldOptions& repeats(const char* input) { return field().repeats = input, *this; }
  FieldOptions& below(const char* symbol) { return field().below = symbol, *this; }
  FieldOptions& rises_to(const char* symbol) { return field().rises_to = symbol, *this; }
  FieldOptions& with_float8() { return field().with_float8 = true, *this; }
  // The factors in the input's shape hold only where the optional input `name` is not given: of
  // `2*N` rows, which are two matrices stacked, one matrix of N is left where `name` is the other.
  FieldOptions& factors_unless(const char* name) { return field().factors_unless = name, *this; }
  FieldOptions& form(const char* name) { return field().form = name, *this; }
  FieldOptions& own_form() { return field().form = field().name, *this; }
  // These bound the values that an attribute may have.
  FieldOptions& at_least(double value) { return field().least = value, *this; }
  FieldOptions& at_most(double value) { return field().most = value, *this; }

 private:
  Field& field() { return op_.fields[index_]; }
  OpDeclaration& op_;
  size_t index_;
};

// `declare` is handed one of these: it fills an OpDeclaration and notes where each member lies.
template <class Args>
class Declaration {
 public:
  explicit Declaration(OpDeclaration& op) : op_(op) {}

  FieldOptions input(const char* name, Tensor Args::*member, const char* type, const char* doc) {
    Field& f = add(name, Kind::kInput, doc, offset_of(member));
    op_.set_type(f, type);
    return options();
  }
  FieldOptions output(const char* name, Tensor Args::*member, const char* type, const char* doc) {
    Field& f = add(name, Kind::kOutput, doc, offset_of(member));
    op_.set_type(f, type);
    f.optional = true;
    return options();
  }
  FieldOptions attribute(const char* name, double Args::*member, double value, const char* doc) {
    Field& f = add(name, Kind::kNumber, doc, offset_of(member));
    f.number_default = value;
    f.nullable = value == kLeftOut;
    return options();
  }
  FieldOptions attribute(const char* name, int64_t Args::*member, int64_t value, const char* doc) {
    add(name, Kind::kInteger, doc, offset_of(member)).integer_default = value;
    return options();
  }
  void attribute(const char* name, bool Args::*member, bool value, const char* doc) {
    add(name, Kind::kBoolean, doc, offset_of(member)).integer_default = value;
  }
  void choice(const char* name, int64_t Args::*member, std::vector<std::string> choices,
              int64_t value, const char* doc) {
    Field& f = add(name, Kind::kChoice, doc, offset_of(member));
    f.choices = std::move(choices);
    f.integer_default = value;
  }
  // Declares the axis that the op works along. The tensors in `along` reach the kernel with that
  // axis moved last, and their types are written that way. `nullable`: None means all axes, x
  // flattened.
  void axis(const char* name, int64_t Args::*member, int64_t value, bool nullable,
            const std::vector<std::string>& along, const char* doc) {
    Field& f = add(name, Kind::kAxis, doc, offset_of(member));
    f.integer_default = value;
    f.nullable = nullable;
    axis_along_ = along;
  }
  // Has languages with tuples take these fields, declared one after another, as one argument.
  void group(const char* name, const std::vector<std::string>& members) {
    for (const std::string& member : members) op_.fields[op_.find(member)].group = name;
  }
  // Says that the op has matrix products, whose factors (probabilities, say) tensor cores take in
  // the activations' dtype: checks allow for that rounding, and torch.autocast lowers the
  // activations.
  void multiplies() {
    op_.multiplies = true;
    op_.autocast = Autocast::kLower;
  }
  // Says what torch.autocast does with the activations. Unless this is said, or the op multiplies,
  // they take the widest dtype among them.
  void autocast(Autocast rule) { op_.autocast = rule; }
  // Says that kernels multiply or add in another order than the reference. Checks do not compare
  // results then where a value is infinite or NaN.
  void reorders() { op_.reorders = true; }
  // Gives the symbol the size of `other` where no input tells its own: a batch has as many
  // sequences as rows, unless offsets say how many are packed.
  void size_unless_given(const char* symbol, const char* other) {
    op_.size_unless_given.emplace_back(symbol, other);
  }
  // Lets activations be float8_e4m3fn as well. Outputs T are bfloat16 then, and there is no
  // gradient.
  void takes_float8() { op_.float8 = true; }
  // Has languages with keyword arguments take the fields that are declared after this by name.
  void keyword_only() { keyword_only_ = true; }
  // These give symbols, and the leading dims ("..."), their roles.
  void batch(std::vector<std::string> symbols) { set_roles(std::move(symbols), Role::kBatch); }
  void independent(std::vector<std::string> symbols) {
    set_roles(std::move(symbols), Role::kIndependent);
  }
  void reduced(std::vector<std::string> symbols) { set_roles(std::move(symbols), Role::kReduced); }

  void finish() {
    op_.finish(axis_along_);
    for (const auto& [symbol, role] : roles_) op_.set_role(symbol, role);
  }

 private:
  Field& add(const char* name, Kind kind, const char* doc, size_t offset) {
    Field f{};
    f.name = name;
    f.kind = kind;
    f.doc = doc;
    f.offset = offset;
    f.keyword_only = keyword_only_;
    op_.fields.push_back(std::move(f));
    return op_.fields.back();
  }
  FieldOptions options() { return FieldOptions(op_, op_.fields.size() - 1); }
  void set_roles(std::vector<std::string> symbols, Role role) {
    for (std::string& symbol : symbols) roles_.emplace_back(std::move(symbol), role);
  }

  template <class M>
  static size_t offset_of(M Args::*member) {
    alignas(Args) static char storage[sizeof(Args)];
    Args* args = reinterpret_cast<Args*>(storage);
    return reinterpret_cast<char*>(&(args->*member)) - storage;
  }

  OpDeclaration& op_;
  bool keyword_only_ = false;
  std::vector<std::string> axis_along_;
  std::vector<std::pair<std::string, Role>> roles_;
};

// Writes declarations as JSON.
std::string declarations_json(const std::vector<const OpDeclaration*>& ops);

}  // namespace fk
