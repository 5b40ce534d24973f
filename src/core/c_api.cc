// Defines the C ABI's shared functions. Exceptions (out of memory is the only one expected) stop
// here.
#include <algorithm>
#include <cstdio>
#include <string>

#include "core/build_info.h"
#include "core/last_error.h"
#include "core/op.h"
#include "core/printable.h"
#include "core/thread_pool.h"
#include "cpu/targets.h"
#include "flashkernel/abi.h"

namespace {

// Each thread keeps its message, or where there was no memory for one, as much of it as fits here.
thread_local std::string message;
thread_local char short_message[120];
thread_local bool is_short = false;

// Does as fk::guarded, with the op's name in front of what goes wrong.
template <class Function>
fk_status guarded(const fk_op* op, const Function& function) {
  if (op == nullptr) {
    return fk::set_last_error(FK_INVALID_ARGUMENT, "op", "expected an op handle, got NULL");
  }
  return fk::guarded(op->public_name().c_str(), function);
}

}  // namespace

fk_status fk::set_last_error(fk_status code, std::string text) noexcept {
  return set_last_error(code, "", std::string_view(text));
}

// Names out of files and arguments may hold any bytes; what reads messages expects text.
fk_status fk::set_last_error(fk_status code, const char* what, std::string_view why) noexcept {
  const char* colon = *what == '\0' ? "" : ": ";
  try {
    std::string text = what;
    text += colon;
    text += why;
    message = printable(text);
    is_short = false;
  } catch (const std::bad_alloc&) {
    std::snprintf(short_message, sizeof short_message, "%s%s%.*s", what, colon,
                  static_cast<int>(std::min<size_t>(why.size(), sizeof short_message)), why.data());
    for (char* c = short_message; *c != '\0'; ++c) {
      if (*c < ' ' || *c > '~') *c = '?';
    }
    is_short = true;
  }
  return code;
}

extern "C" {

const char* fk_last_error(void) { return is_short ? short_message : message.c_str(); }

const fk_op* fk_find_op(const char* name) {
  constexpr const fk_op* kNone = nullptr;
  return fk::guarded_or("fk_find_op", kNone,
                        [&] { return name == nullptr ? kNone : fk::Registry::get().find(name); });
}

size_t fk_op_count(void) {
  return fk::guarded_or("fk_op_count", size_t{0}, [] { return fk::Registry::get().ops().size(); });
}

const fk_op* fk_op_at(size_t index) {
  constexpr const fk_op* kNone = nullptr;
  return fk::guarded_or("fk_op_at", kNone, [&] {
    const auto& ops = fk::Registry::get().ops();
    return index < ops.size() ? ops[index].get() : kNone;
  });
}

const char* fk_op_name(const fk_op* op) {
  return op == nullptr ? "" : op->declaration.name.c_str();
}

size_t fk_op_slot_count(const fk_op* op) {
  return op == nullptr ? 0 : op->declaration.fields.size();
}

fk_slot_kind fk_op_slot_kind(const fk_op* op, size_t slot) {
  if (slot >= fk_op_slot_count(op)) return FK_SLOT_NONE;
  switch (op->declaration.fields[slot].kind) {
    case fk::Kind::kInput:
      return FK_SLOT_INPUT;
    case fk::Kind::kOutput:
      return FK_SLOT_OUTPUT;
    case fk::Kind::kNumber:
      return FK_SLOT_NUMBER;
    default:
      return FK_SLOT_INTEGER;
  }
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

// Tells benchmarks what the last call of an op took, on any thread; NULL before one.
FK_API const char* fk_op_last_implementation(const fk_op* op) {
  const fk_op::Implementation* last = op == nullptr ? nullptr : op->last.load();
  return last == nullptr ? nullptr : last->name.c_str();
}

const char* fk_declarations(void) {
  return fk::guarded_or("fk_declarations", "", [] {
    static const std::string* json = [] {
      std::vector<const fk::OpDeclaration*> ops;
      for (const auto& op : fk::Registry::get().ops()) ops.push_back(&op->declaration);
      return new std::string(fk::declarations_json(ops));
    }();
    return json->c_str();
  });
}

const char* fk_version(void) { return FK_VERSION; }

const char* fk_build_info(void) {
  return fk::guarded_or("fk_build_info", "", [] {
    static thread_local std::string json;
    json = fk::build_info_json();
    return json.c_str();
  });
}

void fk_set_num_threads(int32_t threads) { fk::set_num_threads(threads); }
int32_t fk_num_threads(void) {
  return fk::guarded_or("fk_num_threads", int32_t{1}, [] { return fk::num_threads(); });
}

fk_status fk_set_cpu_target(const char* name) {
  return fk::guarded("cpu target", [&]() -> fk::Status {
    if (fk::cpu::set_target(name)) return {};
    return fk::invalid("expected one of " + fk::cpu::target_list() + ", got " + name);
  });
}

}  // extern "C"
