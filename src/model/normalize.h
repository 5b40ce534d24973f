// What is done with a text before it is split.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "model/pattern.h"

namespace fk::model {

struct NormalizeStep {
  enum Kind { kNfc, kPrepend, kReplace } kind;
  std::string text;  // kPrepend: what; kReplace: by what
  std::shared_ptr<const Pattern> pattern;
};

Status normalize(const std::vector<NormalizeStep>& steps, Matcher* matcher, std::string* text);

}  // namespace fk::model
