// This file knows which addresses of global memory there are: allocations, host memory that is lent
// for a call, variables of modules.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "exec/machine.h"
#include "softgpu.h"

namespace fk::softgpu {

class MemoryMap : public Memory {
 public:
  explicit MemoryMap(size_t limit) : limit_(limit) {}
  ~MemoryMap() override;
  void* allocate(size_t bytes, const std::string& what) override;
  bool free(void* pointer) override;
  void add_external(const void* pointer, size_t bytes, const std::string& what,
                    bool writable) override;
  void remove_external(const void* pointer, size_t bytes) override;
  bool contains(const void* pointer, size_t bytes) const override;
  std::string describe(const void* pointer) const override;
  bool is_allocated(const void* pointer) const override;
  size_t allocated_bytes() const override { return allocated_bytes_; }
  std::vector<std::string> leaks() const override;

  // Returns the range that an access belongs to, or nullptr where there is none that holds all of
  // it.
  const KnownRange* find(uint64_t address, uint64_t bytes) const;
  // Returns whether an allocation that was freed holds the address.
  bool was_freed(uint64_t address) const;

 private:
  struct Allocation {
    size_t bytes = 0;
    std::string what;
    bool freed = false;
  };
  struct External {
    uint64_t begin = 0, end = 0;
    std::string what;
    bool writable = true;
  };
  void rebuild() const;

  size_t limit_;
  size_t allocated_bytes_ = 0;
  size_t freed_bytes_ = 0;
  std::map<uint64_t, Allocation> allocations_;
  std::vector<External> externals_;
  mutable std::vector<KnownRange> ranges_;  // sorted, without overlaps
  mutable bool stale_ = false;
};

}  // namespace fk::softgpu
