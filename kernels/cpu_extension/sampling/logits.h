// One row of logits on the CPU: its best ids, and the winner among them with noise.
//
// A row is read from memory once and then swept again while it is in cache. Comparisons of logits
// are exact. Cuts are logits too: dividing by a temperature keeps the order, so "a scaled logit of
// at least s" is "a logit of at least x" for the least x that is scaled to s or more.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "vectors.h"
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace tandem {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int64_t kSerialElements = 1 << 16;  // fewer cost less than waking other threads

inline bool any(Ints lanes) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif defined(__AVX__)
  return !_mm256_testz_si256((__m256i)lanes, (__m256i)lanes);
#else
  int32_t some = 0;
  for (int lane = 0; lane < kLanes; ++lane) some |= lanes[lane];
  return some != 0;
#endif
}

// Calls `visit` with the first id and the logits of each vector; lanes past the end are -infinity.
template <class T, class Visit>
inline void sweep(const T* logits, int64_t from, int64_t to, Visit visit) {
  int64_t at = from;
  for (; at + kLanes <= to; at += kLanes) visit(at, load(logits + at));
  if (at < to) {
    const int count = static_cast<int>(to - at);
    const Ints lanes = lane_numbers();
    visit(at, lanes < count ? load_some(logits + at, count) : splat(kNever));
  }
}

struct Best {
  float logit;  // the largest, or NaN if the row has one
  int64_t id;   // the lowest id with this logit
};

template <class T>
inline Best best_of(const T* logits, int64_t size) {
  constexpr int64_t kChunk = 1024;  // ids; only the chunk with the best is searched for its id
  Best best{kNever, 0};
  int64_t chunk = 0;
  for (int64_t from = 0; from < size; from += kChunk) {
    Floats most = splat(kNever);
    Ints nan = {};
    sweep(logits, from, std::min(size, from + kChunk), [&](int64_t, Floats x) {
      most = x > most ? x : most;
      nan |= x != x;
    });
    if (any(nan)) return {std::numeric_limits<float>::quiet_NaN(), 0};
    const float own = max_of(most);
    if (own > best.logit) {
      best.logit = own;
      chunk = from;
    }
  }
  bool found = false;
  sweep(logits, chunk, std::min(size, chunk + kChunk), [&](int64_t at, Floats x) {
    const Ints here = x == splat(best.logit);
    if (found || !any(here)) return;
    found = true;
    for (best.id = at; !here[best.id - at]; ++best.id) continue;
  });
  return best;
}

struct Logit {
  float value;
  int32_t id;
};

// Fills `found` with the `count` best finite logits and a few more, in the order of ids; with all
// finite logits if there are fewer.
template <class T>
inline void collect_best(const T* logits, int64_t size, int64_t count, std::vector<Logit>* found) {
  // The count-th largest of the maxima of disjoint columns is at most the count-th largest logit,
  // and close to it because there are twice as many columns.
  const int64_t vectors = (size + kLanes - 1) / kLanes;
  const int64_t height = std::max<int64_t>(1, vectors * kLanes / (2 * count));
  std::vector<float> maxima((vectors + height - 1) / height * kLanes);
  float* column = maxima.data();
  for (int64_t from = 0; from < size; from += height * kLanes, column += kLanes) {
    Floats most = splat(kNever);
    sweep(logits, from, std::min(size, from + height * kLanes),
          [&](int64_t, Floats x) { most = x > most ? x : most; });
    store(column, most);
  }
  const auto place = maxima.begin() + count - 1;
  std::nth_element(maxima.begin(), place, maxima.end(), std::greater<float>());
  const float least = std::max(*place, std::numeric_limits<float>::lowest());
  found->clear();
  sweep(logits, 0, size, [&](int64_t at, Floats x) {
    const Ints taken = x >= splat(least);
    if (!any(taken)) return;
    for (int lane = 0; lane < kLanes; ++lane)
      if (taken[lane]) found->push_back({x[lane], static_cast<int32_t>(at + lane)});
  });
}

