#include "python.h"

#include <dlfcn.h>

namespace fk::torch {

bool Python::bind() {
  bool complete = true;
#define FK_BIND(result, name, arguments)                                    \
  name = reinterpret_cast<result(*) arguments>(dlsym(RTLD_DEFAULT, #name)); \
  complete = complete && name != nullptr;
  FK_PYTHON_FUNCTIONS(FK_BIND)
#undef FK_BIND
#define FK_BIND(type, name)                              \
  name = static_cast<type*>(dlsym(RTLD_DEFAULT, #name)); \
  complete = complete && name != nullptr;
  FK_PYTHON_OBJECTS(FK_BIND)
#undef FK_BIND
  return complete;
}

}  // namespace fk::torch
