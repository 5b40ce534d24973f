// Reads what nvcc puts into an object beside the host code: the "fat binary", a list of images of
// one translation unit's device code, each for an architecture.
#pragma once

#include <string>
#include <vector>

namespace fk::softgpu {

struct PtxImage {
  int architecture = 0;  // of its .target line: 75, 80, 90 (90a too)
  std::string source;    // the file that it was compiled from, as the compiler was told
  std::string ptx;
};

struct FatBinary {
  std::vector<PtxImage> images;  // those that are PTX; machine code is left out
  std::string problem;           // why it could not be read to its end; empty where it could
};

// `wrapper` is what __cudaRegisterFatBinary is given.
FatBinary read_fat_binary(const void* wrapper);

// Returns the image of the highest architecture that is not above the given one, or nullptr where
// all are.
const PtxImage* choose_image(const FatBinary& binary, int architecture);

}  // namespace fk::softgpu
