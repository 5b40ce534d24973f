// This file says how a call of attention's forward is prepared for the kernels on mma.sync, and for
// Hopper's kernel of float32: its operands, and the kernel's arguments.
#pragma once

#include "ops/attention/cuda/forward.cuh"
#include "ops/attention/cuda/plan.h"

namespace fk::cuda::attention {

struct ForwardPlan {
  Problem problem;
  Form form;
  Maxima maxima;
  Prepared q, k, v;

  ForwardPlan(const AttentionFwd& a, int code, WorkspaceParts* parts)
      : problem(fk::attention::problem_of(a)),
        form(form_of(a.q.dtype, code)),
        maxima(problem, form, 3, parts),
        q(a.q, true, rotation_of(a), form, maxima.of(0), parts,
          fk::attention::slope_view(a.q_scale), true),
        k(a.k, false, rotation_of(a), form, maxima.of(1), parts,
          fk::attention::slope_view(a.k_scale)),
        v(a.v, false, Rotation(), form, maxima.of(2), parts, fk::attention::slope_view(a.v_scale)) {
  }

  // Returns whether there is nothing to write.
  bool empty() const { return problem.batch == 0 || problem.heads == 0 || problem.q_len == 0; }

  // Returns what the kernel is told, except for p.tiles and p.together, which follow from its tile.
  Forward arguments(const AttentionFwd& a) const {
    Forward p = {};
    p.problem = problem;
    p.q = q.operand(problem);
    p.k = k.operand(problem);
    p.v = v.operand(problem);
    if (q.inside) p.q_floats = a.q.ptr<const float>();
    p.group = static_cast<int>(problem.group());
    p.out = result_of(a.out);
    p.lse = fk::attention::row_view(a.lse);
    p.change = score_change_of(a, problem);
    if (a.sinks) {
      p.sinks = {a.sinks.data, 0, 0, a.sinks.stride(0), 0};
      p.sinks_dtype = a.sinks.dtype;
    }
    return p;
  }
};

}  // namespace fk::cuda::attention
