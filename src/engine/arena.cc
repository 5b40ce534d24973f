#include "engine/arena.h"

#include <sys/mman.h>

#include <algorithm>

#include "core/integers.h"

namespace fk::engine {

Arena::~Arena() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(size_));
}

bool Arena::reserve(int64_t bytes) {
  constexpr int64_t kHugePage = int64_t{2} << 20;
  const int64_t size = round_up(std::max<int64_t>(bytes, 1), kHugePage);
  void* memory = mmap(nullptr, static_cast<size_t>(size), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return false;
  // The system may ignore this advice; small pages are slower but work as well.
  madvise(memory, static_cast<size_t>(size), MADV_HUGEPAGE);
  data_ = static_cast<uint8_t*>(memory);
  size_ = size;
  return true;
}

uint8_t* Arena::take(int64_t bytes) {
  uint8_t* result = data_ + used_;
  used_ += aligned64(bytes);
  return result;
}

}  // namespace fk::engine
