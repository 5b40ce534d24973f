#include "softgpu/runtime/fat_binary.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace fk::softgpu {
namespace {

// This is what the registration hands over: a pointer to the images behind a magic number.
struct Wrapper {
  uint32_t magic;
  uint32_t version;
  const unsigned char* data;
  const void* unused;
};
constexpr uint32_t kWrapperMagic = 0x466243B1;

struct Header {
  uint32_t magic;
  uint16_t version;
  uint16_t header_bytes;
  uint64_t bytes;  // of all entries behind the header
};
constexpr uint32_t kHeaderMagic = 0xBA55ED50;

// Stands in front of each image. What lies between the named members is not needed here.
struct Entry {
  uint16_t kind;  // 1: PTX, 2: machine code
  uint16_t version;
  uint32_t header_bytes;
  uint64_t bytes;  // of the image, as it lies here
  uint32_t compressed_bytes;
  uint32_t options_at;
  uint32_t ptx_version;
  uint32_t architecture;
  uint32_t name_at;  // from the start of the entry
  uint32_t name_bytes;
  uint64_t flags;
};
constexpr uint16_t kPtx = 1;
constexpr uint64_t kCompressed = 0x2000 | 0x8000;  // by LZ4, by Zstandard

// Returns the number in ".target sm_90a", which is what the compiler compiled for.
int target_of(const std::string& ptx) {
  const size_t at = ptx.find(".target sm_");
  return at == std::string::npos ? 0 : std::atoi(ptx.c_str() + at + std::strlen(".target sm_"));
}

}  // namespace

FatBinary read_fat_binary(const void* wrapper) {
  FatBinary binary;
  Wrapper outer;
  std::memcpy(&outer, wrapper, sizeof outer);
  if (outer.magic != kWrapperMagic) {
    binary.problem = "the fat binary's wrapper has another magic number than nvcc writes";
    return binary;
  }
  Header header;
  std::memcpy(&header, outer.data, sizeof header);
  if (header.magic != kHeaderMagic) {
    binary.problem = "the fat binary's header has another magic number than nvcc writes";
    return binary;
  }
  const unsigned char* next = outer.data + header.header_bytes;
  const unsigned char* end = next + header.bytes;
  while (next + sizeof(Entry) <= end) {
    Entry entry;
    std::memcpy(&entry, next, sizeof entry);
    const unsigned char* image = next + entry.header_bytes;
    if (entry.header_bytes < sizeof entry || entry.bytes > static_cast<uint64_t>(end - image)) {
      binary.problem = "an image ends behind the fat binary";
      return binary;
    }
    const unsigned char* name = next + entry.name_at;
    next = image + entry.bytes;
    if (entry.kind != kPtx) continue;
    if ((entry.flags & kCompressed) != 0) {
      binary.problem = "the PTX is compressed; compile it with -Xfatbin=-compress=false";
      return binary;
    }
    PtxImage ptx;
    // The image is padded with zeros.
    const auto* text = reinterpret_cast<const char*>(image);
    ptx.ptx.assign(text, strnlen(text, entry.bytes));
    ptx.architecture = target_of(ptx.ptx);
    ptx.source.assign(reinterpret_cast<const char*>(name), entry.name_bytes);
    binary.images.push_back(std::move(ptx));
  }
  return binary;
}

const PtxImage* choose_image(const FatBinary& binary, int architecture) {
  const PtxImage* best = nullptr;
  for (const PtxImage& image : binary.images) {
    if (image.architecture > architecture) continue;
    if (best == nullptr || image.architecture > best->architecture) best = &image;
  }
  return best;
}

}  // namespace fk::softgpu
