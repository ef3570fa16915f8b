// One tile of attention: up to kTile keys against M queries, in float32.
//
// Keys are transposed so that lanes are keys, which makes a score a plain chain of multiply-adds
// over the head: its bits depend on query and key alone, not on others in the tile. Values keep
// their layout, with lanes along the head, and are added in the order of positions.
#pragma once

#include <limits>

#include "lines.h"
#include "vectors.h"

namespace tandem {

constexpr int kTile = 64;
constexpr int kScoreVectors = kLanes == 16 ? 4 : 2;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Prefetches of keys and values that are needed next, made line by line in the midst of other work,
// in the order in which the lines lie in memory.
template <class T>
class Ahead {
 public:
  Ahead() = default;  // prefetches nothing

  // Prefetches `length` elements from each of `count` keys on, and as many from `to_value` elements
  // after each: half of the lines over `num_turns` turns(), the others over `num_sums` sums().
  Ahead(const T* const* key, int64_t count, int64_t length, int64_t to_value, int64_t num_turns,
        int64_t num_sums)
      : key_(key), lines_of_run_((length * sizeof(T) + kLineBytes - 1) / kLineBytes),
        runs_left_(2 * count), to_value_(to_value * sizeof(T)) {
    const int64_t half = count * lines_of_run_;
    per_turn_ = num_turns > 0 ? (half + num_turns - 1) / num_turns : 0;
    per_sum_ = num_sums > 0 ? (half + num_sums - 1) / num_sums : 0;
    if (count > 0) at_ = reinterpret_cast<const char*>(*key);
  }

  void turns() { ask(per_turn_); }
  void sums() { ask(per_sum_); }

 private:
  void ask(int64_t lines) {
    for (; lines > 0 && runs_left_ > 0; --lines) {
      __builtin_prefetch(at_ + line_ * kLineBytes, 0, 2);
      if (++line_ < lines_of_run_) continue;
      line_ = 0;
      if (--runs_left_ == 0) return;
      at_ = runs_left_ % 2 == 1 ? at_ + to_value_ : reinterpret_cast<const char*>(*++key_);
    }
  }

  const T* const* key_ = nullptr;
  const char* at_ = nullptr;
  int64_t lines_of_run_ = 0, runs_left_ = 0, to_value_ = 0, line_ = 0, per_turn_ = 0, per_sum_ = 0;
};

// Transposes a square of kLanes rows: to[j * kTile + i] = row[i][at + j].
#if defined(__AVX512F__)
// Loads insert quarters of rows at their places, which any port can do; only the squares of four by
// four numbers that remain occupy the port of shuffles.
inline void turn_full(const float* const* row, int at, float* to) {
  for (int part = 0; part < 4; ++part, at += 4) {
    __m512 four[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      __m512 own = _mm512_castps128_ps512(_mm_loadu_ps(row[i] + at));
      own = _mm512_insertf32x4(own, _mm_loadu_ps(row[4 + i] + at), 1);
      own = _mm512_insertf32x4(own, _mm_loadu_ps(row[8 + i] + at), 2);
      four[i] = _mm512_insertf32x4(own, _mm_loadu_ps(row[12 + i] + at), 3);
    }
    const __m512d low = _mm512_castps_pd(_mm512_unpacklo_ps(four[0], four[1]));
    const __m512d high = _mm512_castps_pd(_mm512_unpackhi_ps(four[0], four[1]));
    const __m512d low_next = _mm512_castps_pd(_mm512_unpacklo_ps(four[2], four[3]));
    const __m512d high_next = _mm512_castps_pd(_mm512_unpackhi_ps(four[2], four[3]));
    float* const first = to + 4 * part * kTile;
    _mm512_storeu_ps(first, _mm512_castpd_ps(_mm512_unpacklo_pd(low, low_next)));
    _mm512_storeu_ps(first + kTile, _mm512_castpd_ps(_mm512_unpackhi_pd(low, low_next)));
    _mm512_storeu_ps(first + 2 * kTile, _mm512_castpd_ps(_mm512_unpacklo_pd(high, high_next)));
    _mm512_storeu_ps(first + 3 * kTile, _mm512_castpd_ps(_mm512_unpackhi_pd(high, high_next)));
  }
}
#else
inline void turn_full(const float* const* row, int at, float* to) {
  Floats rows[kLanes];
  for (int i = 0; i < kLanes; ++i) rows[i] = load(row[i] + at);
  transpose(rows);
  for (int i = 0; i < kLanes; ++i) store(to + i * kTile, rows[i]);
}
#endif

// Transposes elements [at, at + count) of kLanes rows to `count` vectors of a packed tile.
template <class T>
inline void turn(const T* const* row, int at, int count, float* to) {
  if constexpr (sizeof(T) == sizeof(float))
    if (count == kLanes) return turn_full(row, at, to);
  Floats rows[kLanes];
  for (int i = 0; i < kLanes; ++i) rows[i] = load_some(row[i] + at, count);
  transpose(rows);
  for (int i = 0; i < count; ++i) store(to + i * kTile, rows[i]);
}

// Transposes words of two bfloat16, half as many, and splits them afterwards.
inline void turn(const BFloat16* const* row, int at, int count, float* to) {
  Floats rows[kLanes];
  for (int i = 0; i < kLanes; ++i) rows[i] = load_words(row[i] + at, count);
  transpose(rows);
  for (int i = 0; i < count; ++i) {
    const Words pair = as<Words>(rows[i / 2]);  // the first number is in the low half
    store(to + i * kTile, as<Floats>(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u));
  }
}

// Elements of a key that one call of `turn` takes at most.
template <class T>
constexpr int kTurned = kLanes;
template <>
constexpr int kTurned<BFloat16> = 2 * kLanes;

// Returns how often `turn_keys` calls Ahead::turns for `count` keys.
template <class T>
int64_t num_turns(int64_t count, int64_t head_dim) {
  return (count + kLanes - 1) / kLanes * ((head_dim + kTurned<T> - 1) / kTurned<T>);
}

// Transposes keys: packed[d * kTile + j] = key[j][d] for the lanes of vectors [first, last).
template <class T>
void turn_keys(const T* const* key, Ahead<T>& ahead, int first, int last, int head_dim,
               float* packed) {
  for (int vector = first; vector < last; ++vector) {
    const T* const* lanes = key + vector * kLanes;
    for (int at = 0; at < head_dim; at += kTurned<T>) {
      const int count = head_dim - at < kTurned<T> ? head_dim - at : kTurned<T>;
      ahead.turns();
      turn(lanes, at, count, packed + at * kTile + vector * kLanes);
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
      for (int v = 0; v < V; ++v) sums[q][v] = fused(own, keys[v], sums[q][v]);
    }
  }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) store(scores + q * kTile + v * kLanes, sums[q][v]);
}

