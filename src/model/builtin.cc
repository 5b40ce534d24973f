#include "model/builtin.h"

// The assembler copies the bytes of the file that the build names into the library.
asm(R"(
.section .rodata
.balign 64
.hidden fk_builtin_model_begin
.global fk_builtin_model_begin
fk_builtin_model_begin:
.incbin ")" FK_BUILTIN_MODEL R"("
.hidden fk_builtin_model_end
.global fk_builtin_model_end
fk_builtin_model_end:
.previous
)");

extern "C" {
extern const char fk_builtin_model_begin[] __attribute__((visibility("hidden")));
extern const char fk_builtin_model_end[] __attribute__((visibility("hidden")));
}

namespace fk::model {

std::string_view builtin_model() {
  return {fk_builtin_model_begin,
          static_cast<size_t>(fk_builtin_model_end - fk_builtin_model_begin)};
}

}  // namespace fk::model
