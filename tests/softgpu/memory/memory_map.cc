#include "memory/memory_map.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace fk::softgpu {

namespace {

constexpr std::align_val_t kAlign{256};
// So much freed memory is kept, so that what still uses it is found.
constexpr size_t kKeptFreedBytes = size_t{256} << 20;

uint64_t number(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

}  // namespace

MemoryMap::~MemoryMap() {
  for (const auto& [begin, allocation] : allocations_) {
    ::operator delete[](reinterpret_cast<void*>(begin), kAlign);
  }
}

void* MemoryMap::allocate(size_t bytes, const std::string& what) {
  if (bytes > limit_ - allocated_bytes_) return nullptr;
  // Two allocations never touch: an access that runs past one is found.
  void* pointer = ::operator new[](bytes + 256, kAlign, std::nothrow);
  if (pointer == nullptr) return nullptr;
  std::memset(pointer, kPoison, bytes);
  allocations_[number(pointer)] = {bytes, what, false};
  allocated_bytes_ += bytes;
  stale_ = true;
  return pointer;
}

bool MemoryMap::free(void* pointer) {
  const auto found = allocations_.find(number(pointer));
  if (found == allocations_.end() || found->second.freed) return false;
  found->second.freed = true;
  allocated_bytes_ -= found->second.bytes;
  freed_bytes_ += found->second.bytes;
  stale_ = true;
  for (auto it = allocations_.begin();
       freed_bytes_ > kKeptFreedBytes && it != allocations_.end();) {
    if (!it->second.freed) {
      ++it;
      continue;
    }
    freed_bytes_ -= it->second.bytes;
    ::operator delete[](reinterpret_cast<void*>(it->first), kAlign);
    it = allocations_.erase(it);
  }
  return true;
}

void MemoryMap::add_external(const void* pointer, size_t bytes, const std::string& what,
                             bool writable) {
  externals_.push_back({number(pointer), number(pointer) + bytes, what, writable});
  stale_ = true;
}

void MemoryMap::remove_external(const void* pointer, size_t bytes) {
  const auto found = std::find_if(externals_.rbegin(), externals_.rend(), [&](const External& e) {
    return e.begin == number(pointer) && e.end == e.begin + bytes;
  });
  if (found == externals_.rend()) return;
  externals_.erase(std::next(found).base());
  stale_ = true;
}

void MemoryMap::rebuild() const {
  stale_ = false;
  ranges_.clear();
  for (const auto& [begin, allocation] : allocations_) {
    if (!allocation.freed && allocation.bytes > 0) {
      ranges_.push_back({begin, begin + allocation.bytes, true});
    }
  }
  for (const External& e : externals_) {
    if (e.end > e.begin) ranges_.push_back({e.begin, e.end, e.writable});
  }
  std::sort(ranges_.begin(), ranges_.end(),
            [](const KnownRange& a, const KnownRange& b) { return a.begin < b.begin; });
  size_t kept = 0;
  for (size_t i = 0; i < ranges_.size(); ++i) {
    if (kept > 0 && ranges_[i].begin < ranges_[kept - 1].end) {
      ranges_[kept - 1].end = std::max(ranges_[kept - 1].end, ranges_[i].end);
      ranges_[kept - 1].writable |= ranges_[i].writable;
    } else {
      ranges_[kept++] = ranges_[i];
    }
  }
  ranges_.resize(kept);
}

const KnownRange* MemoryMap::find(uint64_t address, uint64_t bytes) const {
  if (stale_) rebuild();
  auto next =
      std::upper_bound(ranges_.begin(), ranges_.end(), address,
                       [](uint64_t value, const KnownRange& range) { return value < range.begin; });
  if (next == ranges_.begin()) return nullptr;
  const KnownRange& range = *std::prev(next);
  return address < range.end && bytes <= range.end - address ? &range : nullptr;
}

bool MemoryMap::was_freed(uint64_t address) const {
  auto next = allocations_.upper_bound(address);
  if (next == allocations_.begin()) return false;
  const auto& [begin, allocation] = *std::prev(next);
  return allocation.freed && address - begin < allocation.bytes;
}

bool MemoryMap::contains(const void* pointer, size_t bytes) const {
  return bytes == 0 || find(number(pointer), bytes) != nullptr;
}

bool MemoryMap::is_allocated(const void* pointer) const {
  auto next = allocations_.upper_bound(number(pointer));
  if (next == allocations_.begin()) return false;
  const auto& [begin, allocation] = *std::prev(next);
  return !allocation.freed && number(pointer) - begin < std::max<size_t>(allocation.bytes, 1);
}

std::string MemoryMap::describe(const void* pointer) const {
  const uint64_t address = number(pointer);
  struct Near {
    int64_t offset = 0;
    uint64_t distance = ~uint64_t{0};
    size_t bytes = 0;
    std::string what;
    bool freed = false;
  } near;
  const auto look = [&](uint64_t begin, uint64_t bytes, const std::string& what, bool freed) {
    const uint64_t distance = address < begin           ? begin - address
                              : address - begin < bytes ? 0
                                                        : address - begin - bytes + 1;
    if (distance < near.distance) {
      near = {static_cast<int64_t>(address - begin), distance, bytes, what, freed};
    }
  };
  for (const External& e : externals_) look(e.begin, e.end - e.begin, e.what, false);
  for (const auto& [begin, a] : allocations_) look(begin, a.bytes, a.what, a.freed);
  if (near.distance == ~uint64_t{0}) return "no allocation; there is none at all";
  const std::string of = "byte " + std::to_string(near.offset) + " of " +
                         (near.what.empty() ? "an allocation" : "'" + near.what + "'") + " of " +
                         std::to_string(near.bytes) + " bytes" + (near.freed ? ", freed" : "");
  if (near.distance == 0) return of;
  if (near.distance > (uint64_t{1} << 30)) return "no allocation near it";
  return "no allocation; it would be " + of;
}

std::vector<std::string> MemoryMap::leaks() const {
  std::vector<std::string> result;
  for (const auto& [begin, allocation] : allocations_) {
    if (allocation.freed) continue;
    result.push_back(std::to_string(allocation.bytes) + " bytes" +
                     (allocation.what.empty() ? "" : " of '" + allocation.what + "'"));
  }
  return result;
}

}  // namespace fk::softgpu
