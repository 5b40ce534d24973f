#include "exec/copy_operands.h"

#include "check/access.h"
#include "check/race_hooks.h"
#include "exec/lanes.h"
#include "memory/memory_map.h"

namespace fk::softgpu {

uint64_t value_in(const Warp& warp, const Instruction& i, int operand, int lane) {
  return (i.wide_address >> operand) & 1 ? lanes_at<uint64_t>(warp, i.at[operand])[lane]
                                         : lanes_at(warp, i.at[operand])[lane];
}

bool global_there(Warp& warp, int lane, uint64_t address, uint64_t bytes, bool write,
                  const char* what) {
  KnownRange& known = warp.run->known[warp.pc];
  if (address < known.begin || address + bytes > known.end) {
    const KnownRange* found = warp.run->memory->find(address, bytes);
    known = found == nullptr ? KnownRange() : *found;
  }
  if (known.end == 0) {
    const auto* pointer = reinterpret_cast<const void*>(address);
    report(warp, warp.run->memory->was_freed(address) ? Problem::kFreed : Problem::kOutOfBounds,
           lane, address,
           std::string(what) + " of " + std::to_string(bytes) + " bytes where there is " +
               warp.run->memory->describe(pointer));
    return false;
  }
  if (write && !known.writable) {
    report(warp, Problem::kReadOnly, lane, address, "a copy to memory that is only to be read");
    return false;
  }
  if (warp.run->launch->early && !warp.waited_for_grid) report_early(warp, 1u << lane, &address);
  return true;
}

Block* shared_there(Warp& warp, int lane, uint32_t* address, uint32_t bytes, uint32_t align) {
  const uint32_t given = *address;
  Block* block = block_of(warp, address);
  if (block == nullptr || *address < kSharedBase || bytes > block->shared_end ||
      *address > block->shared_end - bytes || block->warps_left == 0) {
    report(warp, Problem::kOutOfBounds, lane, given,
           "a copy of " + std::to_string(bytes) + " bytes that reaches out of shared memory");
    return nullptr;
  }
  if (*address % align != 0) {
    report(warp, Problem::kMisaligned, lane, given,
           "a copy at an address of shared memory that is no multiple of " + std::to_string(align));
    return nullptr;
  }
  return block;
}

uint64_t sectors_after(uint64_t* last, uint64_t address, uint64_t bytes) {
  const uint64_t first = address / 32 + (address / 32 + 1 == *last ? 1 : 0);
  *last = (address + bytes + 31) / 32;
  return *last - first;
}

bool tensor_operands(Warp& warp, const Instruction& i, int lane, uint64_t address, TensorMap* map,
                     int32_t* coordinates) {
  if (address % 64 != 0 || warp.run->memory->find(address, 128) == nullptr ||
      !decode_tensor_map(reinterpret_cast<const void*>(address), map)) {
    report(warp, Problem::kOther, lane, address, "there is no tensor map");
    return false;
  }
  if (map->rank != i.list_size) {
    report(warp, Problem::kOther, lane, 0,
           "a tensor map of rank " + std::to_string(map->rank) + ", with coordinates of rank " +
               std::to_string(i.list_size));
    return false;
  }
  const Place* places = warp.run->program->lists.data() + i.list;
  for (int d = 0; d < i.list_size; ++d) {
    coordinates[d] = static_cast<int32_t>(lanes_at(warp, places[d])[lane]);
  }
  return true;
}

uint32_t box_align(const TensorMap& map) {
  // Permuted pieces repeat every 8 rows: a box that does not begin there is not what a
  // multiplication expects, though the copy itself would be done.
  return map.swizzle == Swizzle::k128 ? 1024 : map.swizzle == Swizzle::k64 ? 512 : 128;
}

}  // namespace fk::softgpu
