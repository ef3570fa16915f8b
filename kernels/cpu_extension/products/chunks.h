// Sums of chunks of a product, added as a binary tree while they come one after another: linear.cpp
// says what chunks are.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace tandem {

// Returns the place of a chunk's sums: one for each subtree before it that waits for its neighbour.
inline int64_t place_of_chunk(int64_t chunk) { return __builtin_popcountll(chunk); }

// Returns the places that the sums of so many chunks take, at most.
inline int64_t places_of_chunks(int64_t num_chunks) {
  return num_chunks == 1 ? 1 : 1 + place_of_chunk(num_chunks - 1);
}

// Adds the finished sums of a chunk, `count` at its place, to those of each subtree that it
// completes. Places are `stride` apart; after the last chunk the first place holds the total.
inline void join_chunks(int64_t chunk, float* sums, int64_t stride, int64_t count) {
  for (int64_t done = chunk + 1; done % 2 == 0; done /= 2, sums -= stride)
    for (int64_t at = 0; at < count; at += kLanes)
      store(sums - stride + at, load(sums - stride + at) + load(sums + at));
}

}  // namespace tandem
