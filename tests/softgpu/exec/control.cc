// This file executes branches, the end of a kernel, barriers of blocks and clusters.
#include "exec/barriers.h"
#include "exec/tables.h"

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

}  // namespace fk::softgpu
