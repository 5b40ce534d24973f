#include "cli/terminal.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <new>
#include <stdexcept>

namespace fk::cli {
namespace {

// What a piece of work writes to stderr while that is a terminal, or a pipe.
std::string said(bool terminal, const std::function<void()>& work) {
  int ends[2];
  if (terminal) {
    ends[0] = posix_openpt(O_RDWR | O_NOCTTY);
    if (ends[0] < 0 || grantpt(ends[0]) != 0 || unlockpt(ends[0]) != 0) return "no terminal";
    ends[1] = open(ptsname(ends[0]), O_RDWR | O_NOCTTY);
  } else if (pipe(ends) != 0) {
    return "no pipe";
  }
  const int before = dup(STDERR_FILENO);
  dup2(ends[1], STDERR_FILENO);
  work();
  std::fflush(stderr);
  char bytes[256];
  const ssize_t count = read(ends[0], bytes, sizeof bytes);
  dup2(before, STDERR_FILENO);
  for (const int file : {before, ends[0], ends[1]}) close(file);
  return {bytes, static_cast<size_t>(count)};
}

TEST(Terminal, UnexpectedExceptionsCannotControlIt) {
  int code = 0;
  const auto work = [&] {
    code = to_the_end([]() -> int { throw std::runtime_error("file \x1B[2J\xFF"); });
  };
  EXPECT_EQ(said(true, work), "fk: file \\x1B[2J\\xFF\r\n");
  EXPECT_EQ(code, 1);
  EXPECT_EQ(said(false, work), "fk: file \x1B[2J\xFF\n");
}

TEST(Terminal, ExhaustedMemory) {
  const auto work = [] { to_the_end([]() -> int { throw std::bad_alloc(); }); };
  EXPECT_EQ(said(false, work), "fk: out of memory\n");
  EXPECT_EQ(to_the_end([] { return 7; }), 7);
}

TEST(Terminal, Complaints) {
  EXPECT_EQ(said(true, [] { complain("chat", "\x9B"); }), "fk chat: \\x9B\r\n");
}

}  // namespace
}  // namespace fk::cli
