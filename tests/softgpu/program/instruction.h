// This file declares one decoded instruction, and a kernel made of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "softgpu.h"

namespace fk::softgpu {

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = 0xffffffff;

struct Warp;
struct Instruction;
// Runs an instruction for the lanes of a warp that take part; at least one does.
using Execute = void (*)(Warp& warp, const Instruction& instruction, uint32_t lanes);

// Says what the interpreter's loop must do beside calling `execute`.
enum class Control : uint8_t {
  kNone,
  kBranch,
  kExit,
  kConverge,        // all lanes of the warp that still run must be here
  kConvergeMember,  // all lanes of the mask in the last operand must be here
  kBarrier,         // bar.sync, bar.arrive, bar.red: may have to wait
  kClusterWait,     // barrier.cluster.wait
  kMayYield         // the warp may be waiting for another one: see Warp::yield
};

// Says what an instruction counts as.
enum class Class : uint8_t {
  kTensor,
  kFma,
  kFloat,
  kInteger,
  kSpecial,  // ex2, rcp, sin and so on
  kConvert,
  kMove,
  kCompare,
  kBranch,
  kLoadGlobal,
  kStoreGlobal,
  kAtomic,
  kLoadShared,
  kStoreShared,
  kLoadParameter,
  kMatrixShared,  // ldmatrix, stmatrix
  kShuffle,       // shfl, vote, redux, movmatrix
  kBarrier,
  kAsyncCopy,
  kFence,
  kOther,
  kCount
};
const char* name_of(Class kind);

// Says where an operand is: a multiple of kLaneBytes, relative to one of two bases (Warp::base):
// bit 0 clear for the registers of the warp, set for the constants of the program.
using Place = uint32_t;
constexpr Place kConstantBit = 1;
constexpr uint32_t kNarrowBytes = kLanes * 4;  // of a register of up to 32 bits
constexpr Place kNoPlace = 0xffffffff;

struct Instruction {
  Execute execute = nullptr;
  Place at[6] = {kNoPlace, kNoPlace, kNoPlace, kNoPlace, kNoPlace, kNoPlace};
  int64_t immediate = 0;      // the offset of the first address
  int32_t number = 0;         // where an operand is one
  uint32_t list = 0;          // of vector operands, in Program::lists
  uint32_t target = 0;        // of a branch
  int32_t second_offset = 0;  // of the second address
  int16_t guard = -1;         // a predicate
  bool guard_negated = false;
  Control control = Control::kNone;
  uint8_t negated = 0;  // bit i: operand i is a predicate that is meant negated
  uint8_t list_size = 0;
  uint8_t wide_address = 0;      // bit i: operand i is an address of 64 bits
  uint8_t register_bytes = 4;    // of the first destination
  uint16_t used_bytes = 0xffff;  // of a load: those that matter
};

// Holds what is known of an instruction beside what runs: it is for reports and counters.
struct InstructionText {
  std::string mnemonic;
  std::string text;
  int line = 0;
  int file = 0;
  int source_line = 0;
  Class kind = Class::kOther;
};

// Names a special register that stands in the registers of a warp, filled when it starts.
enum class Special : uint8_t {
  kThreadX,
  kThreadY,
  kThreadZ,
  kThreadsX,
  kThreadsY,
  kThreadsZ,
  kBlockX,
  kBlockY,
  kBlockZ,
  kBlocksX,
  kBlocksY,
  kBlocksZ,
  kLane,
  kWarp,
  kWarps,
  kClusterRank,
  kClusterSize,
  kLaneMaskEqual,
  kLaneMaskLess,
  kLaneMaskLessEqual,
  kLaneMaskGreater,
  kLaneMaskGreaterEqual,
  kMultiprocessor,
  kDynamicSharedBytes,
  kCount
};

template <class T>
struct AlignedDelete {
  void operator()(T* p) const { ::operator delete[](p, std::align_val_t(256)); }
};
template <class T>
using AlignedArray = std::unique_ptr<T[], AlignedDelete<T>>;
template <class T>
AlignedArray<T> aligned_array(size_t count) {
  return AlignedArray<T>(
      static_cast<T*>(::operator new[](count * sizeof(T), std::align_val_t(256))));
}

struct Program {
  KernelInfo info;
  std::vector<Instruction> code;
  std::vector<InstructionText> texts;
  std::vector<Place> lists;
  AlignedArray<uint8_t> constants;
  size_t register_bytes = 0;  // of a warp
  int predicates = 0;         // of a warp
  std::vector<std::pair<Special, Place>> specials;
  // Every launch copies its parameters to these bytes: their addresses are constants.
  AlignedArray<uint8_t> parameters;
  size_t shared_align = 16;     // of the dynamic shared memory
  uint32_t dynamic_shared = 0;  // where it begins, among the kernel's own arrays
};

}  // namespace fk::softgpu
