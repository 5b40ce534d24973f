// An op is its declaration and a table of implementations, ranked by preference. Dispatch takes the
// best one whose predicate says yes.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/declaration.h"
#include "core/exec.h"
#include "core/status.h"
#include "core/tensor.h"

namespace fk {

// Among the implementations that accept a call, the one of the highest rank is taken.
enum Rank { kReference = 0, kPortable = 10, kTuned = 20, kTunedForChip = 30 };

// A room describes an implementation by one of these, a row in the table of an op whose argument
// struct is Args.
template <class Args>
struct ImplementationOf {
  const char* name;  // "reference", "cpu", "cuda", "cuda_sm90"
  Rank rank;
  // Tells whether this implementation takes a call, whose arguments are valid already. NULL means
  // that it takes every call whose tensors are on the device that it was registered for.
  bool (*accepts)(const Args&);
  Status (*run)(const Args&, const Exec&);
  size_t (*workspace)(const Args&) = nullptr;  // bytes; NULL: none
};

}  // namespace fk

// The C ABI hands out pointers to these.
struct fk_op {
  // Any implementation, without the type of its arguments.
  struct Implementation {
    std::string name;
    int rank;
    fk::Device device;
    // `typed` is the ImplementationOf<Args> that the functions below know how to read.
    std::shared_ptr<const void> typed;
    bool (*accepts)(const void* typed, const void* args);
    fk::Status (*run)(const void* typed, const void* args, const fk::Exec& exec);
    size_t (*workspace)(const void* typed, const void* args);
  };

  fk::OpDeclaration declaration;
  std::vector<Implementation> implementations;  // best rank first
  size_t args_bytes = 0;
  void (*construct_args)(void* storage) = nullptr;
  fk::Status (*validate)(const void* args) = nullptr;
  // Beside the declaration, which never changes, this is what the whole process shares.
  mutable std::atomic<const Implementation*> forced{nullptr};
  mutable std::atomic<const Implementation*> last{nullptr};  // that a call took

  // Users know the op by this name: its own without "_fwd".
  const std::string& public_name() const { return short_name; }
  std::string short_name;
};

namespace fk {

// Gives the name by which users know an op: its own without "_fwd".
std::string public_name_of(const std::string& name);

template <class Args, class = void>
struct HasValidate : std::false_type {};
template <class Args>
struct HasValidate<Args, std::void_t<decltype(Args::validate(std::declval<const Args&>()))>>
    : std::true_type {};

// Adds to an op what implements it on a device, and keeps the best rank first.
void add_implementation(fk_op& op, fk_op::Implementation implementation);
template <class Args>
void add_implementations(fk_op& op, Device device,
                         const std::vector<ImplementationOf<Args>>& implementations) {
  for (const ImplementationOf<Args>& typed : implementations) {
    fk_op::Implementation i;
    i.name = typed.name;
    i.rank = typed.rank;
    i.device = device;
    i.typed = std::make_shared<ImplementationOf<Args>>(typed);
    i.accepts = [](const void* t, const void* args) {
      const auto* impl = static_cast<const ImplementationOf<Args>*>(t);
      return impl->accepts == nullptr || impl->accepts(*static_cast<const Args*>(args));
    };
    i.run = [](const void* t, const void* args, const Exec& exec) {
      return static_cast<const ImplementationOf<Args>*>(t)->run(*static_cast<const Args*>(args),
                                                                exec);
    };
    i.workspace = [](const void* t, const void* args) -> size_t {
      const auto* impl = static_cast<const ImplementationOf<Args>*>(t);
      return impl->workspace == nullptr ? 0 : impl->workspace(*static_cast<const Args*>(args));
    };
    add_implementation(op, std::move(i));
  }
}

// Makes an op of its declaration and what implements it on a CPU. Args may have
// `static Status validate(const Args&)` for what types and shapes cannot say.
template <class Args>
std::unique_ptr<fk_op> make_op(const std::vector<ImplementationOf<Args>>& implementations) {
  static_assert(std::is_trivially_destructible_v<Args>);
  auto op = std::make_unique<fk_op>();
  op->declaration.name = Args::kName;
  op->declaration.doc = Args::kDoc;
  Declaration<Args> declaration(op->declaration);
  Args::declare(declaration);
  declaration.finish();
  op->short_name = public_name_of(op->declaration.name);
  op->args_bytes = sizeof(Args);
  op->construct_args = [](void* storage) { new (storage) Args(); };
  if constexpr (HasValidate<Args>::value) {
    op->validate = [](const void* args) { return Args::validate(*static_cast<const Args*>(args)); };
  }
  add_implementations(*op, Device::kCpu, implementations);
  return op;
}

class Registry {
 public:
  static Registry& get();

  const fk_op* find(std::string_view name) const;
  const std::vector<std::unique_ptr<fk_op>>& ops() const { return ops_; }

  // Registers an op and what implements it on a CPU.
  template <class Args>
  void add(const std::vector<ImplementationOf<Args>>& implementations) {
    ops_.push_back(make_op(implementations));
    by_name_.emplace(Args::kName, ops_.back().get());
  }

  // Adds what implements a registered op on a GPU.
  template <class Args>
  void add_cuda(const std::vector<ImplementationOf<Args>>& implementations) {
    add_implementations(*find_registered(Args::kName), Device::kCuda, implementations);
  }

 private:
  Registry();
  fk_op* find_registered(std::string_view name) const;

  std::vector<std::unique_ptr<fk_op>> ops_;
  // Callers from C look an op up before each call, which a walk over all ops would lengthen.
  std::unordered_map<std::string_view, fk_op*> by_name_;
};

// Calls register_<room>(registry) for every folder under src/ops. The build writes the file that
// defines it.
void register_all_rooms(Registry& registry);

// Has every call of the op take this implementation; NULL restores the choice by rank.
Status force_implementation(const fk_op& op, const char* implementation);

// Checks the arguments, picks an implementation and runs it. This function and the next two, which
// only ask, are the whole path from the C ABI to a kernel.
Status call(const fk_op& op, const fk_slot* slots, const fk_exec& exec);
Status query_workspace(const fk_op& op, const fk_slot* slots, size_t* bytes);
Status query_implementation(const fk_op& op, const fk_slot* slots, const char** name);

}  // namespace fk