// Returns the count-th largest logit, or -infinity if fewer are finite.
template <class T>
inline float best_but(const T* logits, int64_t size, int64_t count, std::vector<Logit>* scratch) {
  collect_best(logits, size, count, scratch);
  if (static_cast<int64_t>(scratch->size()) < count) return kNever;
  const auto place = scratch->begin() + count - 1;
  std::nth_element(scratch->begin(), place, scratch->end(),
                   [](Logit a, Logit b) { return a.value > b.value; });
  return place->value;
}

// Scaled logits of a row, (logit - best) / temperature: `scale` of kernels/sampling/reference.py.
struct Scale {
  float best, temperature;

  float operator()(float logit) const { return (logit - best) / temperature; }

  // Returns scaled logits without a division, wrong by at most two units in the last place.
  Floats near(Floats logits) const {
    return (logits - splat(best)) * splat(1.0f / temperature);
  }

  // Returns scaled logits that are wrong by at most one unit in the last place: `near` plus the
  // quotient of its remainder.
  Floats nearer(Floats logits) const {
    const Floats distance = logits - splat(best), guess = near(logits);
    return guess + (distance - guess * splat(temperature)) * splat(1.0f / temperature);
  }

  // Returns the smallest logit whose scaled value satisfies `is_kept`, by bisection: `is_kept` must
  // hold for 0, and with one value for all larger values.
  template <class IsKept>
  float least(IsKept is_kept) const {
    int64_t dropped = key_of(kNever), kept = key_of(best);
    while (kept - dropped > 1) {
      const int64_t middle = (dropped + kept) >> 1;
      (is_kept((*this)(of_key(static_cast<int32_t>(middle)))) ? kept : dropped) = middle;
    }
    return of_key(static_cast<int32_t>(kept));
  }

 private:
  // Keys are integers in the order of floats, so that the middle of two can be taken.
  static int32_t key_of(float value) {
    const int32_t bits = as<int32_t>(value);
    return bits ^ ((bits >> 31) & 0x7fffffff);
  }
  static float of_key(int32_t key) { return as<float>(key ^ ((key >> 31) & 0x7fffffff)); }
};

struct Masses {
  double total, above;
};

// Returns the sums of e ** scaled over logits >= `least`, in total, and over logits >= `above`.
template <class T>
inline Masses masses(const T* logits, int64_t size, const Scale& scale, float least, float above) {
  constexpr int64_t kRun = 16 * kLanes;  // ids summed in float32 before float64 takes the sum
  Masses sums{0.0, 0.0};
  for (int64_t from = 0; from < size; from += kRun) {
    Floats total = {}, over = {};
    sweep(logits, from, std::min(size, from + kRun), [&](int64_t, Floats x) {
      const Ints kept = x >= splat(least);
      if (!any(kept)) return;
      const Floats scaled = scale.nearer(x);  // NaN if the distance to the best overflows
      const Floats mass = exp_of(scaled == scaled ? scaled : splat(kNever));
      total += kept ? mass : splat(0.0f);
      over += x >= splat(above) ? mass : splat(0.0f);
    });
    sums.total += sum_of(total);
    sums.above += sum_of(over);
  }
  return sums;
}

// The Gumbel noise of one row, as kernels/sampling/noise/reference.py defines it.
struct Noise {
  uint32_t words[4];

  // Returns the 32 random bits of an id. Number is uint32_t or a vector of them.
  template <class Number>
  Number bits(Number id) const {
    Number x = id * 0x9e3779b1u + words[0];
    x = ((x ^ (x >> 16)) * 0x7feb352du) ^ words[1];
    x = (x ^ (x >> 15)) * 0x846ca68bu + words[2];
    return x ^ (x >> 16) ^ words[3];
  }

  // Returns the 23-bit number that fixes an id's noise: the smaller the rank, the larger the noise.
  template <class Number>
  Number rank(Number id) const {
    return ~bits(id) >> 9;
  }

