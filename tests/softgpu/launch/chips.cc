#include "softgpu.h"

namespace fk::softgpu {

const Chip& t4() {
  static const Chip chip = [] {
    Chip c;
    c.name = "Tesla T4";
    c.architecture = 75;
    c.multiprocessors = 40;
    c.shared_bytes_per_block = 64 << 10;
    c.shared_bytes_per_block_default = 48 << 10;
    c.shared_bytes_per_multiprocessor = 64 << 10;
    c.threads_per_multiprocessor = 1024;
    c.blocks_per_multiprocessor = 16;
    c.memory_bytes = size_t{15} << 30;
    c.l2_bytes = 4 << 20;
    return c;
  }();
  return chip;
}

const Chip& a100() {
  static const Chip chip = [] {
    Chip c;
    c.name = "A100-SXM4-40GB";
    c.architecture = 80;
    c.multiprocessors = 108;
    c.shared_bytes_per_block = 163 << 10;
    c.shared_bytes_per_block_default = 48 << 10;
    c.shared_bytes_per_multiprocessor = 164 << 10;
    c.reserved_shared_bytes_per_block = 1 << 10;
    c.threads_per_multiprocessor = 2048;
    c.blocks_per_multiprocessor = 32;
    c.memory_bytes = size_t{40} << 30;
    c.l2_bytes = 40 << 20;
    return c;
  }();
  return chip;
}

const Chip& h200() {
  static const Chip chip = [] {
    Chip c;
    c.name = "H200";
    c.architecture = 90;
    c.multiprocessors = 132;
    c.shared_bytes_per_block = 227 << 10;
    c.shared_bytes_per_block_default = 48 << 10;
    c.shared_bytes_per_multiprocessor = 228 << 10;
    c.reserved_shared_bytes_per_block = 1 << 10;
    c.threads_per_multiprocessor = 2048;
    c.blocks_per_multiprocessor = 32;
    c.memory_bytes = size_t{141} << 30;
    c.l2_bytes = 50 << 20;
    return c;
  }();
  return chip;
}

const Chip& chip_of(int architecture) {
  return architecture >= 90 ? h200() : architecture >= 80 ? a100() : t4();
}

}  // namespace fk::softgpu
