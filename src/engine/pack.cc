// Packs weights: takes rows as a file stores them, or quantizes them first, and writes them in the
// layout of cpu/gemm/blocks.h. Runs once per weight, at load.
#include "engine/pack.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "engine/quantize.h"

namespace fk::engine {
namespace {

using model::Weight;
using model::WeightType;

// Describes one block of a file, which is 32 or 256 columns of one row: its codes and its
// parameters.
struct Codes {
  uint8_t q[256];
  uint16_t d = 0, m = 0;    // float16: scale and minimum
  uint8_t scale[16] = {};   // of K types: one per 32 columns, or of Q6_K (signed) one per 16
  uint8_t minimum[8] = {};  // of K types: one per 32 columns
};

void split_nibbles(const uint8_t* packed, uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = packed[i] & 15;
    q[i + 16] = packed[i] >> 4;
  }
}

// Gives 32 codes their fifth bits, which `high` holds as one bit per code.
void add_high_bits(const uint8_t* high, uint8_t* q) {
  for (int i = 0; i < 32; ++i) q[i] |= (high[i / 8] >> (i % 8) & 1) << 4;
}

// Reads one block of a file whose type is the one packed as `packing`.
void read_codes(Packing packing, const uint8_t* block, Codes* c) {
  switch (packing) {
    case Packing::kQ8_0: {
      const auto b = model::read_block<model::BlockQ8_0>(block);
      c->d = b.d;
      for (int i = 0; i < 32; ++i) c->q[i] = static_cast<uint8_t>(b.q[i] + 128);
      return;
    }
    case Packing::kQ4_0: {
      const auto b = model::read_block<model::BlockQ4_0>(block);
      c->d = b.d;
      return split_nibbles(b.q, c->q);
    }
    case Packing::kQ4_1: {
      const auto b = model::read_block<model::BlockQ4_1>(block);
      c->d = b.d;
      c->m = b.m;
      return split_nibbles(b.q, c->q);
    }
    case Packing::kQ5_0: {
      const auto b = model::read_block<model::BlockQ5_0>(block);
      c->d = b.d;
      split_nibbles(b.q, c->q);
      return add_high_bits(b.high, c->q);
    }
    case Packing::kQ5_1: {
      const auto b = model::read_block<model::BlockQ5_1>(block);
      c->d = b.d;
      c->m = b.m;
      split_nibbles(b.q, c->q);
      return add_high_bits(b.high, c->q);
    }
    case Packing::kQ4_K:
    case Packing::kQ5_K: {
      const bool five = packing == Packing::kQ5_K;
      model::BlockQ5_K b;  // a Q4_K block has the same fields, except for the high bits
      std::memcpy(&b, block, 16);
      if (five) std::memcpy(b.high, block + 16, sizeof b.high);
      std::memcpy(b.q, block + (five ? 48 : 16), sizeof b.q);
      c->d = b.d;
      c->m = b.dmin;
      model::unpack_scales_k(b.scales, c->scale, c->minimum);
      for (int g = 0; g < 8; ++g) {
        for (int i = 0; i < 32; ++i) {
          uint8_t q = b.q[g / 2 * 32 + i] >> (g % 2 * 4) & 15;
          if (five) q |= (b.high[i] >> g & 1) << 4;
          c->q[g * 32 + i] = q;
        }
      }
      return;
    }
    case Packing::kQ6_K: {
      const auto b = model::read_block<model::BlockQ6_K>(block);
      c->d = b.d;
      std::memcpy(c->scale, b.scales, 16);
      // Each half of the block has 128 columns: the low nibbles of its 64 bytes are the first 64,
      // the high nibbles the other 64.
      for (int k = 0; k < 256; ++k) {
        const int half = k / 128, part = k % 128 / 32, i = k % 32;
        const uint8_t low = b.low[half * 64 + part % 2 * 32 + i] >> (part / 2 * 4) & 15;
        const uint8_t high = b.high[half * 32 + i] >> (part * 2) & 3;
        c->q[k] = static_cast<uint8_t>(low | high << 4);
      }
      return;
    }
    default:
      return;
  }
}

// Stores a row's value in a line that has one value of type T per row.
template <class T>
void put(uint8_t* line, int64_t row, T value) {
  std::memcpy(line + row * sizeof(T), &value, sizeof(T));
}

// Stores 32 codes of one row in the block at `out`, whose parameters take `parameters` bytes. The
// block's high bits must be zero before.
void put_codes(Packing packing, const uint8_t* q, int64_t row, int64_t parameters, uint8_t* out) {
  uint8_t* high = out + parameters;
  if (packing == Packing::kQ8_0 || packing == Packing::kQ8_Float) {
    for (int j = 0; j < 8; ++j) std::memcpy(high + 64 * j + 4 * row, q + 4 * j, 4);
    return;
  }
  const int64_t low_at = block_bytes(packing) - 256;
  for (int k = 0; k < 16; ++k) {
    out[low_at + k / 4 * 64 + 4 * row + k % 4] =
        static_cast<uint8_t>((q[k] & 15) | (q[k + 16] & 15) << 4);
  }
  const int64_t high_bytes = low_at - parameters;
  if (high_bytes == 64) {
    for (int k = 0; k < 32; ++k) high[4 * row + k % 4] |= (q[k] >> 4) << (k / 4);
  } else if (high_bytes == 128) {
    for (int k = 0; k < 32; ++k) {
      high[k / 16 * 64 + 4 * row + k % 4] |= (q[k] >> 4) << (k / 4 % 4 * 2);
    }
  }
}

// Returns the size in bytes of the parameters at the front of each block.
int64_t parameter_bytes(Packing p) {
  return p == Packing::kQ8_0 || p == Packing::kQ4_0 || p == Packing::kQ5_0 ? 32
         : super_bytes(p) > 0                                              ? 32
                                                                           : 64;
}

// Packs a row of a file's blocks, the first of which is at `blocks` and each of which has
// `block_size` bytes, as row `row` of the group at `out`.
void put_row(Packing packing, const uint8_t* blocks, int64_t block_size, int64_t columns,
             int64_t row, uint8_t* out) {
  Codes codes;
  const int64_t step = super_bytes(packing) > 0 ? 256 : 32;
  const int64_t parameters = parameter_bytes(packing);
  for (int64_t k = 0; k < columns; k += step, blocks += block_size) {
    read_codes(packing, blocks, &codes);
    if (step == 256) {
      put(out, row, codes.d);
      if (packing != Packing::kQ6_K) put(out + 32, row, codes.m);
      out += super_bytes(packing);
    } else {
      put(out, row, codes.d);
      if (parameters == 64) put(out + 32, row, codes.m);
    }
    for (int64_t g = 0; g < step / 32; ++g) {
      if (packing == Packing::kQ6_K) {
        out[row] = codes.scale[2 * g];
        out[16 + row] = codes.scale[2 * g + 1];
      } else if (step == 256) {
        out[row] = codes.scale[g];
        out[16 + row] = codes.minimum[g];
      }
      put_codes(packing, codes.q + 32 * g, row, parameters, out);
      out += block_bytes(packing);
    }
  }
}

// Packs row `source` of a weight of llama2.c's int8 as row `row` of the group at `out`.
void put_int8_grouped(const Weight& w, int64_t source, int64_t row, uint8_t* out) {
  const auto* values = static_cast<const int8_t*>(w.data) + source * w.row_bytes;
  for (int64_t k = 0; k < w.columns; k += 32, out += block_bytes(Packing::kQ8_Float)) {
    uint8_t q[32];
    for (int i = 0; i < 32; ++i) q[i] = static_cast<uint8_t>(values[k + i] + 128);
    put(out, row, w.scales[(source * w.columns + k) / w.group]);
    put_codes(Packing::kQ8_Float, q, row, 64, out);
  }
}

bool same_type(WeightType type, Packing packing) {
  return static_cast<int>(type) == static_cast<int>(packing);
}

// Packs a row of floats of type T (16-bit ones as their bits) as row `row` of the group at `out`.
template <class T>
void put_float_row(const T* values, int64_t columns, int64_t row, uint8_t* out) {
  for (int64_t k = 0; k < columns; ++k) put(out + k * 16 * sizeof(T), row, values[k]);
}

}  // namespace

