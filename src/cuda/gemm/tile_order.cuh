// The order in which persistent blocks take the tiles of a product. Tiles that are computed at the
// same time share rows of A and columns of B in the L2 cache: `group` rows of tiles are walked
// column by column before the next group begins.
#pragma once

#include "core/host_device.h"

namespace fk::cuda {

struct TileOrder {
  int rows = 0, columns = 0;  // of tiles
  int group = 1;

  FK_HOST_DEVICE int count() const { return rows * columns; }

  FK_HOST_DEVICE void place(int index, int* row, int* column) const {
    const int in_group = group * columns;
    const int first = index / in_group * group;
    const int height = rows - first < group ? rows - first : group;
    const int rest = index % in_group;
    *row = first + rest % height;
    *column = rest / height;
  }
};

}  // namespace fk::cuda
