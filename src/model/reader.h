// Little-endian values one after the other out of a file's bytes, never past the end.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

namespace fk::model {

class Reader {
 public:
  explicit Reader(std::string_view bytes, size_t at = 0) : bytes_(bytes), at_(at) {}

  // False where too few bytes are left; the place then stays.
  template <class T>
  bool read(T* value) {
    static_assert(std::is_arithmetic_v<T>);
    if (left() < sizeof(T)) return false;
    std::memcpy(value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return true;
  }

  bool read(uint64_t length, std::string_view* value) {
    if (left() < length) return false;
    *value = bytes_.substr(at_, static_cast<size_t>(length));
    at_ += static_cast<size_t>(length);
    return true;
  }

  size_t at() const { return at_; }
  size_t left() const { return bytes_.size() - at_; }

 private:
  std::string_view bytes_;
  size_t at_;
};

// a * b, or false where it does not fit. Neither is negative.
inline bool multiply(int64_t a, int64_t b, int64_t* product) {
  return !__builtin_mul_overflow(a, b, product);
}

}  // namespace fk::model
