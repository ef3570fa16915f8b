// One tile of attention: up to kTile keys against M queries, in float32.
//
// Keys are turned so that lanes are keys, which makes a score a plain chain of multiply-adds over
// the head: its bits depend on query and key alone, not on who else is in the tile. Values are read
// as they lie, lanes along the head, in the order of positions.
#pragma once

#include <limits>

#include "vectors.h"

namespace tandem {

constexpr int kTile = 64;
constexpr int kScoreVectors = kLanes == 16 ? 4 : 2;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

constexpr int kLineBytes = 64;

// `count` elements from `at` on of kLanes rows become as many vectors of a packed tile. Meanwhile
// what will be needed next, `ahead` elements after them, is on its way.
template <class T>
inline void turn(const T* const* row, int64_t ahead, int at, int count, float* to) {
  Floats rows[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    rows[i] = load_some(row[i] + at, count);
    if (at * sizeof(T) % kLineBytes == 0) __builtin_prefetch(row[i] + ahead + at, 0, 2);
  }
  transpose(rows);
  for (int i = 0; i < count; ++i) store(to + i * kTile, rows[i]);
}

// Two numbers share a word: words are turned, half as many, and taken apart after it.
inline void turn(const BFloat16* const* row, int64_t ahead, int at, int count, float* to) {
  Floats rows[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    rows[i] = load_words(row[i] + at, count);
    if (at * sizeof(BFloat16) % kLineBytes == 0) __builtin_prefetch(row[i] + ahead + at, 0, 2);
  }
  transpose(rows);
  for (int i = 0; i < count; ++i) {
    const Words pair = as<Words>(rows[i / 2]);  // the first number is in the low half
    store(to + i * kTile, as<Floats>(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u));
  }
}

template <class T>
constexpr int kTurned = kLanes;
template <>
constexpr int kTurned<BFloat16> = 2 * kLanes;

// packed[d * kTile + j] = key[j][d] for the lanes of vectors [first, last).
template <class T>
void turn_keys(const T* const* key, int64_t ahead, int first, int last, int head_dim,
               float* packed) {
  for (int vector = first; vector < last; ++vector) {
    const T* const* lanes = key + vector * kLanes;
    for (int at = 0; at < head_dim; at += kTurned<T>) {
      const int count = head_dim - at < kTurned<T> ? head_dim - at : kTurned<T>;
      turn(lanes, ahead, at, count, packed + at * kTile + vector * kLanes);
    }
  }
}

template <int Q, int V>
inline void score_block(const float* query, int64_t query_stride, int head_dim,
                        const float* packed, float* scores) {
  Floats sums[Q][V] = {};
  for (int d = 0; d < head_dim; ++d) {
    Floats keys[V];
    for (int v = 0; v < V; ++v) keys[v] = load(packed + d * kTile + v * kLanes);
    for (int q = 0; q < Q; ++q) {
      const Floats own = splat(query[q * query_stride + d]);
      for (int v = 0; v < V; ++v) sums[q][v] += own * keys[v];
    }
  }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) store(scores + q * kTile + v * kLanes, sums[q][v]);
}

// scores[q * kTile + j] for Q queries and the lanes of vectors [first, last).
template <int Q>
void score(const float* query, int64_t query_stride, int head_dim, const float* packed, int first,
           int last, float* scores) {
  int vector = first;
  for (; vector + kScoreVectors <= last; vector += kScoreVectors)
    score_block<Q, kScoreVectors>(query, query_stride, head_dim, packed + vector * kLanes,
                                  scores + vector * kLanes);
  for (; vector < last; ++vector)
    score_block<Q, 1>(query, query_stride, head_dim, packed + vector * kLanes,
                      scores + vector * kLanes);
}

// Scores of keys [from, to) become weights, those of others 0; the running maximum and sum move on.
// Returns what sums before this tile are to be multiplied with.
inline float weigh(float* scores, int first, int last, int from, int to, float* most, float* sum) {
  const Ints lane = lane_numbers();
  Floats tile_most = splat(kMinusInfinity);
  for (int vector = first; vector < last; ++vector) {
    const Ints key = lane + vector * kLanes;
    Floats found = load(scores + vector * kLanes);
    found = (key >= from) & (key < to) ? found : splat(kMinusInfinity);
    store(scores + vector * kLanes, found);
    tile_most = found > tile_most ? found : tile_most;
  }
  const float tile = max_of(tile_most);
  const float raised = tile > *most ? tile : *most;
  // Where every score is minus infinity there is nothing to subtract: all weights are 0.
  const float subtracted = raised == kMinusInfinity ? 0.0f : raised;
  Floats weights = {};
  for (int vector = first; vector < last; ++vector) {
    const Floats weight = exp_of(load(scores + vector * kLanes) - splat(subtracted));
    store(scores + vector * kLanes, weight);
    weights += weight;
  }
  const float kept = exp_of(splat(*most - subtracted))[0];
  *sum = *sum * kept + sum_of(weights);
  *most = raised;
  return kept;
}

// `next`, where it is not null, are the keys of the next tile, fetched on the way.
template <int Q, int V, class T, class N>
inline void value_block(float* sums, int64_t sums_stride, const float* kept, const float* weights,
                        const T* const* value, const N* const* next, int from, int to, int at) {
  Floats held[Q][V];
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v)
      held[q][v] = load(sums + q * sums_stride + at + v * kLanes) * splat(kept[q]);
  for (int j = from; j < to; ++j) {
    if (next != nullptr)
      for (int line = 0; line < V * kLanes; line += kLineBytes / static_cast<int>(sizeof(N)))
        __builtin_prefetch(next[j] + at + line, 0, 2);
    Floats own[V];
    for (int v = 0; v < V; ++v) own[v] = load(value[j] + at + v * kLanes);
    for (int q = 0; q < Q; ++q) {
      const Floats weight = splat(weights[q * kTile + j]);
      for (int v = 0; v < V; ++v) held[q][v] += weight * own[v];
    }
  }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) store(sums + q * sums_stride + at + v * kLanes, held[q][v]);
}

// sums[q] = sums[q] * kept[q] + sum over keys [from, to) of weights[q * kTile + j] * value[j].
template <int Q, class T, class N>
void add_values(float* sums, int64_t sums_stride, const float* kept, const float* weights,
                const T* const* value, const N* const* next, int from, int to, int head_dim) {
  constexpr int kVectors = kLanes == 16 ? 4 : 2;
  int at = 0;
  for (; at + kVectors * kLanes <= head_dim; at += kVectors * kLanes)
    value_block<Q, kVectors>(sums, sums_stride, kept, weights, value, next, from, to, at);
  for (; at + kLanes <= head_dim; at += kLanes)
    value_block<Q, 1>(sums, sums_stride, kept, weights, value, next, from, to, at);
  if (at == head_dim) return;
  for (int q = 0; q < Q; ++q) {  // the head's last lanes, fewer than a vector
    Floats held = load(sums + q * sums_stride + at) * splat(kept[q]);
    for (int j = from; j < to; ++j)
      held += splat(weights[q * kTile + j]) * load_some(value[j] + at, head_dim - at);
    store(sums + q * sums_stride + at, held);
  }
}

}  // namespace tandem
