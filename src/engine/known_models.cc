// This file knows the models that have a name, and where this machine caches them.
#include "engine/known_models.h"

#include <pwd.h>
#include <unistd.h>

#include <cstdlib>

namespace fk::engine {
namespace {

struct KnownModel {
  const char* name;
  const char* file;  // its name in cache_folder()
};
// Keep this list the same as the one in bindings/python/flashkernel/pull.py, which fetches them.
constexpr KnownModel kModels[] = {{"smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"}};

bool exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

// Returns an environment variable's value, or "" where it is not set.
std::string from_environment(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

// Finds the user's home the way Python's Path.home() does, so that `fk pull` writes where we look.
std::string home_folder() {
  if (const char* home = std::getenv("HOME"); home != nullptr) return home;
  char text[4096];
  passwd entry, *found = nullptr;
  getpwuid_r(getuid(), &entry, text, sizeof text, &found);
  return found == nullptr ? "" : found->pw_dir;
}

}  // namespace

std::string cache_folder() {
  if (const std::string named = from_environment("FK_CACHE"); !named.empty()) return named;
  std::string base = from_environment("XDG_CACHE_HOME");
  if (base.empty()) base = home_folder() + "/.cache";
  return base + "/flashkernel";
}

Status find_model(const std::string& path_or_name, std::string* path) {
  path->clear();
  if (path_or_name.empty()) return {};  // an empty path stands for the built-in model
  std::string names;
  for (const KnownModel& known : kModels) {
    names += (names.empty() ? "" : ", ") + std::string(known.name);
    if (path_or_name != known.name || exists(path_or_name)) continue;
    *path = cache_folder() + "/" + known.file;
    if (exists(*path)) return {};
    return invalid(path_or_name + " is not in the cache (" + cache_folder() + "); `fk pull " +
                   path_or_name + "` fetches it");
  }
  *path = path_or_name;
  if (exists(path_or_name)) return {};
  return invalid(path_or_name + ": no such file or folder, and no known model (" + names + ")");
}

}  // namespace fk::engine
