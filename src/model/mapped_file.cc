// Opens and maps files, and says what is wrong with those that are none.
#include "model/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace fk::model {

Status MappedFile::open(const std::string& path, std::shared_ptr<const MappedFile>* file) {
  const auto failed = [&](const char* what) {
    return file_error(path, std::string(what) + ": " + std::strerror(errno));
  };
  // Without O_NONBLOCK, opening a pipe would wait for somebody to write.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return failed("cannot be opened");
  struct stat status;
  void* data = nullptr;
  Status result;
  if (::fstat(descriptor, &status) != 0) {
    result = failed("cannot be read");
  } else if (!S_ISREG(status.st_mode)) {
    const char* kind = S_ISFIFO(status.st_mode)  ? "a pipe"
                       : S_ISDIR(status.st_mode) ? "a folder"
                                                 : "something else";
    result = file_error(path, std::string("expected a file, got ") + kind);
  } else if (status.st_size == 0) {
    result = file_error(path, "is empty");
  } else {
    data =
        ::mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (data == MAP_FAILED) result = failed("cannot be mapped");
  }
  ::close(descriptor);
  FK_RETURN_IF_ERROR(result);
  file->reset(
      new MappedFile(path, static_cast<const char*>(data), static_cast<size_t>(status.st_size)));
  constexpr std::string_view kPointer = "version https://git-lfs";
  if ((*file)->bytes().substr(0, kPointer.size()) == kPointer) {
    return file_error(path, "is a Git LFS pointer, not the file; `git lfs pull` fetches that");
  }
  return {};
}

MappedFile::~MappedFile() { ::munmap(const_cast<char*>(data_), size_); }

}  // namespace fk::model
