// This file executes what the lanes of a warp do together: shuffles, votes, reductions.
#include "check/race_hooks.h"
#include "exec/elementwise.h"
#include "exec/tables.h"

namespace fk::softgpu {

namespace {

enum class Shuffle { kXor, kUp, kDown, kIndex };

// Executes shfl.sync d|p, a, b, c, mask
template <Shuffle kKind>
void shuffle(Warp& warp, const Instruction& i, uint32_t lanes) {
  const uint32_t* a = lanes_at(warp, i.at[1]);
  const uint32_t* b = lanes_at(warp, i.at[2]);
  const uint32_t* c = lanes_at(warp, i.at[3]);
  alignas(64) uint32_t result[kLanes];
  alignas(64) uint32_t valid[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    const int32_t segment = (c[l] >> 8) & 31, clamp = c[l] & 31;
    const int32_t bound = (l & segment) | (clamp & ~segment);
    const auto by = static_cast<int32_t>(b[l] & 31);
    int32_t from;
    bool inside;
    if constexpr (kKind == Shuffle::kXor) {
      from = l ^ by;
      inside = from <= bound;
    } else if constexpr (kKind == Shuffle::kUp) {
      from = l - by;
      inside = from >= bound;
    } else if constexpr (kKind == Shuffle::kDown) {
      from = l + by;
      inside = from <= bound;
    } else {
      from = (l & segment) | (by & ~segment);
      inside = from <= bound;
    }
    result[l] = a[inside ? from & 31 : l];
    valid[l] = inside ? 1u << l : 0;
  }
  uint32_t mask = 0;
  for (uint32_t bit : valid) mask |= bit;
  put(lanes_to<uint32_t>(warp, i.at[0]), result, lanes);
  put_predicate(warp, i.at[5], mask, lanes);
}

inline void broadcast(Warp& warp, Place place, uint32_t value, uint32_t lanes) {
  alignas(64) uint32_t result[kLanes];
  for (uint32_t& r : result) r = value;
  put(lanes_to<uint32_t>(warp, place), result, lanes);
}

template <class Operation>
void reduce(Warp& warp, const Instruction& i, uint32_t lanes, Operation operation) {
  const uint32_t* a = lanes_at(warp, i.at[1]);
  uint32_t result = a[first_lane(lanes)];
  for (uint32_t left = lanes & (lanes - 1); left != 0; left &= left - 1) {
    result = operation(result, a[first_lane(left)]);
  }
  broadcast(warp, i.at[0], result, lanes);
}

}  // namespace

void add_warp_operations(Operations& table) {
  const auto add = [&](const char* name, const char* operands, Execute execute) {
    table[name] = {operands, execute, Class::kShuffle, Control::kConvergeMember};
  };
  add("shfl.sync.bfly.b32", "=r| r r r m", shuffle<Shuffle::kXor>);
  add("shfl.sync.up.b32", "=r| r r r m", shuffle<Shuffle::kUp>);
  add("shfl.sync.down.b32", "=r| r r r m", shuffle<Shuffle::kDown>);
  add("shfl.sync.idx.b32", "=r| r r r m", shuffle<Shuffle::kIndex>);
  add("vote.sync.ballot.b32", "=r p m", [](Warp& w, const Instruction& i, uint32_t m) {
    broadcast(w, i.at[0], predicate(w, i, 1) & m, m);
  });
  add("vote.sync.any.pred", "=p p m", [](Warp& w, const Instruction& i, uint32_t m) {
    put_predicate(w, i.at[0], (predicate(w, i, 1) & m) != 0 ? kAllLanes : 0, m);
  });
  add("vote.sync.all.pred", "=p p m", [](Warp& w, const Instruction& i, uint32_t m) {
    put_predicate(w, i.at[0], (~predicate(w, i, 1) & m) == 0 ? kAllLanes : 0, m);
  });
  add("vote.sync.uni.pred", "=p p m", [](Warp& w, const Instruction& i, uint32_t m) {
    const uint32_t set = predicate(w, i, 1) & m;
    put_predicate(w, i.at[0], set == 0 || set == m ? kAllLanes : 0, m);
  });
  add("redux.sync.max.u32", "=r r m", [](Warp& w, const Instruction& i, uint32_t m) {
    reduce(w, i, m, [](uint32_t a, uint32_t b) { return a < b ? b : a; });
  });
  add("redux.sync.min.u32", "=r r m", [](Warp& w, const Instruction& i, uint32_t m) {
    reduce(w, i, m, [](uint32_t a, uint32_t b) { return a < b ? a : b; });
  });
  add("redux.sync.add.u32", "=r r m", [](Warp& w, const Instruction& i, uint32_t m) {
    reduce(w, i, m, [](uint32_t a, uint32_t b) { return a + b; });
  });
  add("redux.sync.add.s32", "=r r m", [](Warp& w, const Instruction& i, uint32_t m) {
    reduce(w, i, m, [](uint32_t a, uint32_t b) { return a + b; });
  });
  add("redux.sync.max.s32", "=r r m", [](Warp& w, const Instruction& i, uint32_t m) {
    reduce(w, i, m, [](uint32_t a, uint32_t b) {
      return static_cast<int32_t>(a) < static_cast<int32_t>(b) ? b : a;
    });
  });
  add("redux.sync.or.b32", "=r r m", [](Warp& w, const Instruction& i, uint32_t m) {
    reduce(w, i, m, [](uint32_t a, uint32_t b) { return a | b; });
  });
  add("redux.sync.and.b32", "=r r m", [](Warp& w, const Instruction& i, uint32_t m) {
    reduce(w, i, m, [](uint32_t a, uint32_t b) { return a & b; });
  });
  table["activemask.b32"] = {
      "=r", [](Warp& w, const Instruction& i, uint32_t m) { broadcast(w, i.at[0], m, m); },
      Class::kShuffle};
  table["bar.warp.sync"] = {"m", [](Warp& w, const Instruction&, uint32_t m) { warp_synced(w, m); },
                            Class::kBarrier, Control::kConvergeMember};
}

}  // namespace fk::softgpu
