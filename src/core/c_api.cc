// The C ABI's shared functions. Exceptions (out of memory is the only one expected) stop here.
#include <exception>
#include <string>

#include "core/build_info.h"
#include "core/last_error.h"
#include "core/op.h"
#include "core/thread_pool.h"
#include "cpu/targets.h"
#include "flashkernel/abi.h"

namespace {

std::string& last_error() {
  static thread_local std::string message;
  return message;
}

fk_status fail(fk_status code, std::string message) {
  return fk::set_last_error(code, std::move(message));
}

template <class Function>
fk_status guarded(const fk_op* op, const Function& function) {
  if (op == nullptr) return fail(FK_INVALID_ARGUMENT, "op: expected an op handle, got NULL");
  try {
    const fk::Status status = function();
    if (status.ok()) return FK_OK;
    return fail(status.code(), op->public_name() + ": " + status.message());
  } catch (const std::exception& e) {
    return fail(FK_INTERNAL, op->public_name() + ": " + e.what());
  }
}

}  // namespace

fk_status fk::set_last_error(fk_status code, std::string message) {
  last_error() = std::move(message);
  return code;
}

extern "C" {

const char* fk_last_error(void) { return last_error().c_str(); }

const fk_op* fk_find_op(const char* name) {
  return name == nullptr ? nullptr : fk::Registry::get().find(name);
}

size_t fk_op_count(void) { return fk::Registry::get().ops().size(); }

const fk_op* fk_op_at(size_t index) {
  const auto& ops = fk::Registry::get().ops();
  return index < ops.size() ? ops[index].get() : nullptr;
}

const char* fk_op_name(const fk_op* op) {
  return op == nullptr ? "" : op->declaration.name.c_str();
}

fk_status fk_op_call(const fk_op* op, const fk_slot* arguments, const fk_exec* exec) {
  static const fk_exec kDefaults = FK_EXEC_DEFAULTS;
  return guarded(op, [&] { return fk::call(*op, arguments, exec == nullptr ? kDefaults : *exec); });
}

fk_status fk_op_workspace(const fk_op* op, const fk_slot* arguments, size_t* bytes) {
  return guarded(op, [&]() -> fk::Status {
    if (bytes == nullptr) return fk::invalid("bytes: expected where to put them, got NULL");
    return fk::query_workspace(*op, arguments, bytes);
  });
}

fk_status fk_op_implementation(const fk_op* op, const fk_slot* arguments, const char** name) {
  return guarded(op, [&]() -> fk::Status {
    if (name == nullptr) return fk::invalid("name: expected where to put it, got NULL");
    return fk::query_implementation(*op, arguments, name);
  });
}

fk_status fk_force_implementation(const fk_op* op, const char* implementation) {
  return guarded(op, [&] { return fk::force_implementation(*op, implementation); });
}

// For benchmarks: what the last call of an op took, of any thread; NULL before one.
FK_API const char* fk_op_last_implementation(const fk_op* op) {
  const fk_op::Implementation* last = op == nullptr ? nullptr : op->last.load();
  return last == nullptr ? nullptr : last->name.c_str();
}

const char* fk_declarations(void) {
  static const std::string* json = [] {
    std::vector<const fk::OpDeclaration*> ops;
    for (const auto& op : fk::Registry::get().ops()) ops.push_back(&op->declaration);
    return new std::string(fk::declarations_json(ops));
  }();
  return json->c_str();
}

const char* fk_version(void) { return FK_VERSION; }

const char* fk_build_info(void) {
  static thread_local std::string json;
  json = fk::build_info_json();
  return json.c_str();
}

void fk_set_num_threads(int32_t threads) { fk::set_num_threads(threads); }
int32_t fk_num_threads(void) { return fk::num_threads(); }

fk_status fk_set_cpu_target(const char* name) {
  if (fk::cpu::set_target(name)) return FK_OK;
  return fail(FK_INVALID_ARGUMENT, std::string("cpu target: expected one of ") +
                                       fk::cpu::target_list() + ", got " + name);
}

}  // extern "C"
