// Walks over PTX text, word by word, and knows which line it is on.
#pragma once

#include <cctype>
#include <string>
#include <string_view>

#include "softgpu.h"

namespace fk::softgpu {

class Scanner {
 public:
  Scanner(std::string_view text, int line) : text_(text), line_(line) {}

  int line() const { return line_; }
  size_t position() const { return at_; }
  std::string_view since(size_t begin) const { return text_.substr(begin, at_ - begin); }

  // Goes over blanks and comments.
  void skip() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '\n') {
        ++line_;
        ++at_;
      } else if (c == ' ' || c == '\t' || c == '\r') {
        ++at_;
      } else if (c == '/' && at_ + 1 < text_.size() && text_[at_ + 1] == '/') {
        skip_line();
      } else if (c == '/' && at_ + 1 < text_.size() && text_[at_ + 1] == '*') {
        skip_comment();
      } else {
        return;
      }
    }
  }
  void skip_line() {
    while (at_ < text_.size() && text_[at_] != '\n') ++at_;
  }
  bool done() {
    skip();
    return at_ == text_.size();
  }
  // Returns the next character that is no blank, or 0 at the end.
  char peek() {
    skip();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(std::string("expected '") + c + "'");
  }
  // Returns letters, digits and what stands in names and mnemonics, as in
  // "ld.global.L1::no_allocate".
  std::string_view word() {
    skip();
    const size_t begin = at_;
    while (at_ < text_.size() && in_word(text_[at_])) {
      if (text_[at_] == ':' && !(at_ + 1 < text_.size() && text_[at_ + 1] == ':')) break;
      at_ += text_[at_] == ':' ? 2 : 1;
    }
    if (begin == at_) fail("expected a name");
    return text_.substr(begin, at_ - begin);
  }
  std::string_view quoted() {
    expect('"');
    const size_t begin = at_;
    while (at_ < text_.size() && text_[at_] != '"') ++at_;
    if (at_ == text_.size()) fail("a string without an end");
    return text_.substr(begin, at_++ - begin);
  }
  // Returns the text from behind an opening brace to the one that closes it, which is passed.
  std::string_view braced() {
    const size_t begin = at_;
    for (int depth = 1; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (c == '\n') ++line_;
      if (c == '/' && at_ + 1 < text_.size() && text_[at_ + 1] == '/') {
        skip_line();
        --at_;
      }
      if (c == '{') ++depth;
      if (c == '}' && --depth == 0) return text_.substr(begin, at_++ - begin);
    }
    fail("a brace without an end");
  }
  // Goes over the rest of a declaration.
  void skip_past(char c) {
    while (at_ < text_.size() && text_[at_] != c) {
      if (text_[at_] == '\n') ++line_;
      ++at_;
    }
    if (at_ < text_.size()) ++at_;
  }
  [[noreturn]] void fail(const std::string& what) const {
    const std::string near(text_.substr(at_, 40));
    throw ParseError("PTX line " + std::to_string(line_) + ": " + what + " at '" +
                         near.substr(0, near.find('\n')) + "'",
                     line_);
  }

 private:
  static bool in_word(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' ||
           c == '.' || c == ':';
  }
  void skip_comment() {
    at_ += 2;
    while (at_ + 1 < text_.size() && !(text_[at_] == '*' && text_[at_ + 1] == '/')) {
      if (text_[at_] == '\n') ++line_;
      ++at_;
    }
    at_ = std::min(at_ + 2, text_.size());
  }

  std::string_view text_;
  size_t at_ = 0;
  int line_;
};

}  // namespace fk::softgpu
