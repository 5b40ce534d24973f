#include "core/op.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

std::string fk_op::public_name() const {
  const std::string& name = declaration.name;
  const size_t n = name.size();
  return n > 4 && name.compare(n - 4, 4, "_fwd") == 0 ? name.substr(0, n - 4) : name;
}

namespace fk {
namespace {

// The value of `key` in FK_IMPL's "op=implementation,op=implementation".
std::string forced_by_environment(const std::string& key) {
  const char* env = std::getenv("FK_IMPL");
  std::string rest = env == nullptr ? "" : env;
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    const std::string entry = rest.substr(0, comma);
    rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
    const size_t equals = entry.find('=');
    if (equals != std::string::npos && entry.substr(0, equals) == key) {
      return entry.substr(equals + 1);
    }
  }
  return "";
}

}  // namespace

Registry& Registry::get() {
  // Leaked on purpose: ops may be called from other libraries' destructors.
  static Registry* registry = new Registry();
  return *registry;
}

Registry::Registry() { register_all_rooms(*this); }

void Registry::add(std::unique_ptr<fk_op> op) {
  std::stable_sort(op->implementations.begin(), op->implementations.end(),
                   [](const auto& a, const auto& b) { return a.rank > b.rank; });
  const std::string forced = forced_by_environment(op->declaration.name);
  if (!forced.empty()) {
    for (const fk_op::Implementation& i : op->implementations) {
      if (i.name == forced) op->forced = &i;
    }
    if (op->forced == nullptr) {
      std::fprintf(stderr, "flashkernel: FK_IMPL: %s has no implementation '%s'; ignored\n",
                   op->declaration.name.c_str(), forced.c_str());
    }
  }
  ops_.push_back(std::move(op));
}

const fk_op* Registry::find(const std::string& name) const {
  for (const auto& op : ops_) {
    if (op->declaration.name == name) return op.get();
  }
  return nullptr;
}

}  // namespace fk
