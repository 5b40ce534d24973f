// Hands over to Python: `fk bench` to flashkernel.bench, where peers and reports live, and `fk
// pull` to flashkernel.pull.
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cli/commands.h"

namespace fk::cli {
namespace {

// The python3 in the folder this program lies in (pip installs both there), or "".
std::string python_beside() {
  char path[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
  if (length <= 0) return "";
  std::string python(path, length);
  python.resize(python.rfind('/') + 1);
  python += "python3";
  return access(python.c_str(), X_OK) == 0 ? python : "";
}

std::string find_python() {
  const char* named = std::getenv("FK_PYTHON");
  if (named != nullptr && *named != '\0') return named;
  const std::string beside = python_beside();
  return beside.empty() ? "python3" : beside;
}

// Whether the module is there; only asked for a better message.
bool has_module(const std::string& python) {
  const pid_t child = fork();
  if (child < 0) return true;
  if (child == 0) {
    execlp(python.c_str(), python.c_str(), "-c",
           "import importlib.util as u, sys; sys.exit(u.find_spec('flashkernel') is None)",
           static_cast<char*>(nullptr));
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return !WIFEXITED(status) || WEXITSTATUS(status) == 0;
}

// Becomes `python -m module arguments...`; returns only where that fails.
int become_python(const char* command, const char* module, char** arguments) {
  const std::string python = find_python();
  if (!has_module(python)) {
    std::fprintf(stderr,
                 "fk %s: %s has no module flashkernel; install it there with `pip install .`, or "
                 "name another Python in FK_PYTHON\n",
                 command, python.c_str());
    return 1;
  }
  std::vector<char*> line = {const_cast<char*>(python.c_str()), const_cast<char*>("-m"),
                             const_cast<char*>(module)};
  while (*arguments != nullptr) line.push_back(*arguments++);
  line.push_back(nullptr);
  execvp(python.c_str(), line.data());
  std::fprintf(stderr, "fk %s: cannot start %s: %s; name a Python in FK_PYTHON\n", command,
               python.c_str(), std::strerror(errno));
  return 1;
}

}  // namespace

int bench(char** arguments) { return become_python("bench", "flashkernel.bench", arguments); }

int pull(char** arguments) { return become_python("pull", "flashkernel.pull", arguments); }

}  // namespace fk::cli
