// This file makes kernels that bring tiles into shared memory by tensor copies and multiply them by
// wgmma.
#pragma once

#include "softgpu/check/small_kernel.h"

namespace fk::softgpu {

// Loads a box of 64 columns by `rows` of 2-byte elements, swizzled, with the copy engine.
inline std::string load_tile(const std::string& to, int map, int c0, int c1) {
  return "mov.u32 %r40, " + std::to_string(c0) + ";\nmov.u32 %r41, " + std::to_string(c1) +
         ";\ncp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [" + to +
         "], [%rd" + std::to_string(map) + ", {%r40, %r41}], [%r11];\n";
}

class Tiles : public SmallKernel {
 protected:
  // Returns the map of a tensor of rows by columns elements of 2 bytes, with boxes of 64 columns by
  // `box` rows.
  void* map_of(const uint16_t* data, uint64_t rows, uint64_t columns, uint32_t box) {
    TensorMap map;
    map.rank = 2;
    map.element_bytes = 2;
    map.type = 9;
    map.address = reinterpret_cast<uint64_t>(data);
    map.sizes[0] = columns;
    map.sizes[1] = rows;
    map.strides[1] = 2 * columns;
    map.box[0] = 64;
    map.box[1] = box;
    map.swizzle = Swizzle::k128;
    auto* to = space<uint8_t>(128);
    EXPECT_EQ(encode_tensor_map(to, map), "");
    return to;
  }
};

// Returns the text of d = a b of 64 x n x 64: a is 64 rows of 64 along K; b is n rows of 64 along K
// or, outer-major, 64 rows along K of n = 64.
inline std::string multiply(int n, const std::string& major, const std::string& fence,
                            const std::string& wait, const std::string& type = "bf16") {
  std::string d;
  for (int i = 0; i < n / 2; ++i) d += (i == 0 ? "%f" : ", %f") + std::to_string(10 + i);
  std::string s =
      "mov.u32 %r10, dynamic;\nadd.s32 %r11, %r10, 32768;\nsetp.ne.u32 %p3, %r0, 0;\n"
      "@%p3 bra $made;\nmbarrier.init.shared::cta.b64 [%r11], 1;\n"
      "fence.proxy.async.shared::cta;\n"
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r11], " +
      std::to_string(64 * 128 + (major == "1" ? 64 : n) * 128) + ";\nadd.s32 %r12, %r10, 8192;\n" +
      load_tile("%r10", 0, 0, 0) + load_tile("%r12", 1, 0, 0) +
      "$made:\nbar.sync 0;\n$loop:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r11], 0;\n@!%p1 bra $loop;\n"
      "shr.u32 %r20, %r10, 4;\ncvt.u64.u32 %rd20, %r20;\n"
      "or.b64 %rd21, %rd20, 4611686293305360384;\n"  // swizzled, 1024 bytes to eight rows
      "add.s64 %rd22, %rd21, 512;\n";
  s += fence;
  for (int step = 0; step < 4; ++step) {
    const std::string k = std::to_string(step);
    s += "add.s64 %rd23, %rd21, " + std::to_string(2 * step) + ";\nadd.s64 %rd24, %rd22, " +
         std::to_string((major == "1" ? 128 : 2) * step) + ";\nsetp.ne.u32 %p5, " + k + ", 0;\n" +
         "wgmma.mma_async.sync.aligned.m64n" + std::to_string(n) + "k16.f32." + type + "." + type +
         " {" + d + "}, %rd23, %rd24, %p5, 1, 1, 0, " + major + ";\n";
  }
  s += "wgmma.commit_group.sync.aligned;\n" + wait;
  s += "mul.wide.u32 %rd30, %r0, " + std::to_string(2 * n) + ";\nadd.s64 %rd31, %rd2, %rd30;\n";
  for (int i = 0; i < n / 2; ++i) {
    s += "st.global.f32 [%rd31+" + std::to_string(4 * i) + "], %f" + std::to_string(10 + i) + ";\n";
  }
  return s;
}

}  // namespace fk::softgpu
