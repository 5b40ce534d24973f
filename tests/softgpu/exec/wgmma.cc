// This file executes wgmma: multiplications of a warpgroup, as each of its four warps sees them: 16
// of the 64 rows. They are done when the warp waits for them. Until then the registers of the
// result hold poison, and what they multiply in shared memory must not change. Where it does, or
// was not there, the result is poison: no report, since a kernel may multiply what is not there and
// not use the result.
#include <algorithm>
#include <memory>

#include "check/race_hooks.h"
#include "exec/memory_ops.h"
#include "exec/small_floats.h"
#include "exec/tables.h"

namespace fk::softgpu {

namespace {

// Says where the elements of a matrix are in shared memory, from its 64-bit description.
struct MatrixPlace {
  uint32_t start, leading, stride;
  uint32_t swizzle;  // bytes: 0, 32, 64 or 128
  uint32_t swizzle_log;
  bool outer_major;  // the bytes that follow each other are along M or N, not K
  uint32_t element;  // bytes

  MatrixPlace(uint64_t description, bool outer, uint32_t element_bytes)
      : start(static_cast<uint32_t>(description & 0x3fff) << 4),
        leading(static_cast<uint32_t>((description >> 16) & 0x3fff) << 4),
        stride(static_cast<uint32_t>((description >> 32) & 0x3fff) << 4),
        outer_major(outer),
        element(element_bytes) {
    static constexpr uint32_t kSwizzles[] = {0, 128, 64, 32}, kLogs[] = {0, 7, 6, 5};
    swizzle = kSwizzles[description >> 62];
    swizzle_log = kLogs[description >> 62];
  }
  // Returns the address of 16 bytes: at row `outer` of M or N and byte `k_byte` of K or,
  // outer-major, at row `k` of K and byte `outer_byte`.
  uint32_t piece(uint32_t row, uint32_t byte) const {
    uint32_t address;
    if (outer_major) {
      address = start + (byte >> swizzle_log) * leading + row / 8 * stride +
                (row % 8 << swizzle_log) + (byte & (swizzle - 1));
    } else if (swizzle == 0) {
      address = start + row / 8 * stride + byte / 16 * leading + row % 8 * 16;
    } else {
      address = start + row / 8 * stride + row % 8 * swizzle + byte;
    }
    const uint32_t bits = swizzle == 0 ? 0 : swizzle / 16 - 1;
    return address ^ (((address >> 7) & bits) << 4);
  }
};

template <class Elements>
struct WarpgroupElements {
  static constexpr uint32_t kBytes = 2, kDepth = 16;
  static void expand(const uint8_t* from, float* to) {  // 16 bytes
    uint16_t raw[8];
    std::memcpy(raw, from, 16);
    Elements::expand(raw, to, 8);
  }
};
struct EightBitElements {
  static constexpr uint32_t kBytes = 1, kDepth = 32;
  static void expand(const uint8_t* from, float* to) {
    for (int i = 0; i < 16; ++i) to[i] = e4m3_to_float(from[i]);
  }
};

// Calls visit(address, row, byte) for each 16 bytes of a matrix of `outer` by K elements, from row
// `first` of M or N on.
template <class Format, class Visit>
void visit_pieces(const MatrixPlace& place, uint32_t first, uint32_t outer, Visit visit) {
  constexpr uint32_t kRowBytes = Format::kDepth * Format::kBytes;
  if (place.outer_major) {
    for (uint32_t k = 0; k < Format::kDepth; ++k) {
      for (uint32_t byte = first * Format::kBytes; byte < (first + outer) * Format::kBytes;
           byte += 16) {
        visit(place.piece(k, byte), k, byte - first * Format::kBytes);
      }
    }
  } else {
    for (uint32_t row = 0; row < outer; ++row) {
      for (uint32_t byte = 0; byte < kRowBytes; byte += 16) {
        visit(place.piece(first + row, byte), row, byte);
      }
    }
  }
}

// Reads the matrix as floats, K by `outer`: to[k * outer + o].
template <class Format>
void read_matrix(const Block& block, const MatrixPlace& place, uint32_t first, uint32_t outer,
                 float* to) {
  constexpr uint32_t kPer = 16 / Format::kBytes;
  visit_pieces<Format>(place, first, outer, [&](uint32_t address, uint32_t row, uint32_t byte) {
    alignas(64) float values[kPer];
    Format::expand(block.shared.get() + address, values);
    const uint32_t along = byte / Format::kBytes;
    if (place.outer_major) {
      std::memcpy(to + row * outer + along, values, sizeof values);
    } else {
      for (uint32_t i = 0; i < kPer; ++i) to[(along + i) * outer + row] = values[i];
    }
  });
}

// Returns what 16 bytes give to the sum that tells whether a matrix has changed.
inline uint64_t summand(const Block& block, uint32_t address) {
  uint64_t words[2];
  std::memcpy(words, block.shared.get() + address, 16);
  const uint64_t place = address * 0x9e3779b97f4a7c15u;
  return (words[0] ^ place) * 0xff51afd7ed558ccdu + (words[1] ^ (place >> 7)) * 0xc4ceb9fe1a85ec53u;
}

// Returns whether all of a matrix can be read: written, ordered with what wrote it, fenced. `sum`
// changes with what is there.
template <class Format>
bool matrix_readable(Warp& warp, const MatrixPlace& place, uint32_t first, uint32_t outer,
                     uint64_t* sum) {
  Block& block = *warp.block;
  bool good = true;
  if (place.outer_major && place.swizzle == 0) {
    report(warp, Problem::kOther, 0, 0, "a matrix that is not swizzled, with rows along K");
    return false;
  }
  visit_pieces<Format>(place, first, outer, [&](uint32_t address, uint32_t, uint32_t) {
    if (!good) return;
    if (address < kSharedBase || address + 16 > block.shared_end) {
      good = false;
      return report(warp, Problem::kOutOfBounds, 0, address,
                    "a matrix that reaches out of shared memory");
    }
    if (block.unreadable != 0) {
      const uint32_t wanted = 0xffffu << (address & 31);
      good &= (block.readable[address / 32] & wanted) == wanted;
    }
    if (block.races) good &= note_async_read(warp, block, address, 16, false);
    *sum += summand(block, address);
  });
  return good;
}
template <class Format>
uint64_t sum_of_matrix(const Block& block, const MatrixPlace& place, uint32_t first,
                       uint32_t outer) {
  uint64_t sum = 0;
  visit_pieces<Format>(place, first, outer, [&](uint32_t address, uint32_t, uint32_t) {
    sum += summand(block, address);
  });
  return sum;
}

// These return the row and column of accumulator `index` of a lane.
inline uint32_t accumulator_row(uint32_t index, uint32_t lane) {
  return lane / 4 + 8 * (index / 2 % 2);
}
inline uint32_t accumulator_column(uint32_t index, uint32_t lane) {
  return 8 * (index / 4) + 2 * (lane % 4) + index % 2;
}

// Returns the accumulators that an instruction adds to: they are taken out of the registers, unless
// earlier multiplications have them already.
inline std::shared_ptr<Accumulators> take_accumulators(Warp& warp, const Instruction& i,
                                                       uint32_t columns) {
  const Place* places = warp.run->program->lists.data() + i.list;
  const uint32_t count = columns / 2;
  for (const Multiplication& under_way : warp.multiplications) {
    const Accumulators& known = *under_way.accumulators;
    if (known.places.size() == count &&
        std::equal(known.places.begin(), known.places.end(), places)) {
      return under_way.accumulators;
    }
    for (uint32_t k = 0; k < count; ++k) {
      if (std::find(known.places.begin(), known.places.end(), places[k]) != known.places.end()) {
        report(warp, Problem::kPending, 0, 0,
               "a register of the result that a multiplication under way writes in another place");
      }
    }
  }
  if (!warp.multiply_fenced) {
    report(warp, Problem::kMissingFence, 0, 0,
           "wgmma.fence is missing since the registers of the result were free to be used");
  }
  auto taken = std::make_shared<Accumulators>();
  taken->places.assign(places, places + count);
  taken->values.resize(16 * columns);
  for (uint32_t index = 0; index < count; ++index) {
    uint32_t* lanes = lanes_to<uint32_t>(warp, places[index]);
    for (uint32_t l = 0; l < kLanes; ++l) {
      taken->values[accumulator_row(index, l) * columns + accumulator_column(index, l)] =
          float_of(lanes[l]);
      lanes[l] = ~0u;
    }
  }
  return taken;
}

inline void give_accumulators(Warp& warp, const Accumulators& taken) {
  const auto count = static_cast<uint32_t>(taken.places.size());
  const uint32_t columns = 2 * count;
  for (uint32_t index = 0; index < count; ++index) {
    uint32_t* lanes = lanes_to<uint32_t>(warp, taken.places[index]);
    for (uint32_t l = 0; l < kLanes; ++l) {
      lanes[l] = bits_of(canonical(
          taken.values[accumulator_row(index, l) * columns + accumulator_column(index, l)]));
    }
  }
}

// Reads the numbers of the instruction, 4 bits each, the scales of A and B (1 or -1), then whether
// A and B are outer-major, as far as the instruction has them.
struct MultiplyNumbers {
  float scale_a, scale_b;
  bool outer_a = false, outer_b = false;
  MultiplyNumbers(int32_t packed, bool majors, bool a_in_registers) {
    uint32_t p = static_cast<uint32_t>(packed);
    if (majors) {
      outer_b = p & 15;
      p >>= 4;
      if (!a_in_registers) {
        outer_a = p & 15;
        p >>= 4;
      }
    }
    scale_b = (p & 15) == 15 ? -1.0f : 1.0f;
    scale_a = ((p >> 4) & 15) == 15 ? -1.0f : 1.0f;
  }
};

// Reads A from registers, where the fragments hold 4 bytes of a row each.
template <class Format>
void read_fragments(const uint32_t* registers, float* to) {
  constexpr uint32_t kPer = 4 / Format::kBytes;
  for (uint32_t part = 0; part < 4; ++part) {
    for (uint32_t l = 0; l < kLanes; ++l) {
      uint8_t raw[16] = {};
      std::memcpy(raw, registers + part * kLanes + l, 4);
      float values[16];
      Format::expand(raw, values);
      const uint32_t row = l / 4 + 8 * (part % 2);
      const uint32_t k = 4 * kPer * (part / 2) + kPer * (l % 4);
      for (uint32_t e = 0; e < kPer; ++e) to[row * Format::kDepth + k + e] = values[e];
    }
  }
}

inline void poison(Accumulators& accumulators) {
  std::fill(accumulators.values.begin(), accumulators.values.end(), float_of(kNan));
}

template <class Format, uint32_t kColumns, bool kRegisters>
void finish_multiplication(Warp& warp, const Multiplication& m) {
  constexpr uint32_t kDepth = Format::kDepth;
  const MultiplyNumbers numbers(m.instruction->number, Format::kBytes == 2, kRegisters);
  const Block& block = *warp.block;
  const uint32_t first_row = static_cast<uint32_t>(warp.index) % 4 * 16;
  alignas(64) float a[16][kDepth];
  alignas(64) float b[kDepth][kColumns];
  const MatrixPlace place_b(m.b, numbers.outer_b, Format::kBytes);
  if (m.poisoned) return poison(*m.accumulators);
  uint64_t sum = sum_of_matrix<Format>(block, place_b, 0, kColumns);
  if constexpr (kRegisters) {
    read_fragments<Format>(m.a_registers.data(), a[0]);
  } else {
    const MatrixPlace place_a(m.a, numbers.outer_a, Format::kBytes);
    sum += sum_of_matrix<Format>(block, place_a, first_row, 16);
    alignas(64) float across[kDepth][16];
    read_matrix<Format>(block, place_a, first_row, 16, across[0]);
    for (uint32_t k = 0; k < kDepth; ++k) {
      for (uint32_t r = 0; r < 16; ++r) a[r][k] = across[k][r];
    }
  }
  read_matrix<Format>(block, place_b, 0, kColumns, b[0]);
  const float scale = numbers.scale_a * numbers.scale_b;
  float* d = m.accumulators->values.data();
  if (sum != m.sum) return poison(*m.accumulators);
  for (uint32_t r = 0; r < 16; ++r) {
    alignas(64) float row[kColumns];
    if (m.accumulate) {
      std::memcpy(row, d + r * kColumns, sizeof row);
    } else {
      std::memset(row, 0, sizeof row);
    }
    for (uint32_t k = 0; k < kDepth; ++k) {
      const float factor = a[r][k] * scale;
      for (uint32_t n = 0; n < kColumns; ++n) {
        row[n] = __builtin_fmaf(factor, b[k][n], row[n]);
      }
    }
    std::memcpy(d + r * kColumns, row, sizeof row);
  }
}

template <class Format, uint32_t kColumns, bool kRegisters>
void start_multiplication(Warp& warp, const Instruction& i, uint32_t) {
  const MultiplyNumbers numbers(i.number, Format::kBytes == 2, kRegisters);
  const uint32_t accumulate = predicate(warp, i, 3);
  if (warp.block->warps.size() % 4 != 0) {
    report(warp, Problem::kBarrier, 0, 0, "wgmma in a block without whole warpgroups");
  }
  Multiplication m;
  m.finish = finish_multiplication<Format, kColumns, kRegisters>;
  m.instruction = &i;
  m.pc = warp.pc;
  m.group = warp.multiply_group;
  m.accumulate = accumulate != 0;
  if (accumulate != 0 && accumulate != kAllLanes) {
    report(warp, Problem::kBarrier, 0, 0, "scale-d differs between lanes of a warp");
  }
  m.b = lanes_at<uint64_t>(warp, i.at[2])[0];
  m.sum = 0;
  bool good = matrix_readable<Format>(warp, MatrixPlace(m.b, numbers.outer_b, Format::kBytes), 0,
                                      kColumns, &m.sum);
  if constexpr (kRegisters) {
    const Place* places = warp.run->program->lists.data() + i.list + kColumns / 2;
    for (int part = 0; part < 4; ++part) {
      const uint32_t* lanes = lanes_at(warp, places[part]);
      m.a_registers.insert(m.a_registers.end(), lanes, lanes + kLanes);
    }
  } else {
    m.a = lanes_at<uint64_t>(warp, i.at[1])[0];
    uint64_t sum = 0;
    good &= matrix_readable<Format>(warp, MatrixPlace(m.a, numbers.outer_a, Format::kBytes),
                                    static_cast<uint32_t>(warp.index) % 4 * 16, 16, &sum);
    m.sum += sum;
  }
  m.accumulators = take_accumulators(warp, i, kColumns);
  warp.run->counts.tensor_flops += 2 * 16 * kColumns * Format::kDepth;
  m.poisoned = !good;
  warp.multiplications.push_back(std::move(m));
}

inline void wait_for_multiplications(Warp& warp, uint32_t pending) {
  size_t done = 0;
  const uint32_t pc = warp.pc;
  for (; done < warp.multiplications.size(); ++done) {
    const Multiplication& m = warp.multiplications[done];
    if (m.group + pending >= warp.multiply_group) break;
    warp.pc = m.pc;
    m.finish(warp, m);
  }
  warp.pc = pc;
  if (done == 0) return;
  std::vector<Multiplication> over(
      std::make_move_iterator(warp.multiplications.begin()),
      std::make_move_iterator(warp.multiplications.begin() + static_cast<std::ptrdiff_t>(done)));
  warp.multiplications.erase(warp.multiplications.begin(),
                             warp.multiplications.begin() + static_cast<std::ptrdiff_t>(done));
  for (size_t k = 0; k < over.size(); ++k) {
    const auto& taken = over[k].accumulators;
    const auto same = [&](const Multiplication& m) { return m.accumulators == taken; };
    if (std::any_of(over.begin() + static_cast<std::ptrdiff_t>(k) + 1, over.end(), same) ||
        std::any_of(warp.multiplications.begin(), warp.multiplications.end(), same)) {
      continue;
    }
    give_accumulators(warp, *taken);
    warp.multiply_fenced = false;
  }
}

template <class Format, uint32_t kColumns>
void add_multiplication(Operations& table, const std::string& type) {
  const std::string name = "wgmma.mma_async.sync.aligned.m64n" + std::to_string(kColumns) + "k" +
                           std::to_string(Format::kDepth) + ".f32." + type + "." + type;
  const bool majors = Format::kBytes == 2;
  table[name] = {majors ? "+v q q p n n n n" : "+v q q p n n",
                 start_multiplication<Format, kColumns, false>, Class::kTensor, Control::kConverge};
  table[name + " registers"] = {majors ? "+v v q p n n n" : "+v v q p n n",
                                start_multiplication<Format, kColumns, true>, Class::kTensor,
                                Control::kConverge};
}

template <class Format>
void add_multiplications(Operations& table, const std::string& type) {
  add_multiplication<Format, 16>(table, type);
  add_multiplication<Format, 32>(table, type);
  add_multiplication<Format, 64>(table, type);
  add_multiplication<Format, 80>(table, type);
  add_multiplication<Format, 96>(table, type);
  add_multiplication<Format, 128>(table, type);
  add_multiplication<Format, 192>(table, type);
  add_multiplication<Format, 224>(table, type);
  add_multiplication<Format, 256>(table, type);
}

}  // namespace

void add_wgmma_operations(Operations& table) {
  add_multiplications<WarpgroupElements<HalfElements>>(table, "f16");
  add_multiplications<WarpgroupElements<Bfloat16Elements>>(table, "bf16");
  add_multiplications<EightBitElements>(table, "e4m3");
  table["wgmma.fence.sync.aligned"] = {
      "", [](Warp& w, const Instruction&, uint32_t) { w.multiply_fenced = true; }, Class::kFence,
      Control::kConverge};
  table["wgmma.commit_group.sync.aligned"] = {
      "", [](Warp& w, const Instruction&, uint32_t) { ++w.multiply_group; }, Class::kTensor,
      Control::kConverge};
  table["wgmma.wait_group.sync.aligned"] = {"i",
                                            [](Warp& w, const Instruction& i, uint32_t) {
                                              wait_for_multiplications(
                                                  w, static_cast<uint32_t>(i.number));
                                            },
                                            Class::kTensor, Control::kConverge};
}

}  // namespace fk::softgpu
