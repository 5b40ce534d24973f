// This file holds a hash table with open addressing.
#include "model/string_table.h"

#include <cstring>
#include <random>

namespace fk::model {
namespace {

uint32_t hash_of(std::string_view text) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15u;
  const uint64_t secret = hash_secret();
  uint64_t hash = secret ^ text.size();
  uint64_t chunk;
  for (; text.size() >= 8; text.remove_prefix(8)) {
    std::memcpy(&chunk, text.data(), 8);
    hash = mix(hash ^ chunk, secret | kOdd);
  }
  chunk = 0;
  std::memcpy(&chunk, text.data(), text.size());
  hash = mix(hash ^ chunk, secret | kOdd);
  return static_cast<uint32_t>(hash ^ hash >> 32);
}

}  // namespace

uint64_t hash_secret() {
  static const uint64_t secret = [] {
    std::random_device device;
    return uint64_t{device()} << 32 | device();
  }();
  return secret;
}

void StringTable::reserve(size_t strings) {
  size_t slots = 16;
  while (slots < strings * 2) slots *= 2;
  if (slots > slots_.size()) grow(slots);
  entries_.reserve(strings);
}

void StringTable::grow(size_t slots) {
  slots_.assign(slots, 0);
  for (size_t i = 0; i < entries_.size(); ++i) {
    size_t at = entries_[i].hash & (slots - 1);
    while (slots_[at] != 0) at = (at + 1) & (slots - 1);
    slots_[at] = static_cast<uint32_t>(i + 1);
  }
}

// Returns the slot that has the text, or else the empty slot where it would be put.
size_t StringTable::slot_of(std::string_view text, uint32_t hash) const {
  size_t at = hash & (slots_.size() - 1);
  for (; slots_[at] != 0; at = (at + 1) & (slots_.size() - 1)) {
    const Entry& entry = entries_[slots_[at] - 1];
    if (entry.hash == hash && text_of(entry) == text) break;
  }
  return at;
}

void StringTable::set(std::string_view text, int32_t value) {
  if ((entries_.size() + 1) * 2 > slots_.size()) grow(slots_.empty() ? 16 : slots_.size() * 2);
  const uint32_t hash = hash_of(text);
  const size_t at = slot_of(text, hash);
  if (slots_[at] != 0) {
    entries_[slots_[at] - 1].value = value;
    return;
  }
  entries_.push_back({block_.size(), static_cast<uint32_t>(text.size()), hash, value});
  block_.append(text);
  slots_[at] = static_cast<uint32_t>(entries_.size());
}

int32_t StringTable::find(std::string_view text) const {
  if (entries_.empty()) return -1;
  const size_t at = slot_of(text, hash_of(text));
  return slots_[at] == 0 ? -1 : entries_[slots_[at] - 1].value;
}

}  // namespace fk::model
