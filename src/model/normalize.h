// This file declares the changes that a tokenizer makes to a text before it splits it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "model/pattern.h"

namespace fk::model {

struct NormalizeStep {
  enum Kind { kNfc, kPrepend, kReplace } kind;
  std::string text;                        // what kPrepend puts in front, or kReplace in place
  std::shared_ptr<const Pattern> pattern;  // what kReplace replaces; null otherwise
};

// Applies the steps to *text in their order. What they cost is paid from the matcher's work.
Status normalize(const std::vector<NormalizeStep>& steps, Matcher* matcher, std::string* text);

}  // namespace fk::model
