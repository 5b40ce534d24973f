// An output stage (core/output_stage.h) behind an op whose kernels do not write it themselves. The
// op runs as if it had no stage, into rows of its own where y is not yet what it computes; then the
// stage makes y and its norm of those. In the backward the norm comes first. Each backend has a
// `Stage`, which does its part of that.
//
// A room puts `staged<Args, Stage, run, workspace>` where the op's table would have `run`. An
// argument struct says which of its tensors is y, or its gradient, and what dtype that has:
//
//   Tensor& stage_output() { return y; }        in the forward's
//   DType stage_dtype() const { return x.dtype; }
//   Tensor& stage_gradient() { return dy; }     in the backward's
#pragma once

#include <type_traits>
#include <vector>

#include "core/access.h"
#include "core/op.h"
#include "core/output_stage.h"
#include "core/rows.h"
#include "core/workspace.h"

namespace fk {

// The forward of a call whose stage comes behind it. `kAdds`: the op's kernel adds the residual.
template <class Args, bool kAdds>
struct StagedForward {
  Args op;         // without what the stage does
  Tensor y;        // the call's own
  bool adds;       // a residual is left to add
  bool wants_any;  // there is a stage at all

  StagedForward(const Args& a, WorkspaceParts& parts) : op(a) {
    y = op.stage_output();
    adds = !kAdds && a.residual && (y || a.wants_norm());
    wants_any = adds || a.wants_norm();
    static_cast<OutputStage&>(op) = OutputStage();
    if (kAdds) op.residual = a.residual;
    Tensor& made = op.stage_output();
    if (!kAdds && a.before_residual) {
      made = a.before_residual;
    } else if (wants_any && (adds || !y)) {
      const Tensor& like = y ? y : a.normed ? a.normed : a.norm_stats;
      const int64_t columns = y ? y.size(-1) : a.norm_weight.size(0);
      const int64_t bytes = rows_of(like).count * columns * size_of(a.stage_dtype());
      made = rows_like(like, a.stage_dtype(), columns, columns, parts.take<char>(bytes));
    }
  }
};

// The same for a backward. `kAdds`: the op's kernel makes dresidual, where there is no norm.
template <class Args, bool kAdds>
struct StagedBackward {
  Args op;      // without what the stage does; its dy is y's gradient in all
  Tensor copy;  // dresidual, where it is dy and left to copy

  StagedBackward(const Args& a, WorkspaceParts& parts) : op(a) {
    static_cast<OutputStageGradient&>(op) = OutputStageGradient();
    if (!a.goes_through_norm()) {
      (kAdds ? op.dresidual : copy) = a.dresidual;
      return;
    }
    Tensor& dy = op.stage_gradient();
    if (a.dresidual) {
      dy = a.dresidual;
    } else {
      const int64_t bytes = rows_of(dy).count * dy.size(-1) * size_of(dy.dtype);
      dy = rows_like(dy, dy.dtype, dy.size(-1), dy.size(-1), parts.take<char>(bytes));
    }
  }
};

// This is what implements an op with `kRun` and the stage of a backend behind it, or in front of
// it. `kWrites` says of which calls kRun takes the stage as well.
template <class Args, class Stage, Status (*kRun)(const Args&, const Exec&),
          size_t (*kWorkspace)(const Args&), bool kAdds, bool (*kAccepts)(const Args&),
          bool (*kWrites)(const Args&)>
struct Staged {
  static constexpr bool kForward = std::is_base_of_v<OutputStage, Args>;
  using Call =
      std::conditional_t<kForward, StagedForward<Args, kAdds>, StagedBackward<Args, kAdds>>;

  static bool accepts(const Args& a) {
    WorkspaceParts parts;
    return kAccepts(Call(a, parts).op);
  }

  static bool writes(const Args& a) {
    if constexpr (kWrites != nullptr) return kWrites(a);
    return false;
  }

