// The output stage of core/output_stage.h on the CPU: whoever stores the last part of some rows of
// y writes their norm, while they are in its cache; and a backward begins with the norm's.
#pragma once

#include <algorithm>
#include <atomic>
#include <optional>

#include "core/exec.h"
#include "core/integers.h"
#include "core/output_stage.h"
#include "core/workspace.h"
#include "cpu/gemm/view.h"
#include "cpu/norm/backward.h"
#include "cpu/norm/forward.h"

namespace fk::cpu {

class OutputNorm {
 public:
  // `y` is the op's output, or undefined where it is not asked for; it has `columns` of `dtype`.
  // Rows are counted in blocks of `block_rows`.
  OutputNorm(const OutputStage& a, const Tensor& y, DType dtype, int64_t columns,
             int64_t block_rows, WorkspaceParts& parts);

  bool wanted() const { return job_.has_value(); }
  // Returns where the op stores its output: y or, where only the norm is asked for, a place for it.
  const Tensor& y() const { return y_; }
  // Comes before anything is stored.
  void begin() const;
  // Comes when so many rows and columns of y are stored, from `first_row` on. Several threads may
  // call at once.
  void stored(int64_t first_row, int64_t rows, int64_t columns) const;

 private:
  Tensor y_;
  int64_t rows_ = 0, block_rows_;
  std::atomic<int64_t>* stored_ = nullptr;  // elements of each block of rows
  std::optional<NormForward> job_;
  NormForwardRows kernel_ = nullptr;
};

// The gradient of y in all: dy itself, or with a norm what its backward adds to dy.
class OutputGradient {
 public:
  // The rows are worked on in so many pieces, each of which has sums of its own. The gradient lies
  // in dresidual, if that is asked for, else in `place` where that has rows, else in the workspace.
  OutputGradient(const OutputStageGradient& a, const Tensor& dy, int64_t pieces,
                 const MatrixView& place, WorkspaceParts& parts);

  bool goes_through_norm() const { return job_.has_value(); }
  const Tensor& gradient() const { return gradient_; }
  // Computes the rows [begin, end) of a piece; they are its first ones, or those behind the last.
  void rows(int64_t piece, int64_t begin, int64_t end, bool first) const;
  // Adds up what the pieces summed, once all of them are done.
  void finish(int64_t pieces) const;
  // All of this, for ops that have nothing to add, with the pieces that gradient_pieces says; and
  // dresidual where there is no norm.
  void run(const Exec& exec) const;

 private:
  const OutputStageGradient& a_;
  Tensor dy_, gradient_;
  int64_t sums_width_;
  float *weight_sums_ = nullptr, *bias_sums_ = nullptr;
  std::optional<NormBackward> job_;
  NormBackwardRows kernel_ = nullptr;
};

// The output stage behind an op's kernels, or ahead of its backward's (core/staged.h).
struct Stage {
  // y = made + residual, if `adds`, and the norm of that. `made` is y where nothing is added and y
  // is asked for.
  static Status forward(const OutputStage& a, const Tensor& made, const Tensor& y, bool adds,
                        const Exec& exec);

  // Returns how many bytes `backward` needs of the workspace.
  static size_t backward_bytes(const OutputStageGradient& a, const Tensor& dy);
  // `total` = dy and what comes through the norm, if anything does; `copy`, where it is there,
  // becomes dy; and the gradients of the norm's parameters.
  static Status backward(const OutputStageGradient& a, const Tensor& dy, const Tensor& total,
                         const Tensor& copy, void* memory, const Exec& exec);
};

// The pieces of rows whose sums are kept apart, by the shape alone: sums are the same whatever the
// threads are. A piece of fewer rows would be little beside its sums.
inline int64_t gradient_piece(int64_t rows) { return std::max<int64_t>(8, ceil_div(rows, 64)); }
inline int64_t gradient_pieces(int64_t rows) { return ceil_div(rows, gradient_piece(rows)); }

// out[n] = the sum of sums[i * width + n] over the pieces i.
void add_pieces(const float* sums, int64_t pieces, int64_t width, const Tensor& out);

}  // namespace fk::cpu
