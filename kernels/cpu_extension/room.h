// Room for numbers that vectors read and write: it starts with a cache line, so that no vector lies
// across two of them.
#pragma once

#include <cstdint>
#include <vector>

#include "lines.h"

namespace tandem {

class Room {
 public:
  // Never smaller again: what a vector grows by is set to zero each time.
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
