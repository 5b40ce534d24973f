// Why an implementation does not take a call, for the error that whoever forced it gets.
//
// A predicate (ImplementationOf::accepts in op.h) that says no may give its reason. Nobody asks for
// one while dispatch looks for the best implementation, and then no text is made.
#pragma once

#include <string>
#include <utility>

namespace fk {

// While one of these lives, predicates on this thread leave their reasons in it.
class RefusalReason {
 public:
  RefusalReason() : before_(std::exchange(current_, this)) {}
  ~RefusalReason() { current_ = before_; }
  RefusalReason(const RefusalReason&) = delete;
  RefusalReason& operator=(const RefusalReason&) = delete;

  // Returns what the last predicate that said no gave; "" where it gave nothing.
  const std::string& text() const { return text_; }

  // Predicates call this: text() is the reason, made only where somebody asks.
  template <class Text>
  static void give(const Text& text) {
    if (current_ != nullptr) current_->text_ = text();
  }

 private:
  static inline thread_local RefusalReason* current_ = nullptr;
  RefusalReason* before_;
  std::string text_;
};

}  // namespace fk
