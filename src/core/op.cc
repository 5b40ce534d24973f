#include "core/op.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace fk {
namespace {

// Splits FK_IMPL's "op=implementation,op=implementation" into entries, each of which is what stands
// on either side of a '='.
std::vector<std::pair<std::string, std::string>> forced_by_environment() {
  const char* env = std::getenv("FK_IMPL");
  std::string rest = env == nullptr ? "" : env;
  std::vector<std::pair<std::string, std::string>> entries;
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    const std::string entry = rest.substr(0, comma);
    rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
    const size_t equals = entry.find('=');
    entries.emplace_back(entry.substr(0, equals),
                         equals == std::string::npos ? "" : entry.substr(equals + 1));
  }
  return entries;
}

}  // namespace

Registry& Registry::get() {
  // Leaked on purpose: ops may be called from other libraries' destructors.
  static Registry* registry = new Registry();
  return *registry;
}

Registry::Registry() {
  register_all_rooms(*this);
  for (const auto& [name, forced] : forced_by_environment()) {
    const fk_op* op = find(name);
    if (op == nullptr) {
      std::fprintf(stderr, "flashkernel: FK_IMPL: expected the name of an op, got '%s'; ignored\n",
                   name.c_str());
    } else if (const Status status = force_implementation(*op, forced.c_str()); !status.ok()) {
      std::fprintf(stderr, "flashkernel: FK_IMPL: %s: %s; ignored\n", name.c_str(),
                   status.message().c_str());
    }
  }
}

std::string public_name_of(const std::string& name) {
  const bool forward = name.size() > 4 && name.compare(name.size() - 4, 4, "_fwd") == 0;
  return forward ? name.substr(0, name.size() - 4) : name;
}

void add_implementation(fk_op& op, fk_op::Implementation implementation) {
  op.implementations.push_back(std::move(implementation));
  std::stable_sort(op.implementations.begin(), op.implementations.end(),
                   [](const auto& a, const auto& b) { return a.rank > b.rank; });
}

Status force_implementation(const fk_op& op, const char* implementation) {
  if (implementation == nullptr) {
    op.forced = nullptr;
    return {};
  }
  std::string known;
  for (const fk_op::Implementation& i : op.implementations) {
    if (i.name == implementation) {
      op.forced = &i;
      return {};
    }
    known += (known.empty() ? "" : ", ") + i.name;
  }
  return invalid("implementation: expected one of " + known + ", got " + implementation);
}

const fk_op* Registry::find(std::string_view name) const { return find_registered(name); }

fk_op* Registry::find_registered(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

}  // namespace fk
