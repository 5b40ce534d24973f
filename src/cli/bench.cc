// This file runs the commands that are written in Python: `fk bench` runs flashkernel.bench, which
// knows the peers and writes reports, and `fk pull` runs flashkernel.pull.
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

// Returns the python3 in this program's own folder, where pip installs both, or "" if there is
// none.
std::string python_beside() {
  char path[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
  if (length <= 0) return "";
  std::string python(path, length);
  python.resize(python.rfind('/') + 1);
  python += "python3";
  return access(python.c_str(), X_OK) == 0 ? python : "";
}

// Returns the Python to run: the one that $FK_PYTHON names, or else the one beside this program, or
// else the first python3 in $PATH.
std::string find_python() {
  const char* named = std::getenv("FK_PYTHON");
  if (named != nullptr && *named != '\0') return named;
  const std::string beside = python_beside();
  return beside.empty() ? "python3" : beside;
}

// This is the code that Python runs. It runs the module as `python -m` would, with two differences:
// it imports nothing from the current folder (it removes the empty entry of sys.path, which -P does
// only from Python 3.11 on), and Ctrl-C prints no traceback.
constexpr char kStart[] = R"(
import sys
sys.path[:] = filter(None, sys.path)
import importlib.util, runpy
command = sys.argv.pop(1)
if importlib.util.find_spec('flashkernel') is None:
    sys.exit(f'fk {command}: {sys.executable} has no module flashkernel; install it there with '
             '`pip install .`, or name another Python in FK_PYTHON')
try:
    runpy.run_module('flashkernel.' + command, run_name='__main__', alter_sys=True)
except KeyboardInterrupt:
    sys.exit(130)
)";

// Replaces this process by Python, running flashkernel.`command` with `arguments`, which end with a
// null. Returns the exit code only if that fails.
int become_python(const char* command, char** arguments) {
  const std::string python = find_python();
  setenv("PYTHONSAFEPATH", "1", 1);  // does the same for the Pythons that this one starts
  std::vector<char*> line = {const_cast<char*>(python.c_str()), const_cast<char*>("-c"),
                             const_cast<char*>(kStart), const_cast<char*>(command)};
  while (*arguments != nullptr) line.push_back(*arguments++);
  line.push_back(nullptr);
  execvp(python.c_str(), line.data());
  std::fprintf(stderr, "fk %s: cannot start %s: %s; name a Python in FK_PYTHON\n", command,
               python.c_str(), std::strerror(errno));
  return 1;
}

}  // namespace

int bench(char** arguments) { return become_python("bench", arguments); }

int pull(char** arguments) { return become_python("pull", arguments); }

}  // namespace fk::cli
