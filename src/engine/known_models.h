// Models by name, and where `fk pull` puts them.
#pragma once

#include <string>

#include "core/status.h"

namespace fk::engine {

// FK_CACHE, or flashkernel in XDG_CACHE_HOME or in ~/.cache.
std::string cache_folder();

// The file that a path or a known model's name stands for. An error says what to do: pull it, or
// which names there are. Nothing stands for the built-in model, as it does for model::load.
Status find_model(const std::string& path_or_name, std::string* path);

}  // namespace fk::engine