static_assert(static_cast<int>(WeightType::kQ6_K) == static_cast<int>(Packing::kQ6_K));

Packing packing_of(const Weight& weight, const WeightType* quantize) {
  if (weight.type == WeightType::kInt8Grouped) {
    return weight.columns % 32 == 0 && weight.group % 32 == 0 ? Packing::kQ8_Float : Packing::kF32;
  }
  const auto stored = static_cast<Packing>(weight.type);
  if (quantize == nullptr || !is_float(stored)) return stored;
  const auto wanted = static_cast<Packing>(*quantize);
  if (is_float(wanted)) return wanted;
  return weight.columns % model::type_info(*quantize).block == 0 ? wanted : stored;
}

void pack_groups(const Weight& w, const PackedMatrix& out, int64_t begin, int64_t end) {
  const int64_t size = group_bytes(out.packing, out.columns);
  std::vector<float> row_values(static_cast<size_t>(w.columns));
  std::vector<uint8_t> blocks;
  std::vector<uint16_t> halves;
  const bool direct = same_type(w.type, out.packing) && !w.transposed;
  const auto type = static_cast<WeightType>(out.packing);
  for (int64_t g = begin; g < end; ++g) {
    uint8_t* group = const_cast<uint8_t*>(out.data) + g * size;
    std::memset(group, 0, static_cast<size_t>(size));
    for (int64_t r = 0; r < std::min(kGroupRows, w.rows - g * kGroupRows); ++r) {
      const int64_t source = g * kGroupRows + r;
      const uint8_t* stored = static_cast<const uint8_t*>(w.data) + source * w.row_bytes;
      if (out.packing == Packing::kQ8_Float) {
        put_int8_grouped(w, source, r, group);
      } else if (direct && is_float(out.packing)) {
        if (out.packing == Packing::kF32) {
          std::memcpy(row_values.data(), stored, row_values.size() * 4);
          put_float_row(row_values.data(), w.columns, r, group);
        } else {
          halves.resize(row_values.size());
          std::memcpy(halves.data(), stored, halves.size() * 2);
          put_float_row(halves.data(), w.columns, r, group);
        }
      } else if (direct) {
        put_row(out.packing, stored, model::type_info(type).bytes, w.columns, r, group);
      } else {
        model::read_row(w, source, row_values.data());
        if (out.packing == Packing::kF32) {
          put_float_row(row_values.data(), w.columns, r, group);
        } else if (is_float(out.packing)) {
          halves.resize(row_values.size());
          narrow(type, row_values.data(), w.columns, halves.data());
          put_float_row(halves.data(), w.columns, r, group);
        } else {
          const model::WeightTypeInfo& info = model::type_info(type);
          blocks.resize(static_cast<size_t>(w.columns / info.block * info.bytes));
          quantize(type, row_values.data(), w.columns, blocks.data());
          put_row(out.packing, blocks.data(), info.bytes, w.columns, r, group);
        }
      }
    }
  }
}

}  // namespace fk::engine
