// Maps a file's bytes into memory, read-only, for as long as the object lives.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "core/status.h"

namespace fk::model {

class MappedFile {
 public:
  // Maps a regular file that is not empty.
  static Status open(const std::string& path, std::shared_ptr<const MappedFile>* file);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::string_view bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }

 private:
  MappedFile(std::string path, const char* data, size_t size)
      : path_(std::move(path)), data_(data), size_(size) {}

  std::string path_;
  const char* data_;
  size_t size_;
};

// Returns the error "<file>: <what>", as in "model.gguf: tokenizer.ggml.tokens: expected ..., got
// ...".
inline Status file_error(const std::string& file, const std::string& what) {
  return invalid(file + ": " + what);
}

}  // namespace fk::model
