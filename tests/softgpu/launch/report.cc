#include <cstdio>

#include "exec/machine.h"

namespace fk::softgpu {

const char* name_of(Problem problem) {
  switch (problem) {
    case Problem::kOutOfBounds:
      return "out of bounds";
    case Problem::kFreed:
      return "use after free";
    case Problem::kMisaligned:
      return "misaligned";
    case Problem::kReadOnly:
      return "read only";
    case Problem::kUninitialised:
      return "uninitialised";
    case Problem::kPending:
      return "too soon";
    case Problem::kRace:
      return "race";
    case Problem::kMissingFence:
      return "missing fence";
    case Problem::kBarrier:
      return "barrier";
    case Problem::kDeadlock:
      return "deadlock";
    case Problem::kLaunch:
      return "launch";
    case Problem::kUnfinished:
      return "unfinished";
    case Problem::kTimeout:
      return "timeout";
    case Problem::kOther:
      break;
  }
  return "problem";
}

std::string Report::to_string() const {
  std::string result = std::string(name_of(problem)) + ": " + text;
  if (address != 0) {
    char number[24];
    std::snprintf(number, sizeof number, "%llx", static_cast<unsigned long long>(address));
    result += std::string(", address 0x") + number;
  }
  const auto three = [](const int(&v)[3]) {
    return "(" + std::to_string(v[0]) + ", " + std::to_string(v[1]) + ", " + std::to_string(v[2]) +
           ")";
  };
  if (ptx_line > 0) {
    result += ", block " + three(block);
    if (thread[0] >= 0) result += ", thread " + three(thread);
    if (!file.empty()) result += ", " + file + ":" + std::to_string(source_line);
    result += ", PTX line " + std::to_string(ptx_line) + " '" + instruction.substr(0, 120) + "'";
  }
  return result + ", kernel " + kernel;
}

void report(Warp& warp, Problem problem, int lane, uint64_t address, const std::string& text) {
  Run& run = *warp.run;
  const Launch& launch = *run.launch;
  std::vector<bool>& known = run.reported;
  const size_t kinds = static_cast<size_t>(Problem::kOther) + 1;
  if (known.empty()) known.resize(run.program->code.size() * kinds);
  const size_t key = warp.pc * kinds + static_cast<size_t>(problem);
  if (known[key]) return;
  known[key] = true;
  const InstructionText& at = run.program->texts[warp.pc];
  Report r;
  r.problem = problem;
  r.kernel = run.program->info.name;
  if (const auto file = run.files->find(at.file); file != run.files->end()) r.file = file->second;
  r.source_line = at.source_line;
  r.ptx_line = at.line;
  r.instruction = at.text;
  for (int d = 0; d < 3; ++d) r.block[d] = static_cast<int>(warp.block->index[d]);
  if (lane >= 0) {
    const int thread = warp.index * kLanes + lane;
    const int x = static_cast<int>(launch.block[0]), y = static_cast<int>(launch.block[1]);
    r.thread[0] = thread % x;
    r.thread[1] = thread / x % y;
    r.thread[2] = thread / x / y;
  }
  r.address = address;
  r.text = text;
  run.result->reports.push_back(std::move(r));
  if (run.options.stop_at_first || run.result->reports.size() > run.options.max_reports) {
    throw Abandoned();
  }
}

}  // namespace fk::softgpu
