#include "cpu/cache.h"

#include <unistd.h>

namespace fk::cpu {

bool pays_to_stream(int64_t bytes) {
  static const int64_t last_level = [] {
    const int64_t size = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return size > 0 ? size : int64_t{32} << 20;  // some machines do not say
  }();
  return bytes >= last_level / 4 * 3;
}

}  // namespace fk::cpu
