// Loads the stub of XLA as EXLA's NIF loads XLA, by being linked with it, and tells Elixir what was
// registered there.
#include <erl_nif.h>

#include <cstddef>

extern "C" {
int stub_count();
bool stub_handler(int i, char* text, size_t size);
}

namespace {

ERL_NIF_TERM registered(ErlNifEnv* env, int, const ERL_NIF_TERM[]) {
  ERL_NIF_TERM list = enif_make_list(env, 0);
  for (int i = stub_count() - 1; i >= 0; --i) {
    char text[64];
    const bool good = stub_handler(i, text, sizeof(text));
    const ERL_NIF_TERM pair =
        enif_make_tuple2(env, enif_make_string(env, text, ERL_NIF_LATIN1),
                         enif_make_atom(env, good ? "handler" : "no_handler"));
    list = enif_make_list_cell(env, pair, list);
  }
  return list;
}

ErlNifFunc functions[] = {{"registered", 0, registered, 0}};

}  // namespace

ERL_NIF_INIT(Elixir.EXLA.NIF, functions, nullptr, nullptr, nullptr, nullptr)