// Computes scores[q * kTile + j] for Q queries and the lanes of vectors [first, last).
template <int Q>
void score(const float* query, int64_t query_stride, int head_dim, const float* packed, int first,
           int last, float* scores) {
  int vector = first;
  for (; vector + kScoreVectors <= last; vector += kScoreVectors)
    score_block<Q, kScoreVectors>(query, query_stride, head_dim, packed + vector * kLanes,
                                  scores + vector * kLanes);
  for (; vector + 2 <= last; vector += 2)
    score_block<Q, 2>(query, query_stride, head_dim, packed + vector * kLanes,
                      scores + vector * kLanes);
  for (; vector < last; ++vector)
    score_block<Q, 1>(query, query_stride, head_dim, packed + vector * kLanes,
                      scores + vector * kLanes);
}

// Turns the scores of keys [from, to) into weights and all others into 0, and updates a query's
// running maximum and sum. Returns the factor of the sums before this tile.
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
  // If every score is minus infinity, 0 is subtracted, because the difference of infinities is NaN.
  const float subtracted = raised == kMinusInfinity ? 0.0f : raised;
  Floats weights = {};
  for (int vector = first; vector < last; ++vector) {
    const Floats weight = exp_of(load(scores + vector * kLanes) - splat(subtracted));
    store(scores + vector * kLanes, weight);
    weights += weight;
  }
  const float kept = exp_of(splat(*most - subtracted))[0];
  *sum = fused(*sum, kept, sum_of(weights));
  *most = raised;
  return kept;
}

template <int Q, int V, class T, class N>
inline void value_block(float* sums, int64_t sums_stride, const float* kept, const float* weights,
                        const T* const* value, Ahead<N>* ahead, int from, int to, int at) {
  Floats held[Q][V];
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v)
      held[q][v] = load(sums + q * sums_stride + at + v * kLanes) * splat(kept[q]);
  for (int j = from; j < to; ++j) {
    if (ahead != nullptr) ahead->sums();
    Floats own[V];
    for (int v = 0; v < V; ++v) own[v] = load(value[j] + at + v * kLanes);
    for (int q = 0; q < Q; ++q) {
      const Floats weight = splat(weights[q * kTile + j]);
      for (int v = 0; v < V; ++v) held[q][v] = fused(weight, own[v], held[q][v]);
    }
  }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) store(sums + q * sums_stride + at + v * kLanes, held[q][v]);
}

// Computes sums[q] = sums[q] * kept[q] + sum over keys [from, to) of weights[q * kTile + j] *
// value[j] for Q query rows; `ahead` may be null.
template <int Q, class T, class N>
void add_values(float* sums, int64_t sums_stride, const float* kept, const float* weights,
                const T* const* value, Ahead<N>* ahead, int from, int to, int head_dim) {
  constexpr int kVectors = kLanes == 16 ? 4 : 2;
  int at = 0;
  for (; at + kVectors * kLanes <= head_dim; at += kVectors * kLanes)
    value_block<Q, kVectors>(sums, sums_stride, kept, weights, value, ahead, from, to, at);
  for (; at + kLanes <= head_dim; at += kLanes)
    value_block<Q, 1>(sums, sums_stride, kept, weights, value, ahead, from, to, at);
  if (at == head_dim) return;
  for (int q = 0; q < Q; ++q) {  // the head's last lanes, fewer than a vector
    Floats held = load(sums + q * sums_stride + at) * splat(kept[q]);
    for (int j = from; j < to; ++j)
      held = fused(splat(weights[q * kTile + j]), load_some(value[j] + at, head_dim - at), held);
    store(sums + q * sums_stride + at, held);
  }
}

}  // namespace tandem
