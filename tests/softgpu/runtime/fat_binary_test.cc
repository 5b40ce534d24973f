#include "softgpu/runtime/fat_binary.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace fk::softgpu {
namespace {

struct Wrapper {
  uint32_t magic = 0x466243B1, version = 1;
  const void* data = nullptr;
  const void* unused = nullptr;
};

// Writes a fat binary as nvcc does.
class Writer {
 public:
  Writer() { put(uint32_t{0xBA55ED50}).put(uint16_t{1}).put(uint16_t{16}).put(uint64_t{0}); }

  Writer& image(int kind, const std::string& source, const std::string& content,
                uint64_t flags = 0x11) {
    const uint32_t names_at = 64;
    const uint32_t header = names_at + static_cast<uint32_t>(source.size());
    const size_t begin = bytes_.size();
    put(static_cast<uint16_t>(kind)).put(uint16_t{0x101}).put(header);
    put(uint64_t{content.size()}).put(uint32_t{0}).put(uint32_t{0}).put(uint32_t{0x90000});
    put(uint32_t{0}).put(names_at).put(static_cast<uint32_t>(source.size())).put(flags);
    bytes_.resize(begin + names_at);
    bytes_ += source + content;
    return *this;
  }

  FatBinary read(size_t cut = 0) {
    const uint64_t size = bytes_.size() - 16 - cut;
    std::memcpy(bytes_.data() + 8, &size, sizeof size);
    wrapper_.data = bytes_.data();
    return read_fat_binary(&wrapper_);
  }

  Wrapper wrapper_;
  std::string bytes_;

 private:
  template <class T>
  Writer& put(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
};

std::string ptx_for(const std::string& target) {
  return ".version 9.0\n.target " + target + "\n.address_size 64\n" + std::string(5, '\0');
}

TEST(FatBinary, GivesItsPtxAndLeavesOutMachineCode) {
  Writer writer;
  writer.image(1, "a.cu", ptx_for("sm_75")).image(2, "a.cu", "machine code");
  writer.image(1, "a.cu", ptx_for("sm_90a"));
  const FatBinary binary = writer.read();
  EXPECT_EQ(binary.problem, "");
  ASSERT_EQ(binary.images.size(), 2u);
  EXPECT_EQ(binary.images[0].architecture, 75);
  EXPECT_EQ(binary.images[0].source, "a.cu");
  EXPECT_EQ(binary.images[0].ptx, ".version 9.0\n.target sm_75\n.address_size 64\n");
  EXPECT_EQ(binary.images[1].architecture, 90);
}

TEST(FatBinary, ChoosesTheHighestArchitectureThatIsNotAboveTheChip) {
  Writer writer;
  writer.image(1, "a.cu", ptx_for("sm_90a")).image(1, "a.cu", ptx_for("sm_80"));
  const FatBinary binary = writer.read();
  EXPECT_EQ(choose_image(binary, 75), nullptr);
  ASSERT_NE(choose_image(binary, 80), nullptr);
  EXPECT_EQ(choose_image(binary, 80)->architecture, 80);
  EXPECT_EQ(choose_image(binary, 86)->architecture, 80);
  EXPECT_EQ(choose_image(binary, 90)->architecture, 90);
}

TEST(FatBinary, SaysWhyItCannotBeRead) {
  Writer compressed;
  compressed.image(1, "a.cu", "zstd", 0x8011);
  EXPECT_NE(compressed.read().problem.find("compressed"), std::string::npos);

  Writer cut_short;
  cut_short.image(1, "a.cu", ptx_for("sm_80"));
  EXPECT_NE(cut_short.read(4).problem.find("ends behind"), std::string::npos);

  Writer foreign;
  foreign.wrapper_.magic = 7;
  EXPECT_NE(foreign.read().problem.find("wrapper"), std::string::npos);
  Writer other_header;
  other_header.bytes_[0] = 0;
  EXPECT_NE(other_header.read().problem.find("header"), std::string::npos);
}

}  // namespace
}  // namespace fk::softgpu
