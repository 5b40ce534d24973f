// Reads little-endian values one after the other from a file's bytes, and never past their end.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

namespace fk::model {

class Reader {
 public:
  explicit Reader(std::string_view bytes, size_t at = 0) : bytes_(bytes), at_(at) {}

  // Reads a number. Returns false if too few bytes are left, and then does not move on.
  template <class T>
  bool read(T* value) {
    static_assert(std::is_arithmetic_v<T>);
    if (left() < sizeof(T)) return false;
    std::memcpy(value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return true;
  }

  // Reads `length` bytes as a view, in the same way.
  bool read(uint64_t length, std::string_view* value) {
    if (left() < length) return false;
    *value = bytes_.substr(at_, static_cast<size_t>(length));
    at_ += static_cast<size_t>(length);
    return true;
  }

  // These return how many bytes have been read, and how many are left.
  size_t at() const { return at_; }
  size_t left() const { return bytes_.size() - at_; }

 private:
  std::string_view bytes_;
  size_t at_;
};

// Sets *product to a * b and returns true, or returns false if it does not fit. Neither is
// negative.
inline bool multiply(int64_t a, int64_t b, int64_t* product) {
  return !__builtin_mul_overflow(a, b, product);
}

}  // namespace fk::model
