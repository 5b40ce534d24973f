// What small tokenizer files are made of that ask for much work or memory.
#pragma once

#include <ctime>
#include <memory>
#include <string>

#include "files.h"
#include "model/formats.h"

namespace fk::model {

// Processor time, which other programs do not lengthen.
inline double seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

inline std::string repeated(const std::string& unit, size_t bytes = 100'000) {
  std::string text;
  while (text.size() < bytes) text += unit;
  return text;
}

// A tokenizer.json of single characters, and whatever is put into it.
inline Json plain_tokenizer() {
  Json vocab = Json::object();
  for (const char* token : {"a", "b", "x", " ", "\xE2\x96\x81"}) {
    vocab[token] = static_cast<int>(vocab.size());
  }
  return {{"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array()}}}};
}

inline Json sequence(const char* list, const Json& part, int count) {
  return {{"type", "Sequence"}, {list, Json(static_cast<size_t>(count), part)}};
}

inline Json replace(const std::string& from, const std::string& to) {
  return {{"type", "Replace"}, {"pattern", {{"String", from}}}, {"content", to}};
}

inline Json splits_at(const std::string& expression) {
  return {{"type", "Split"}, {"pattern", {{"Regex", expression}}}, {"behavior", "Isolated"}};
}

inline Json added(int id, const std::string& content) {
  return {{"id", id}, {"content", content}, {"normalized", false}};
}

inline Status read(const Json& json, std::unique_ptr<Tokenizer>* tokenizer) {
  const std::string file = "tokenizer.json";
  Json parsed;
  FK_RETURN_IF_ERROR(parse_json(file, dump(json), &parsed));
  return tokenizer_from_json(file, parsed, &parsed, tokenizer);
}

}  // namespace fk::model
