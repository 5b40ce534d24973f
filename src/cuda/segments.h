// How sequences are cut into segments that threads or blocks take side by side.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/integers.h"
#include "core/sequences.h"

namespace fk::cuda {

// Steps that one block scans, part of one sequence.
struct Segment {
  int64_t sequence, batch;
  int64_t begin, end;   // of the sequence, in steps of the batch row
  int64_t first, last;  // of the segment
  bool opens, closes;   // holds the sequence's beginning, its end
  bool exists;          // no: a slot without a segment
};

// Slots for segments of `steps` steps, all slots of a sequence one after another. How many segments
// packed sequences need is known on the device only; sequence s has slots from
// begin / steps + s on, which leaves room for every sequence and at most one empty slot each.
struct Segments {
  Sequences sequences;
  int64_t steps = 1;
  int64_t slots = 0;

  FK_HOST_DEVICE int64_t per_row() const {
    const int64_t n = ceil_div(sequences.length, steps);
    return n > 0 ? n : 1;
  }
  FK_HOST_DEVICE int64_t first_slot(int64_t s) const {
    return !sequences.packed ? s * per_row() : sequences[s].begin / steps + s;
  }
  FK_HOST_DEVICE int64_t count_of(int64_t s) const {
    const SequenceSteps q = sequences[s];
    const int64_t n = ceil_div(q.end - q.begin, steps);
    return n > 0 ? n : 1;
  }
  FK_HOST_DEVICE Segment operator[](int64_t slot) const {
    int64_t s = slot / per_row();
    if (sequences.packed) {
      int64_t low = 0,
              high = sequences.count - 1;  // the last sequence whose slots begin here or before
      while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (first_slot(middle) <= slot) {
          low = middle;
        } else {
          high = middle - 1;
        }
      }
      s = low;
    }
    const SequenceSteps q = sequences[s];
    const int64_t index = slot - first_slot(s);
    Segment g;
    g.sequence = s;
    g.batch = q.batch;
    g.begin = q.begin;
    g.end = q.end;
    g.first = q.begin + index * steps;
    g.exists = index >= 0 && (index == 0 || g.first < q.end);
    g.last = g.first + steps < q.end ? g.first + steps : q.end;
    g.opens = index == 0;
    g.closes = g.last == q.end;
    return g;
  }
};

inline Segments segments_of(const Sequences& sequences, int64_t steps) {
  Segments g;
  g.sequences = sequences;
  g.steps = steps;
  g.slots = !sequences.packed ? sequences.count * g.per_row()
                              : sequences.length / steps + sequences.count;
  if (sequences.count == 0) g.slots = 0;
  return g;
}

}  // namespace fk::cuda
