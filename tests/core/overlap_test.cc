// No output may lie over the values of an index tensor, which would be overwritten after they were
// checked. Derived from the declarations, so that a new op is covered by being declared.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "check/drawn_call.h"
#include "core/access.h"
#include "core/op.h"

namespace fk {
namespace {

bool is_index(const Field& f) {
  if (f.kind != Kind::kInput) return false;
  return f.dtype_rule == DTypeRule::kIndex || f.dtype_rule == DTypeRule::kInt32;
}

// A drawn call whose tensors have memory, which it is only asked about.
class Question {
 public:
  explicit Question(const DrawnCall& drawn) : op_(drawn.op), slots_(drawn.attributes) {
    const std::vector<Field>& fields = op_->declaration.fields;
    tensors_.resize(fields.size());
    memory_.resize(fields.size());
    int64_t all = 8;
    for (const DrawnTensor& t : drawn.tensors) all += t.present ? t.numel() : 0;
    for (size_t i = 0; i < fields.size(); ++i) {
      if (fields[i].kind != Kind::kInput && fields[i].kind != Kind::kOutput) continue;
      const DrawnTensor& t = drawn.tensors[i];
      slots_[i].tensor = t.present ? &tensors_[i] : nullptr;
      if (!t.present) continue;
      shapes_.push_back(std::make_unique<std::vector<int64_t>>(t.shape));
      memory_[i].resize(static_cast<size_t>(t.numel() + all));  // any other fits behind it
      tensors_[i].data = memory_[i].data();
      tensors_[i].device = {kDLCPU, 0};
      tensors_[i].ndim = static_cast<int32_t>(t.shape.size());
      tensors_[i].shape = shapes_.back()->data();
      const auto bits = static_cast<uint8_t>(8 * size_of(t.dtype));
      const bool integer = t.dtype == DType::kInt32 || t.dtype == DType::kInt64;
      tensors_[i].dtype = {static_cast<uint8_t>(integer ? kDLInt : kDLFloat), bits, 1};
      Tensor view;
      EXPECT_TRUE(from_dlpack(tensors_[i], true, &view).ok());
      for (size_t k = 0; k < t.values.size(); ++k) {
        if (t.dtype == DType::kInt64) {
          view.ptr<int64_t>()[k] = static_cast<int64_t>(t.values[k]);
        } else if (integer) {
          view.ptr<int32_t>()[k] = static_cast<int32_t>(t.values[k]);
        }
      }
    }
  }

  // Where tensor `i` lies, and where it ends.
  char* begin(size_t i) { return static_cast<char*>(tensors_[i].data); }
  char* end(size_t i) {
    int64_t bytes = tensors_[i].dtype.bits / 8;
    for (int d = 0; d < tensors_[i].ndim; ++d) bytes *= tensors_[i].shape[d];
    return begin(i) + bytes;
  }
  void move(size_t i, void* data) { tensors_[i].data = data; }

  // The error that it gets, or "".
  std::string ask() {
    size_t bytes = 0;
    return fk_op_workspace(op_, slots_.data(), &bytes) == FK_OK ? "" : fk_last_error();
  }

 private:
  const fk_op* op_;
  std::vector<fk_slot> slots_;
  std::vector<DLTensor> tensors_;
  std::vector<std::vector<int64_t>> memory_;
  std::vector<std::unique_ptr<std::vector<int64_t>>> shapes_;
};

TEST(Overlap, OutputsOverIndicesAreRefused) {
  std::set<std::string> tried, expected;
  for (const auto& op : Registry::get().ops()) {
    const std::vector<Field>& fields = op->declaration.fields;
    if (std::none_of(fields.begin(), fields.end(), is_index)) continue;
    for (const Field& f : fields) {
      if (is_index(f)) expected.insert(op->declaration.name + " " + f.name);
    }
    for (uint64_t seed = 0; seed < 40; ++seed) {
      DrawOptions options;
      options.seed = seed;
      DrawnCall drawn;
      const Status status = draw_call(*op, options, &drawn);
      ASSERT_TRUE(status.ok()) << status.message();
      for (size_t i = 0; i < fields.size(); ++i) {
        if (!is_index(fields[i])) continue;
        for (size_t k = 0; k < fields.size(); ++k) {
          if (fields[k].kind != Kind::kOutput) continue;
          if (!drawn.tensors[i].present || !drawn.tensors[k].present) continue;
          if (drawn.tensors[i].numel() == 0 || drawn.tensors[k].numel() == 0) continue;
          const std::string name = op->declaration.name + " " + fields[i].name;
          SCOPED_TRACE(name + " " + fields[k].name);
          Question question(drawn);
          ASSERT_EQ(question.ask(), "");
          const std::string refusal = fields[i].name +
                                      ": expected memory that nothing is written to, got some of " +
                                      fields[k].name + "'s";
          question.move(k, question.begin(i));
          EXPECT_NE(question.ask().find(refusal), std::string::npos) << question.ask();
          question.move(k, question.end(i) - 4);  // the last value, or the second half of it
          EXPECT_NE(question.ask().find(refusal), std::string::npos) << question.ask();
          question.move(k, question.end(i));
          EXPECT_EQ(question.ask(), "");
          tried.insert(name);
        }
      }
    }
  }
  EXPECT_EQ(tried, expected);
  EXPECT_FALSE(tried.empty());
}

}  // namespace
}  // namespace fk
