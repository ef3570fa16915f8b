// Scratch memory for vectors. It starts at the start of a cache line, so that no vector in it lies
// across two lines.
#pragma once

#include <cstdint>
#include <vector>

#include "lines.h"

namespace tandem {

class Room {
 public:
  // Returns memory for `floats` numbers, with whatever they held before. It never shrinks, because
  // std::vector would set the numbers to zero each time that it grows again.
  float* of(int64_t floats) {
    const size_t needed = (floats + kLineFloats - 1) / kLineFloats;
    if (lines_.size() < needed) lines_.resize(needed);
    return lines_.empty() ? nullptr : lines_.front().floats;
  }

 private:
  static constexpr int64_t kLineFloats = kLineBytes / 4;
  struct alignas(kLineBytes) Line {
    float floats[kLineFloats];
  };
  std::vector<Line> lines_;
};

}  // namespace tandem