  // The op's workspace lies behind the stage's.
  static size_t workspace(const Args& a) {
    if (writes(a)) return kWorkspace(a);
    WorkspaceParts parts;
    const Call call(a, parts);
    if constexpr (!kForward) {
      Args whole = a;
      parts.take<char>(Stage::backward_bytes(a, whole.stage_gradient()));
    }
    return parts.bytes() + kWorkspace(call.op);
  }

  static Status run(const Args& a, const Exec& exec) {
    if (writes(a)) return kRun(a, exec);
    WorkspaceParts parts(exec.workspace());
    Call call(a, parts);
    if constexpr (kForward) {
      FK_RETURN_IF_ERROR(kRun(call.op, exec.behind(parts.bytes())));
      if (!call.wants_any) return {};
      return Stage::forward(a, call.op.stage_output(), call.y, call.adds, exec);
    } else {
      Args whole = a;
      void* const memory = parts.take<char>(Stage::backward_bytes(a, whole.stage_gradient()));
      FK_RETURN_IF_ERROR(Stage::backward(a, whole.stage_gradient(), call.op.stage_gradient(),
                                         call.copy, memory, exec));
      return kRun(call.op, exec.behind(parts.bytes()));
    }
  }
};

// A row of an op's table, as ImplementationOf.
template <class Args, class Stage, Status (*kRun)(const Args&, const Exec&),
          size_t (*kWorkspace)(const Args&), bool kAdds = false,
          bool (*kAccepts)(const Args&) = nullptr, bool (*kWrites)(const Args&) = nullptr>
ImplementationOf<Args> staged(const char* name, Rank rank) {
  using Whole = Staged<Args, Stage, kRun, kWorkspace, kAdds, kAccepts, kWrites>;
  return {name, rank, kAccepts == nullptr ? nullptr : Whole::accepts, Whole::run, Whole::workspace};
}

namespace reference {

// The definition of an op with a stage, by that of the op without: its y is float until the
// residual is added.
template <class Args, Status (*kRun)(const Args&, const Exec&)>
Status run_staged(const Args& a, const Exec& exec) {
  Args op = a;
  if constexpr (std::is_base_of_v<OutputStage, Args>) {
    if (!a.residual && !a.wants_norm()) return kRun(a, exec);
    const Tensor y = op.stage_output();
    const Tensor& like = y              ? y
                         : a.normed     ? a.normed
                         : a.norm_stats ? a.norm_stats
                                        : a.before_residual;
    static_cast<OutputStage&>(op) = OutputStage();
    if (!like) return kRun(op, exec);
    const int64_t rows = rows_of(like).count;
    const int64_t columns = a.norm_weight ? a.norm_weight.size(0) : like.size(-1);
    std::vector<float> made(static_cast<size_t>(rows * columns));
    op.stage_output() = rows_like(like, DType::kFloat32, columns, columns, made.data());
    FK_RETURN_IF_ERROR(kRun(op, exec));
    if (a.before_residual) {
      const Rows kept = rows_of(a.before_residual);
      for (int64_t i = 0; i < rows * columns; ++i) {
        store(a.before_residual,
              kept.offset(i / columns) + i % columns * a.before_residual.stride(-1),
              made[static_cast<size_t>(i)]);
      }
    }
    finish_rows(a, y, a.stage_dtype(), columns, {made.begin(), made.end()});
    return {};
  } else {
    if (!a.dresidual && !a.norm_weight) return kRun(a, exec);
    Tensor& dy = op.stage_gradient();
    const int64_t rows = rows_of(dy).count, columns = dy.size(-1);
    const StageGradient gradient(a, dy);
    std::vector<float> total;
    for (int64_t i = 0; i < rows * columns; ++i) {
      total.push_back(static_cast<float>(gradient.at(i / columns, i % columns)));
    }
    static_cast<OutputStageGradient&>(op) = OutputStageGradient();
    dy = rows_like(dy, DType::kFloat32, columns, columns, total.data());
    return kRun(op, exec);
  }
}

}  // namespace reference

}  // namespace fk
