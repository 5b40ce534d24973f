// This file serves every op with one NIF, over FlashKernel's C ABI. A call gives the op's name and
// its slots, in the order of the declaration:
//   {:in, binary, {code, bits}, shape}   an input; the type as DLPack has it, the shape a tuple
//   {:out, {code, bits}, shape}          an output, which becomes a fresh binary
//   nil                                  a tensor that is absent
//   a float, an integer, :infinity       an attribute
// The answer is {:ok, binaries} or {:error, message}. Terms of another form raise ArgumentError.
// `check` only says whether the library would take the call; its inputs may be nil instead of a
// binary. Inputs are never written: binaries may be shared by processes.
#include <erl_nif.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include "flashkernel/abi.h"

extern "C" {
// Does as fk_op_call, with workspace of the library's own.
FK_API int fk_cpu_call(const fk_op* op, const fk_slot* slots);
FK_API fk_status fk_exla_register(const char* library);
}

namespace {

constexpr int kMaxRank = 16;
// No op has so many arguments. What a call is put together in lies on the stack: of a small call
// the allocations would be a good part.
constexpr size_t kMaxSlots = 64;

ERL_NIF_TERM atom_ok, atom_error, atom_nil, atom_in, atom_out, atom_infinity;

ERL_NIF_TERM binary_of(ErlNifEnv* env, const char* text) {
  const size_t size = std::strlen(text);
  ERL_NIF_TERM term;
  unsigned char* data = enif_make_new_binary(env, size, &term);
  if (data == nullptr) return enif_make_badarg(env);
  std::memcpy(data, text, size);
  return term;
}

ERL_NIF_TERM failure(ErlNifEnv* env, const char* message) {
  return enif_make_tuple2(env, atom_error, binary_of(env, message));
}

// Reads a binary without null characters, as a C string.
bool read_text(ErlNifEnv* env, ERL_NIF_TERM term, std::string* out) {
  ErlNifBinary binary;
  if (!enif_inspect_binary(env, term, &binary)) return false;
  out->assign(reinterpret_cast<const char*>(binary.data), binary.size);
  return out->find('\0') == std::string::npos;
}

bool read_type(ErlNifEnv* env, ERL_NIF_TERM term, DLDataType* out) {
  const ERL_NIF_TERM* parts;
  int count, code, bits;
  if (!enif_get_tuple(env, term, &count, &parts) || count != 2) return false;
  if (!enif_get_int(env, parts[0], &code) || !enif_get_int(env, parts[1], &bits)) return false;
  if (code < 0 || code > 255 || (bits != 8 && bits != 16 && bits != 32 && bits != 64)) return false;
  *out = {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  return true;
}

// Describes one tensor of a call, with its sizes.
struct SlotTensor {
  DLTensor tensor;
  int64_t sizes[kMaxRank];
};

// Reads type and shape, and counts the bytes that they make.
bool read_layout(ErlNifEnv* env, ERL_NIF_TERM type, ERL_NIF_TERM shape, SlotTensor* out,
                 size_t* bytes) {
  DLTensor& t = out->tensor;
  t = {};
  const ERL_NIF_TERM* sizes;
  if (!read_type(env, type, &t.dtype)) return false;
  if (!enif_get_tuple(env, shape, &t.ndim, &sizes) || t.ndim > kMaxRank) return false;
  size_t total = t.dtype.bits / 8;
  bool empty = false;
  for (int i = 0; i < t.ndim; ++i) {
    ErlNifSInt64 size;
    if (!enif_get_int64(env, sizes[i], &size) || size < 0) return false;
    out->sizes[i] = size;
    empty = empty || size == 0;
    if (size > 0 && __builtin_mul_overflow(total, static_cast<size_t>(size), &total)) return false;
  }
  *bytes = empty ? 0 : total;
  t.device = {kDLCPU, 0};
  t.shape = out->sizes;
  return true;
}

enum class Reading { kGood, kBadTerm, kOutOfMemory };

// Holds a call as it is put together: what the slots point to, and the binaries of the outputs.
struct Call {
  ErlNifEnv* env;
  bool runs;  // or is only checked: then inputs need no data, and outputs get none
  fk_slot slots[kMaxSlots];
  SlotTensor tensors[kMaxSlots];
  ERL_NIF_TERM outputs[kMaxSlots];
  unsigned output_count = 0;
  std::string problem;  // where a tensor's bytes do not fit its shape

  Call(ErlNifEnv* environment, bool is_run) : env(environment), runs(is_run) {}

  Reading read_input(size_t i, int count, const ERL_NIF_TERM* parts) {
    size_t bytes;
    ErlNifBinary binary;
    if (count != 4 || !enif_is_identical(parts[0], atom_in)) return Reading::kBadTerm;
    if (!read_layout(env, parts[2], parts[3], &tensors[i], &bytes)) return Reading::kBadTerm;
    slots[i].tensor = &tensors[i].tensor;
    if (!runs && enif_is_identical(parts[1], atom_nil)) return Reading::kGood;
    if (!enif_inspect_binary(env, parts[1], &binary)) return Reading::kBadTerm;
    if (binary.size != bytes) {
      problem = "expected a binary of " + std::to_string(bytes) + " bytes, got one of " +
                std::to_string(binary.size);
    }
    tensors[i].tensor.data = binary.data;
    return Reading::kGood;
  }

  Reading read_output(size_t i, int count, const ERL_NIF_TERM* parts) {
    size_t bytes;
    if (count != 3 || !enif_is_identical(parts[0], atom_out)) return Reading::kBadTerm;
    if (!read_layout(env, parts[1], parts[2], &tensors[i], &bytes)) return Reading::kBadTerm;
    slots[i].tensor = &tensors[i].tensor;
    if (!runs) return Reading::kGood;
    // The runtime ends the whole system where it has no memory for a binary: what no machine has is
    // asked for elsewhere first.
    void* const probe = bytes > (size_t{1} << 30) ? std::malloc(bytes) : nullptr;
    if (bytes > (size_t{1} << 30) && probe == nullptr) return Reading::kOutOfMemory;
    std::free(probe);
    ERL_NIF_TERM term;
    tensors[i].tensor.data = enif_make_new_binary(env, bytes, &term);
    if (tensors[i].tensor.data == nullptr && bytes > 0) return Reading::kOutOfMemory;
    outputs[output_count++] = term;
    return Reading::kGood;
  }

  Reading read_slot(size_t i, fk_slot_kind kind, ERL_NIF_TERM term) {
    if (kind == FK_SLOT_INPUT || kind == FK_SLOT_OUTPUT) {
      const ERL_NIF_TERM* parts;
      int count;
      slots[i].tensor = nullptr;
      if (enif_is_identical(term, atom_nil)) return Reading::kGood;
      if (!enif_get_tuple(env, term, &count, &parts) || count == 0) return Reading::kBadTerm;
      return kind == FK_SLOT_INPUT ? read_input(i, count, parts) : read_output(i, count, parts);
    }
    ErlNifSInt64 integer;
    if (kind == FK_SLOT_INTEGER) {
      if (!enif_get_int64(env, term, &integer)) return Reading::kBadTerm;
      slots[i].integer = integer;
      return Reading::kGood;
    }
    if (enif_is_identical(term, atom_infinity)) {
      slots[i].number = std::numeric_limits<double>::infinity();
      return Reading::kGood;
    }
    return enif_get_double(env, term, &slots[i].number) ? Reading::kGood : Reading::kBadTerm;
  }

  Reading read(const fk_op* op, ERL_NIF_TERM list) {
    const size_t count = fk_op_slot_count(op);
    if (count > kMaxSlots) return Reading::kBadTerm;
    ERL_NIF_TERM head;
    for (size_t i = 0; i < count; ++i) {
      if (!enif_get_list_cell(env, list, &head, &list)) return Reading::kBadTerm;
      const Reading reading = read_slot(i, fk_op_slot_kind(op, i), head);
      if (reading != Reading::kGood) return reading;
    }
    return enif_is_empty_list(env, list) ? Reading::kGood : Reading::kBadTerm;
  }
};

ERL_NIF_TERM call_op(ErlNifEnv* env, const ERL_NIF_TERM arguments[], bool runs) {
  std::string name;
  if (!read_text(env, arguments[0], &name)) return enif_make_badarg(env);
  const fk_op* op = fk_find_op(name.c_str());
  if (op == nullptr) return enif_make_badarg(env);
  Call call(env, runs);
  switch (call.read(op, arguments[1])) {
    case Reading::kBadTerm:
      return enif_make_badarg(env);
    case Reading::kOutOfMemory:
      return failure(env, (name + ": out of memory").c_str());
    case Reading::kGood:
      break;
  }
  if (!call.problem.empty()) return failure(env, (name + ": " + call.problem).c_str());
  if (!runs) {
    size_t bytes;
    const fk_status status = fk_op_workspace(op, call.slots, &bytes);
    return status == FK_OK ? atom_ok : failure(env, fk_last_error());
  }
  if (fk_cpu_call(op, call.slots) != FK_OK) return failure(env, fk_last_error());
  return enif_make_tuple2(env, atom_ok,
                          enif_make_list_from_array(env, call.outputs, call.output_count));
}

// No exception may pass through the runtime, which is C.
template <class Function>
ERL_NIF_TERM guarded(ErlNifEnv* env, const Function& function) {
  try {
    return function();
  } catch (const std::exception& e) {
    return failure(env, e.what());
  }
}

ERL_NIF_TERM call(ErlNifEnv* env, int, const ERL_NIF_TERM arguments[]) {
  return guarded(env, [&] { return call_op(env, arguments, /*runs=*/true); });
}

ERL_NIF_TERM check(ErlNifEnv* env, int, const ERL_NIF_TERM arguments[]) {
  return guarded(env, [&] { return call_op(env, arguments, /*runs=*/false); });
}

ERL_NIF_TERM declarations(ErlNifEnv* env, int, const ERL_NIF_TERM[]) {
  return binary_of(env, fk_declarations());
}

ERL_NIF_TERM build_info(ErlNifEnv* env, int, const ERL_NIF_TERM[]) {
  return binary_of(env, fk_build_info());
}

ERL_NIF_TERM set_threads(ErlNifEnv* env, int, const ERL_NIF_TERM arguments[]) {
  int threads;
  if (!enif_get_int(env, arguments[0], &threads) || threads < 1) return enif_make_badarg(env);
  fk_set_num_threads(threads);
  return atom_ok;
}

ERL_NIF_TERM register_exla(ErlNifEnv* env, int, const ERL_NIF_TERM arguments[]) {
  return guarded(env, [&] {
    std::string library;
    if (!read_text(env, arguments[0], &library)) return enif_make_badarg(env);
    return fk_exla_register(library.c_str()) == FK_OK ? atom_ok : failure(env, fk_last_error());
  });
}

int load(ErlNifEnv* env, void**, ERL_NIF_TERM) {
  atom_ok = enif_make_atom(env, "ok");
  atom_error = enif_make_atom(env, "error");
  atom_nil = enif_make_atom(env, "nil");
  atom_in = enif_make_atom(env, "in");
  atom_out = enif_make_atom(env, "out");
  atom_infinity = enif_make_atom(env, "infinity");
  return 0;
}

int upgrade(ErlNifEnv* env, void** data, void**, ERL_NIF_TERM info) {
  return load(env, data, info);
}

// `call` runs on a scheduler for long work, `call_inline` on the caller's own: for small calls,
// since going there and back takes longer than they do.
ErlNifFunc functions[] = {
    {"call", 2, call, ERL_NIF_DIRTY_JOB_CPU_BOUND},
    {"call_inline", 2, call, 0},
    {"check", 2, check, 0},
    {"declarations", 0, declarations, 0},
    {"build_info", 0, build_info, ERL_NIF_DIRTY_JOB_CPU_BOUND},
    {"set_threads", 1, set_threads, ERL_NIF_DIRTY_JOB_CPU_BOUND},
    {"register_exla", 1, register_exla, ERL_NIF_DIRTY_JOB_IO_BOUND},
};

}  // namespace

ERL_NIF_INIT(Elixir.FlashKernel.Native, functions, load, nullptr, upgrade, nullptr)