  // Returns the noise of a rank without the rounding of float32.
  static double of_rank(uint32_t rank) {
    return -std::log(-std::log1p(-(rank + 0.5) * 0x1p-23));
  }

  // Returns a bound that `bits` of an id must reach for its noise to reach `noise`.
  static uint32_t least_bits(double noise) {
    const double most_rank = std::exp(-noise) * 0x1p23;
    return most_rank < 0x1p23 - 1.0 ? ~(static_cast<uint32_t>(most_rank) << 9 | 511u) : 0u;
  }

  // Returns an upper bound of the noise, which exceeds large noise by less than 0.06.
  //
  // Noise is -log(-log(1 - v)) for v = (rank + 0.5) / 2 ** 23, which is at most -log(v). The bits
  // of a float, read as an integer, are a scaled and shifted base-2 logarithm of it, except that
  // the mantissa stands for the logarithm of the mantissa: the bound is exact at powers of two.
  static Floats bound(Words bits) {
    constexpr float kLog2 = 0.693147181f;
    const Floats rest = __builtin_convertvector(as<Ints>(~bits >> 9), Floats) + splat(0.5f);
    const Floats exponent = __builtin_convertvector(as<Ints>(rest), Floats);
    return splat(150.0f * kLog2) - exponent * splat(kLog2 * 0x1p-23f);
  }
};

struct Winner {
  int64_t id;
  float scaled;
  bool is_sure;  // no rounding of float32 could make another id win
};

// Largest difference between a score computed here and the definition's, which is in float32.
constexpr double kScoreError = 1e-5;
// Margin for the rounding of `near` and `bound`, by which candidates are found.
constexpr float kBoundError = 1e-3f;
// No id has more noise: that of rank 0 is 16.6356.
constexpr double kMostNoise = 16.7;

// Returns the id with the largest sum of scaled logit and noise among logits >= `least`. The search
// starts from `first`, the row's best; equal sums of equal parts go to the lower id.
template <class T>
inline Winner winner_of(const T* logits, int64_t size, const Scale& scale, const Noise& noise,
                        Best first, float least) {
  int64_t id = first.id;
  uint32_t rank = noise.rank(static_cast<uint32_t>(id));
  float scaled = 0.0f;
  double score = Noise::of_rank(rank), rival = kNever;
  Floats goal, open;
  Words least_bits;
  const auto aim = [&] {
    goal = splat(static_cast<float>(score) - kBoundError);
    least_bits = Words{} + Noise::least_bits(score - kBoundError);
    // A logit below `edge` cannot win even with the most noise.
    const double edge = scale.best + (score - kMostNoise) * scale.temperature;
    open = splat(std::max(least, std::nextafter(static_cast<float>(edge), kNever)));
  };
  const auto consider = [&](int64_t other, float logit) {
    const float own_scaled = scale(logit);
    const uint32_t own_rank = noise.rank(static_cast<uint32_t>(other));
    if (own_rank == rank && own_scaled == scaled) {  // scores are equal in any arithmetic
      id = std::min(id, other);
      return;
    }
    const double own = own_scaled + Noise::of_rank(own_rank);
    rival = std::max(rival, std::min(own, score));
    if (own <= score) return;
    id = other, rank = own_rank, scaled = own_scaled, score = own;
    aim();
  };
  aim();
  const Words lanes = as<Words>(lane_numbers());
  sweep(logits, 0, size, [&](int64_t at, Floats x) {
    const Ints is_open = x >= open;
    if (!any(is_open)) return;
    const Words bits = noise.bits(lanes + static_cast<uint32_t>(at));
    if (!any(is_open & (bits >= least_bits))) return;
    const Ints may_win = is_open & (scale.near(x) + Noise::bound(bits) >= goal);
    for (int lane = 0; lane < kLanes; ++lane)
      if (may_win[lane]) consider(at + lane, x[lane]);
  });
  return {id, scaled, score - rival > 2 * kScoreError};
}

}  // namespace tandem
