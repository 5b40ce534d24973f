#include "program/allocate.h"

#include <algorithm>
#include <queue>

namespace fk::softgpu {

namespace {

using Bits = std::vector<uint64_t>;

struct BasicBlock {
  int begin = 0, end = 0;  // instructions
  int use_begin = 0, use_end = 0;
  std::vector<int> next;
  Bits read_first, written, live_in, live_out;
};

bool ends_block(const Instruction& i) {
  return i.control == Control::kBranch || i.control == Control::kExit;
}

std::vector<BasicBlock> split(const std::vector<Instruction>& code,
                              const std::vector<RegisterUse>& uses) {
  const int count = static_cast<int>(code.size());
  std::vector<bool> leader(code.size() + 1, false);
  leader[0] = true;
  for (int i = 0; i < count; ++i) {
    if (!ends_block(code[i])) continue;
    leader[i + 1] = true;
    if (code[i].control == Control::kBranch) leader[code[i].target] = true;
  }
  std::vector<BasicBlock> blocks;
  std::vector<int> block_of(code.size() + 1, -1);
  int use = 0;
  for (int i = 0; i < count; ++i) {
    if (leader[i]) {
      BasicBlock block;
      block.begin = i;
      block.use_begin = use;
      blocks.push_back(block);
    }
    block_of[i] = static_cast<int>(blocks.size()) - 1;
    blocks.back().end = i + 1;
    while (use < static_cast<int>(uses.size()) && uses[use].instruction == i) ++use;
    blocks.back().use_end = use;
  }
  for (BasicBlock& block : blocks) {
    const Instruction& last = code[block.end - 1];
    if (last.control == Control::kBranch) block.next.push_back(block_of[last.target]);
    const bool falls_through = !ends_block(last) || last.guard >= 0;
    if (falls_through && block.end < count) block.next.push_back(block_of[block.end]);
  }
  return blocks;
}

bool test(const Bits& bits, int i) { return (bits[i / 64] >> (i % 64)) & 1; }
void set(Bits* bits, int i) { (*bits)[i / 64] |= uint64_t{1} << (i % 64); }

// Finds which registers are needed at the edges of blocks: the usual iteration, from the end.
void find_live(std::vector<BasicBlock>* blocks, const std::vector<RegisterUse>& uses,
               size_t registers) {
  const size_t words = (registers + 63) / 64;
  for (BasicBlock& block : *blocks) {
    block.read_first = block.written = block.live_in = block.live_out = Bits(words, 0);
    for (int u = block.use_begin; u < block.use_end;) {
      int end = u;  // all reads of an instruction come before its writes
      for (; end < block.use_end && uses[end].instruction == uses[u].instruction; ++end) {
        if (uses[end].read && !test(block.written, uses[end].number)) {
          set(&block.read_first, uses[end].number);
        }
      }
      for (; u < end; ++u) {
        if (uses[u].written && !uses[u].read) set(&block.written, uses[u].number);
      }
    }
    block.live_in = block.read_first;
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (auto block = blocks->rbegin(); block != blocks->rend(); ++block) {
      for (const int next : block->next) {
        const Bits& needed = (*blocks)[next].live_in;
        for (size_t w = 0; w < words; ++w) block->live_out[w] |= needed[w];
      }
      for (size_t w = 0; w < words; ++w) {
        const uint64_t in = block->live_in[w] | (block->live_out[w] & ~block->written[w]);
        changed |= in != block->live_in[w];
        block->live_in[w] = in;
      }
    }
  }
}

struct Lifetime {
  int begin = INT32_MAX, end = -1;  // an instruction reads at 2 i and writes at 2 i + 1
  void add(int at) {
    begin = std::min(begin, at);
    end = std::max(end, at);
  }
};

std::vector<Lifetime> lifetimes(const std::vector<BasicBlock>& blocks,
                                const std::vector<RegisterUse>& uses, size_t registers) {
  std::vector<Lifetime> result(registers);
  for (const RegisterUse& use : uses) {
    if (use.read) result[use.number].add(2 * use.instruction);
    if (use.written) result[use.number].add(2 * use.instruction + 1);
  }
  const auto add_all = [&](const Bits& bits, int at) {
    for (size_t w = 0; w < bits.size(); ++w) {
      for (uint64_t left = bits[w]; left != 0; left &= left - 1) {
        result[64 * w + static_cast<size_t>(__builtin_ctzll(left))].add(at);
      }
    }
  };
  for (const BasicBlock& block : blocks) {
    add_all(block.live_in, 2 * block.begin);
    add_all(block.live_out, 2 * block.end - 1);
  }
  return result;
}

}  // namespace

Allocation allocate_registers(const std::vector<Instruction>& code,
                              const std::vector<RegisterUse>& uses,
                              const std::vector<RegisterBytes>& registers,
                              const std::vector<bool>& alone, size_t first_byte) {
  std::vector<BasicBlock> blocks = split(code, uses);
  find_live(&blocks, uses, registers.size());
  const std::vector<Lifetime> lives = lifetimes(blocks, uses, registers.size());
  std::vector<int> order;
  for (size_t r = 0; r < registers.size(); ++r) {
    if (lives[r].end >= 0) order.push_back(static_cast<int>(r));
  }
  std::sort(order.begin(), order.end(),
            [&](int a, int b) { return lives[a].begin < lives[b].begin; });

  Allocation result;
  result.places.assign(registers.size(), kNoPlace);
  result.bytes = first_byte;
  using Ending = std::pair<int, Place>;
  std::priority_queue<Ending, std::vector<Ending>, std::greater<>> busy[2];
  std::vector<Place> free[2];
  for (const int r : order) {
    const int wide = registers[r] == 8;
    auto& queue = busy[wide];
    while (!queue.empty() && queue.top().first < lives[r].begin) {
      free[wide].push_back(queue.top().second);
      queue.pop();
    }
    Place place;
    if (!alone[r] && !free[wide].empty()) {
      place = free[wide].back();
      free[wide].pop_back();
    } else {
      place = static_cast<Place>(result.bytes);
      result.bytes += kNarrowBytes << wide;
    }
    result.places[r] = place;
    if (!alone[r]) queue.push({lives[r].end, place});
  }
  return result;
}

}  // namespace fk::softgpu
