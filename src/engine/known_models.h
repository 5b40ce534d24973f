// Finds models by name in the folder where `fk pull` puts them.
#pragma once

#include <string>

#include "core/status.h"

namespace fk::engine {

// Returns the folder that $FK_CACHE names, or else flashkernel/ in $XDG_CACHE_HOME or in ~/.cache.
std::string cache_folder();

// Sets `path` to the file or folder that a path or a known model's name stands for. The empty text
// stands for the built-in model and gives an empty path, which model::load takes to mean the same.
// An error says what to do: pull the model, or which names there are.
Status find_model(const std::string& path_or_name, std::string* path);

}  // namespace fk::engine
