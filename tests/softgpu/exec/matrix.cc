// This file executes matrix instructions of one warp: mma.sync, ldmatrix, stmatrix, movmatrix.
// Fragments are as in the PTX manual, with lane = 4 g + t.
#include "exec/memory_ops.h"
#include "exec/small_floats.h"
#include "exec/tables.h"

namespace fk::softgpu {

namespace {

inline void transpose(const float (&from)[8][8], float (&to)[8][8]) {
  for (int r = 0; r < 8; ++r) {
    for (int c = 0; c < 8; ++c) to[c][r] = from[r][c];
  }
}

// Computes c += a b for eight rows of a.
inline void multiply_8_8(const float (&a)[8][8], const float (&b)[8][8], float (&c)[8][8]) {
#if defined(__AVX2__) && defined(__FMA__)
  __m256 sums[8];
  for (int r = 0; r < 8; ++r) sums[r] = _mm256_load_ps(c[r]);
  for (int k = 0; k < 8; ++k) {
    const __m256 row = _mm256_load_ps(b[k]);
    for (int r = 0; r < 8; ++r) sums[r] = _mm256_fmadd_ps(_mm256_set1_ps(a[r][k]), row, sums[r]);
  }
  for (int r = 0; r < 8; ++r) _mm256_store_ps(c[r], sums[r]);
#else
  for (int r = 0; r < 8; ++r) {
    for (int k = 0; k < 8; ++k) {
      for (int n = 0; n < 8; ++n) c[r][n] = __builtin_fmaf(a[r][k], b[k][n], c[r][n]);
    }
  }
#endif
}

// Computes d = a b + c with 16 x K by K x 8, where K = 8 kSteps: the list holds d, a, b, c. A
// register of a or b is 8 x 8 elements, row by row (of b: column by column), and two of c are 8 x 8
// floats.
template <class Elements, int kSteps>
void multiply_16_8(Warp& warp, const Instruction& i, uint32_t) {
  constexpr int kA = 2 * kSteps;
  const Place* places = warp.run->program->lists.data() + i.list;
  const auto elements = [&](int operand, float(&to)[8][8]) {
    uint16_t raw[64];
    std::memcpy(raw, lanes_at(warp, places[operand]), sizeof raw);
    Elements::expand(raw, to[0], 64);
  };
  alignas(64) float a[kA][8][8];
  alignas(64) float b[kSteps][8][8];
  alignas(64) float c[2][8][8];
  for (int part = 0; part < kA; ++part) elements(4 + part, a[part]);
  for (int part = 0; part < kSteps; ++part) {
    alignas(64) float columns[8][8];
    elements(4 + kA + part, columns);
    transpose(columns, b[part]);
  }
  for (int half = 0; half < 2; ++half) {
    const uint32_t* even = lanes_at(warp, places[4 + kA + kSteps + 2 * half]);
    const uint32_t* odd = lanes_at(warp, places[4 + kA + kSteps + 2 * half + 1]);
    float* to = c[half][0];
    for (int l = 0; l < kLanes; ++l) {
      to[2 * l] = float_of(even[l]);
      to[2 * l + 1] = float_of(odd[l]);
    }
    for (int part = 0; part < kSteps; ++part) {
      multiply_8_8(a[2 * part + half], b[part], c[half]);
    }
  }
  for (int half = 0; half < 2; ++half) {
    uint32_t* even = lanes_to<uint32_t>(warp, places[2 * half]);
    uint32_t* odd = lanes_to<uint32_t>(warp, places[2 * half + 1]);
    const float* from = c[half][0];
    for (int l = 0; l < kLanes; ++l) {
      even[l] = bits_of(canonical(from[2 * l]));
      odd[l] = bits_of(canonical(from[2 * l + 1]));
    }
  }
  warp.run->counts.tensor_flops += 2 * 16 * 8 * 8 * kSteps;
}

// Finds the rows that the lanes name, of 16 bytes each. Returns false where one of them is not to
// be had.
template <Access kAccess>
inline bool matrix_rows(Warp& warp, const Instruction& i, int operand, int matrices,
                        uint64_t* rows) {
  alignas(64) uint32_t addresses[kLanes];
  const uint32_t lanes = matrices == 4 ? kAllLanes : (1u << (8 * matrices)) - 1;
  narrow_addresses_of(warp, i, operand, i.immediate, lanes, addresses);
  return prepare_shared<kAccess>(warp, lanes, addresses, 16, rows) == lanes;
}

inline void transpose(uint16_t (&matrix)[8][8]) {
  for (int r = 0; r < 8; ++r) {
    for (int c = 0; c < r; ++c) std::swap(matrix[r][c], matrix[c][r]);
  }
}

template <int kMatrices, bool kTranspose>
void load_matrices(Warp& warp, const Instruction& i, uint32_t) {
  uint64_t rows[kLanes];
  if (!matrix_rows<Access::kLoad>(warp, i, 1, kMatrices, rows)) return;
  alignas(64) uint16_t matrix[kMatrices][8][8];
  for (int row = 0; row < 8 * kMatrices; ++row) {
    std::memcpy(matrix[row / 8][row % 8], reinterpret_cast<const void*>(rows[row]), 16);
  }
  for (int m = 0; m < kMatrices; ++m) {
    if constexpr (kTranspose) transpose(matrix[m]);
    std::memcpy(lanes_to<uint32_t>(warp, register_of(warp, i, 0, m)), matrix[m], 128);
  }
}

template <int kMatrices, bool kTranspose>
void store_matrices(Warp& warp, const Instruction& i, uint32_t) {
  uint64_t rows[kLanes];
  if (!matrix_rows<Access::kStore>(warp, i, 0, kMatrices, rows)) return;
  for (int m = 0; m < kMatrices; ++m) {
    alignas(64) uint16_t matrix[8][8];
    std::memcpy(matrix, lanes_at(warp, register_of(warp, i, 1, m)), 128);
    if constexpr (kTranspose) transpose(matrix);
    for (int row = 0; row < 8; ++row) {
      std::memcpy(reinterpret_cast<void*>(rows[8 * m + row]), matrix[row], 16);
    }
  }
}

inline void transpose_in_registers(Warp& warp, const Instruction& i, uint32_t) {
  alignas(64) uint16_t matrix[8][8];
  std::memcpy(matrix, lanes_at(warp, i.at[1]), 128);
  transpose(matrix);
  std::memcpy(lanes_to<uint32_t>(warp, i.at[0]), matrix, 128);
}

template <int kMatrices>
void add_matrix_moves(Operations& table, const std::string& count) {
  const char* load = "=v a";
  const char* store = "a v";
  for (const char* space : {".shared", ".shared::cta"}) {
    const std::string end = std::string(space) + ".b16";
    const std::string shape = ".sync.aligned.m8n8." + count;
    table["ldmatrix" + shape + end] = {load, load_matrices<kMatrices, false>, Class::kMatrixShared,
                                       Control::kConverge};
    table["ldmatrix" + shape + ".trans" + end] = {load, load_matrices<kMatrices, true>,
                                                  Class::kMatrixShared, Control::kConverge};
    table["stmatrix" + shape + end] = {store, store_matrices<kMatrices, false>,
                                       Class::kMatrixShared, Control::kConverge};
    table["stmatrix" + shape + ".trans" + end] = {store, store_matrices<kMatrices, true>,
                                                  Class::kMatrixShared, Control::kConverge};
  }
}

}  // namespace

void add_matrix_operations(Operations& table) {
  const auto add = [&](const std::string& shape, const std::string& type, Execute execute) {
    table["mma.sync.aligned." + shape + ".row.col.f32." + type + "." + type + ".f32"] = {
        "=v v v v", execute, Class::kTensor, Control::kConverge};
  };
  add("m16n8k8", "f16", multiply_16_8<HalfElements, 1>);
  add("m16n8k8", "bf16", multiply_16_8<Bfloat16Elements, 1>);
  add("m16n8k16", "f16", multiply_16_8<HalfElements, 2>);
  add("m16n8k16", "bf16", multiply_16_8<Bfloat16Elements, 2>);
  add_matrix_moves<1>(table, "x1");
  add_matrix_moves<2>(table, "x2");
  add_matrix_moves<4>(table, "x4");
  table["movmatrix.sync.aligned.m8n8.trans.b16"] = {"=r r", transpose_in_registers, Class::kShuffle,
                                                    Control::kConverge};
}

}  // namespace fk::softgpu
