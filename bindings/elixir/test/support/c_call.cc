// What a call of layer_norm on a row of eight costs from C: prints the nanoseconds of the quickest
// of many batches. The NIF's own cost is what a call from Elixir takes beyond that.
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "flashkernel/abi.h"

int main() {
  float x[8] = {1, 2, 3, 4, 5, 6, 7, 8}, weight[8] = {1, 1, 1, 1, 1, 1, 1, 1}, y[8];
  int64_t row[2] = {1, 8}, columns[1] = {8};
  const DLDataType type{kDLFloat, 32, 1};
  DLTensor tensors[] = {{x, {kDLCPU, 0}, 2, type, row, nullptr, 0},
                        {weight, {kDLCPU, 0}, 1, type, columns, nullptr, 0},
                        {y, {kDLCPU, 0}, 2, type, row, nullptr, 0}};
  const fk_op* const op = fk_find_op("layer_norm_fwd");
  fk_slot slots[64] = {};
  int inputs = 0, outputs = 0;
  for (size_t i = 0; i < fk_op_slot_count(op); ++i) {
    switch (fk_op_slot_kind(op, i)) {
      case FK_SLOT_INPUT:
        slots[i].tensor = inputs < 2 ? &tensors[inputs] : nullptr;
        ++inputs;
        break;
      case FK_SLOT_OUTPUT:
        slots[i].tensor = outputs++ == 0 ? &tensors[2] : nullptr;
        break;
      case FK_SLOT_INTEGER:
        slots[i].integer = 0;
        break;
      default:
        slots[i].number = 1e-5;
    }
  }
  const fk_exec exec = FK_EXEC_DEFAULTS;
  double best = 1e9;
  for (int batch = 0; batch < 50; ++batch) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 5000; ++i) {
      if (fk_op_call(op, slots, &exec) != FK_OK) {
        std::fprintf(stderr, "%s\n", fk_last_error());
        return 1;
      }
    }
    const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - begin;
    best = std::min(best, taken.count() / 5000);
  }
  std::printf("%.1f\n", best);
}
