// Tells a kernel where and how one call runs: on the caller's stream, workspace and threads.
#pragma once

#include <cstdint>
#include <type_traits>

#include "flashkernel/abi.h"

namespace fk {

class Exec {
 public:
  explicit Exec(const fk_exec& exec) : exec_(exec) {}

  void* stream() const { return exec_.stream; }
  bool deterministic() const { return exec_.deterministic != 0; }

  template <class T = void>
  T* workspace() const {
    return static_cast<T*>(exec_.workspace);
  }
  // The same for a part of the call, whose workspace begins so many bytes further.
  Exec behind(size_t bytes) const {
    Exec part = *this;
    if (part.exec_.workspace != nullptr) {
      part.exec_.workspace = static_cast<char*>(part.exec_.workspace) + bytes;
    }
    return part;
  }

  // Runs body(begin, end) over disjoint ranges of at least `grain` items that cover [0, count), on
  // the caller's thread alone where one range would do.
  template <class Body>
  void parallel_for(int64_t count, int64_t grain, const Body& body) const {
    if (count <= 0) return;
    if (count <= grain) {
      body(int64_t{0}, count);
      return;
    }
    exec_.parallel_for(
        exec_.parallel_pool, count, grain,
        [](int64_t begin, int64_t end, void* context) {
          (*static_cast<const Body*>(context))(begin, end);
        },
        const_cast<Body*>(&body));
  }

 private:
  fk_exec exec_;
};

}  // namespace fk
