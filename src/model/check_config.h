// Checks a decoder's sizes, before anything is computed from them.
#pragma once

#include <string>

#include "core/status.h"
#include "model/decoder.h"

namespace fk::model {

// Larger sizes are mistakes or attacks. Within these limits, products of two sizes stay far inside
// 64 bits.
constexpr int64_t kMaxDim = 1 << 20;
constexpr int64_t kMaxHidden = 1 << 22;
constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxHeads = 1 << 12;
constexpr int64_t kMaxVocab = 1 << 24;
constexpr int64_t kMaxContext = int64_t{1} << 31;

// Returns an error that names the first size that is out of range or does not fit the others;
// `file` is the file it names.
Status check_config(const std::string& file, const Config& config);

}  // namespace fk::model
