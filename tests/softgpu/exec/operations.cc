#include "exec/operations.h"

#include <cstdlib>
#include <cstring>

#include "exec/barriers.h"
#include "exec/targets.h"

namespace fk::softgpu {

void add_control_operations(Operations& table) {
  for (const char* name : {"bra", "bra.uni"}) {
    table[name] = {"t", nullptr, Class::kBranch, Control::kBranch};
  }
  for (const char* name : {"ret", "exit", "ret.uni"}) {
    table[name] = {"", nullptr, Class::kBranch, Control::kExit};
  }
  for (const char* name : {"bar.sync", "barrier.sync.aligned", "barrier.cta.sync.aligned"}) {
    table[name] = {"- r r?", nullptr, Class::kBarrier, Control::kBarrier};
  }
  table["bar.arrive"] = {"- r r", nullptr, Class::kBarrier, Control::kBarrier};
  // Operand 2, the number of threads, may be missing; see the decoder.
  table["bar.red.or.pred"] = {"=p r r? p", nullptr, Class::kBarrier, Control::kBarrier};
  table["bar.red.and.pred"] = {"=p r r? p", nullptr, Class::kBarrier, Control::kBarrier};
  table["bar.red.popc.u32"] = {"=r r r? p", nullptr, Class::kBarrier, Control::kBarrier};
  for (const char* name :
       {"barrier.cluster.arrive.release.aligned", "barrier.cluster.arrive.relaxed.aligned",
        "barrier.cluster.arrive.aligned"}) {
    table[name] = {"", arrive_at_cluster, Class::kBarrier, Control::kConverge};
  }
  for (const char* name :
       {"barrier.cluster.wait.acquire.aligned", "barrier.cluster.wait.aligned"}) {
    table[name] = {"", nullptr, Class::kBarrier, Control::kClusterWait};
  }
  table["nanosleep.u32"] = {"r",
                            [](Warp& warp, const Instruction&, uint32_t) { warp.yield = true; },
                            Class::kOther, Control::kMayYield};
}

const Interpreter& interpreter() {
  static const Interpreter made = [] {
    Interpreter result;
    auto make = base::make_interpreter;
#if defined(SOFTGPU_X86)
    const char* forced = std::getenv("SOFTGPU_TARGET");
    const auto wanted = [&](const char* name, bool best) {
      return forced != nullptr ? std::strcmp(forced, name) == 0 : best;
    };
    const bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("bmi2");
    const bool has_v4 = has_v3 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
    if (wanted("v4", has_v4)) {
      make = v4::make_interpreter;
    } else if (wanted("v3", has_v3)) {
      make = v3::make_interpreter;
    }
#endif
    make(&result);
    add_control_operations(result.operations);
    add_async_operations(result.operations);
    return result;
  }();
  return made;
}

}  // namespace fk::softgpu
