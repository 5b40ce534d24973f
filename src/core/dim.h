// The grammar of shapes in declarations: what stands between the brackets of `T[..., 4*H]`.
//
//   7            a number
//   N            a symbol: the same size wherever it stands in a call
//   W-1, S+1     a symbol's size, less or more a number
//   4*H          a number of times a symbol's size; `4*H+1` is possible too
//   N?           that size, or 1
//   L/checkpoint how many whole blocks of a length there are (block_count), the length being an
//                integer attribute declared before
//   ...          any number of leading dims, the same wherever it stands
//   H, (P)       the last dims may be missing
//   B, L | L     alternative shapes
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fk {

struct OpDeclaration;

struct Dim {
  static constexpr int kEllipsis = -2;
  static constexpr int kNumber = -1;
  int symbol = kNumber;  // index into OpDeclaration::symbols, or one of the above
  int64_t offset = 0;    // the number itself, or what is added to the symbol's size
  int64_t factor = 1;    // what the symbol's size is multiplied by before that
  bool or_one = false;   // the size may also be 1
  int blocks_of = -1;    // index of the integer attribute that is the length of a block

  // Returns whether a tensor that has this dim tells the size of the symbol (or the leading dims).
  bool tells_size() const { return symbol != kNumber && !or_one && blocks_of < 0; }
};

// A declared shape.
using Dims = std::vector<Dim>;

inline bool has_leading_dims(const Dims& dims) {
  return !dims.empty() && dims[0].symbol == Dim::kEllipsis;
}

// Returns whether a shape with this many sizes may be of this kind.
inline bool rank_fits(const Dims& dims, int ndim) {
  const int named = static_cast<int>(dims.size());
  return has_leading_dims(dims) ? ndim >= named - 1 : ndim == named;
}

// Returns the alternatives that a text describes; symbols in it that are new to the op are added to
// its own. `by_rank` says that the text has dims that may be missing, so that the tensor's own rank
// decides.
std::vector<Dims> parse_shapes(OpDeclaration& op, const std::string& text, bool* by_rank);

// Returns a dim as a declaration writes it, but for the question mark, which is " or 1" here.
std::string dim_text(const OpDeclaration& op, const Dim& dim);

// Returns the length of blocks that `size` is cut into, by the attribute that says so: itself if it
// is positive; 0, there are none, if it is 0; below 0 the square root of `size`, rounded up.
int64_t block_length(int64_t size, int64_t attribute);
// Returns how many whole blocks there are.
int64_t block_count(int64_t size, int64_t attribute);

}  // namespace fk
