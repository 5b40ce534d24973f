// Applies a tokenizer's normalizers to a text.
#include "model/normalize.h"

#include "model/unicode.h"

namespace fk::model {
namespace {

constexpr uint64_t kStepsPerNfcByte = 8;  // what composing a byte of the text costs

// Replaces all matches of the step's pattern. A text without a match is neither copied nor paid
// for.
Status replace(const NormalizeStep& step, Matcher* matcher, std::string* text) {
  std::string out;
  size_t at = 0, begin, end;
  Matches matches(*step.pattern, *text, matcher);
  while (matches.next(&begin, &end)) {
    out.append(*text, at, begin - at).append(step.text);
    at = end;
    if (out.size() > matcher->work().longest()) break;
  }
  FK_RETURN_IF_ERROR(matches.status());
  if (at == 0) return {};
  out.append(*text, at, std::string::npos);
  FK_RETURN_IF_ERROR(matcher->work().write(out.size()));
  *text = std::move(out);
  return {};
}

}  // namespace

Status normalize(const std::vector<NormalizeStep>& steps, Matcher* matcher, std::string* text) {
  Work& work = matcher->work();
  for (const NormalizeStep& step : steps) {
    switch (step.kind) {
      case NormalizeStep::kNfc: {
        FK_RETURN_IF_ERROR(work.steps(kStepsPerNfcByte * text->size()));
        std::string composed = nfc(*text);
        if (composed == *text) break;
        FK_RETURN_IF_ERROR(work.write(composed.size()));
        *text = std::move(composed);
        break;
      }
      case NormalizeStep::kPrepend:
        if (text->empty() || step.text.empty()) break;
        FK_RETURN_IF_ERROR(work.write(step.text.size() + text->size()));
        text->insert(0, step.text);
        break;
      case NormalizeStep::kReplace:
        FK_RETURN_IF_ERROR(replace(step, matcher, text));
        break;
    }
  }
  return {};
}

}  // namespace fk::model
