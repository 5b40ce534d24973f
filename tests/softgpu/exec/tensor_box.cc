#include "exec/tensor_box.h"

#include <algorithm>
#include <cstring>

namespace fk::softgpu {

namespace {

constexpr uint32_t kMark = 0x53475055;  // says that 128 bytes are a map of ours

// Fills the 128 bytes of CUtensorMap. Boxes and the rank are small.
struct Packed {
  uint32_t mark;
  uint8_t rank, element_bytes, type, swizzle;
  uint64_t address;
  uint64_t sizes[5];
  uint64_t strides[5];
  uint16_t box[5];
  uint8_t rest[6];
};
static_assert(sizeof(Packed) <= 128);

uint32_t swizzle_bytes(Swizzle swizzle) {
  static constexpr uint32_t kBytes[] = {0, 32, 64, 128};
  return kBytes[static_cast<uint32_t>(swizzle)];
}

}  // namespace

std::string encode_tensor_map(void* to, const TensorMap& map) {
  if (map.rank < 1 || map.rank > 5) return "a tensor map of rank " + std::to_string(map.rank);
  if (map.address % 16 != 0) return "a tensor whose address is no multiple of 16";
  const uint32_t e = map.element_bytes;
  if (e != 1 && e != 2 && e != 4 && e != 8) return "elements of " + std::to_string(e) + " bytes";
  for (uint32_t d = 0; d < map.rank; ++d) {
    const std::string of = " along dimension " + std::to_string(d);
    if (map.sizes[d] < 1 || map.sizes[d] > uint64_t{1} << 32) return "an impossible size" + of;
    if (map.box[d] < 1 || map.box[d] > 256) return "a box of more than 256 elements" + of;
    if (d > 0 && (map.strides[d] % 16 != 0 || map.strides[d] >= uint64_t{1} << 40)) {
      return "a stride of " + std::to_string(map.strides[d]) + " bytes" + of;
    }
  }
  const uint32_t row = map.box[0] * e, width = swizzle_bytes(map.swizzle);
  if (row % 16 != 0)
    return "a box whose rows of " + std::to_string(row) + " bytes are no multiple of 16";
  if (width != 0 && row > width) return "a box with rows wider than the swizzle";
  Packed packed{};
  packed.mark = kMark;
  packed.rank = static_cast<uint8_t>(map.rank);
  packed.element_bytes = static_cast<uint8_t>(e);
  packed.type = static_cast<uint8_t>(map.type);
  packed.swizzle = static_cast<uint8_t>(map.swizzle);
  packed.address = map.address;
  for (uint32_t d = 0; d < map.rank; ++d) {
    packed.sizes[d] = map.sizes[d];
    packed.strides[d] = d == 0 ? e : map.strides[d];
    packed.box[d] = static_cast<uint16_t>(map.box[d]);
  }
  std::memset(to, 0, 128);
  std::memcpy(to, &packed, sizeof packed);
  return "";
}

bool decode_tensor_map(const void* from, TensorMap* map) {
  Packed packed;
  std::memcpy(&packed, from, sizeof packed);
  if (packed.mark != kMark || packed.rank < 1 || packed.rank > 5) return false;
  *map = TensorMap();
  map->rank = packed.rank;
  map->element_bytes = packed.element_bytes;
  map->type = packed.type;
  map->swizzle = static_cast<Swizzle>(packed.swizzle);
  map->address = packed.address;
  for (uint32_t d = 0; d < 5; ++d) {
    map->sizes[d] = packed.sizes[d];
    map->strides[d] = packed.strides[d];
    map->box[d] = packed.box[d];
  }
  return true;
}

uint32_t bytes_of_box(const TensorMap& map) {
  uint32_t bytes = map.element_bytes;
  for (uint32_t d = 0; d < map.rank; ++d) bytes *= map.box[d];
  return bytes;
}

std::vector<BoxPiece> pieces_of_box(const TensorMap& map, const int32_t* coordinates,
                                    uint32_t shared) {
  const uint32_t width = swizzle_bytes(map.swizzle);
  const uint32_t row_bytes = map.box[0] * map.element_bytes;
  uint32_t rows = 1;
  for (uint32_t d = 1; d < map.rank; ++d) rows *= map.box[d];
  std::vector<BoxPiece> pieces;
  for (uint32_t row = 0; row < rows; ++row) {
    uint64_t address = map.address;
    bool inside = true;
    uint32_t left = row;
    for (uint32_t d = 1; d < map.rank; ++d) {
      const int64_t at = int64_t{coordinates[d]} + left % map.box[d];
      left /= map.box[d];
      inside &= at >= 0 && static_cast<uint64_t>(at) < map.sizes[d];
      address += static_cast<uint64_t>(at) * map.strides[d];
    }
    // Along the fastest dimension the box may begin before the tensor, or end behind it.
    const int64_t first = coordinates[0], end = first + map.box[0];
    const int64_t size = static_cast<int64_t>(map.sizes[0]);
    const int64_t begin_in = std::clamp<int64_t>(first, 0, size);
    const int64_t end_in = std::clamp<int64_t>(end, 0, size);
    const int64_t e = map.element_bytes;
    // Cut where the tensor begins and ends, and every 16 bytes where pieces are permuted.
    const uint32_t low = inside ? static_cast<uint32_t>((begin_in - first) * e) : row_bytes;
    const uint32_t high = inside ? static_cast<uint32_t>((end_in - first) * e) : row_bytes;
    for (uint32_t at = 0; at < row_bytes;) {
      uint32_t stop = row_bytes;
      if (at < low) stop = std::min(stop, low);
      if (at >= low && at < high) stop = std::min(stop, high);
      if (width != 0) stop = std::min(stop, (at / 16 + 1) * 16);
      uint32_t to = shared + row * row_bytes + at;
      if (width != 0) to ^= ((to >> 7) & (width / 16 - 1)) << 4;
      const bool there = at >= low && at < high;
      const int64_t offset = first * e + at;
      pieces.push_back({there ? address + static_cast<uint64_t>(offset) : 0, to, stop - at});
      at = stop;
    }
  }
  return pieces;
}

}  // namespace fk::softgpu
