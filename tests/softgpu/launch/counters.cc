#include <nlohmann/json.hpp>

#include "exec/machine.h"

namespace fk::softgpu {

const char* name_of(Class kind) {
  static constexpr const char* kNames[] = {
      "tensor",      "fma",          "float",          "integer",       "special",      "convert",
      "move",        "compare",      "branch",         "load_global",   "store_global", "atomic",
      "load_shared", "store_shared", "load_parameter", "matrix_shared", "shuffle",      "barrier",
      "async_copy",  "fence",        "other"};
  static_assert(sizeof kNames / sizeof *kNames == static_cast<size_t>(Class::kCount));
  return kNames[static_cast<size_t>(kind)];
}

namespace {

// Calls visit for every number of Counters, with its name.
template <class C, class Visit>
void visit_numbers(C& c, Visit visit) {
  visit("warp_instructions", c.warp_instructions);
  visit("lane_instructions", c.lane_instructions);
  visit("tensor_flops", c.tensor_flops);
  visit("global_load_bytes", c.global_load_bytes);
  visit("global_store_bytes", c.global_store_bytes);
  visit("global_atomic_bytes", c.global_atomic_bytes);
  visit("global_load_requests", c.global_load_requests);
  visit("global_load_sectors", c.global_load_sectors);
  visit("global_store_requests", c.global_store_requests);
  visit("global_store_sectors", c.global_store_sectors);
  visit("copied_load_requests", c.copied_load_requests);
  visit("copied_load_sectors", c.copied_load_sectors);
  visit("copied_store_requests", c.copied_store_requests);
  visit("copied_store_sectors", c.copied_store_sectors);
  visit("global_unique_bytes", c.global_unique_bytes);
  visit("shared_load_bytes", c.shared_load_bytes);
  visit("shared_store_bytes", c.shared_store_bytes);
  visit("shared_load_wavefronts", c.shared_load_wavefronts);
  visit("shared_store_wavefronts", c.shared_store_wavefronts);
  visit("shared_load_conflicts", c.shared_load_conflicts);
  visit("shared_store_conflicts", c.shared_store_conflicts);
  visit("barriers", c.barriers);
  visit("barrier_waits", c.barrier_waits);
  visit("async_copies", c.async_copies);
  visit("blocks", c.blocks);
  visit("warps", c.warps);
  visit("blocks_run", c.blocks_run);
}

}  // namespace

void Counters::add(const Counters& other) {
  std::vector<uint64_t> numbers;
  visit_numbers(other, [&](const char*, uint64_t value) { numbers.push_back(value); });
  size_t next = 0;
  visit_numbers(*this, [&](const char*, uint64_t& value) { value += numbers[next++]; });
  touched.insert(touched.end(), other.touched.begin(), other.touched.end());
  for (const auto& [name, value] : other.by_class) by_class[name] += value;
  for (const auto& [name, value] : other.by_opcode) by_opcode[name] += value;
}

std::string Counters::to_json() const {
  nlohmann::ordered_json json;
  visit_numbers(*this, [&](const char* name, uint64_t value) { json[name] = value; });
  json["by_class"] = by_class;
  json["by_opcode"] = by_opcode;
  json["touched"] = nlohmann::ordered_json::array();
  for (const Touched& range : touched) json["touched"].push_back({range.bytes, range.of});
  return json.dump();
}

}  // namespace fk::softgpu
