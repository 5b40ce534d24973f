// This is what the forward's kernels are given.
#pragma once

#include "ops/ssd/cuda/inputs.h"

namespace fk::cuda::ssd {

struct ForwardArguments {
  Inputs in;
  Rows y;            // without data: only states are asked for
  View final_state;  // without data: it is not asked for
  Segments chunks;   // of a tile's steps
  Segments walks;    // what a block walks through, of whole chunks
  Slices slices;
  int stages;              // chunks in shared memory: 2 where one is copied ahead, else 1
  int64_t product_blocks;  // of the first launch; its other blocks walk

  // Triangles of C B^T, one for each chunk and group (chunk_products.cuh). NULL: blocks multiply
  // for themselves.
  float* products;
  void* decays;  // ChunkDecays of each chunk and head (prepared.cuh)
  // Where sequences are cut, this is what each walk makes of a state of 0, and its decay as a
  // whole; by walk and head. NULL where they are not cut.
  float *walk_states, *walk_decays;
};

}  // namespace fk::cuda::ssd
