// A tile of a product: the sums of a few rows with one panel of a packed weight stay in registers
// while words of both are read once. linear.cpp says what panels and words are.
#pragma once

#include "lines.h"
#include "vectors.h"

namespace tandem {

// Most columns (in vectors) and rows of a tile: its sums, one row of a panel and one number of `x`
// fill the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectors = 3, kRows = 9;
#else
constexpr int kVectors = 2, kRows = 6;
#endif
constexpr int kPanel = kVectors * kLanes;
constexpr int kPanelBytes = kPanel * 4;  // bytes of a panel's row, which is one k, in float32
constexpr int kLinesOfRow = kPanelBytes > kLineBytes ? kPanelBytes / kLineBytes : 1;
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a word's lower half comes first");
// Cache lines per two narrow k that the first of several tiles prefetches.
constexpr int kPairLines = (kLinesOfRow + 1) / 2;

// The arithmetic of words that are single numbers in float32.
struct Numbers {
  // Adds to the sums the products of columns and the number at `from`.
  static void add(Floats (&sums)[kVectors], const Floats (&columns)[kVectors], const float* from) {
#if defined(__AVX512F__)
    // This is one piece of assembly because compilers load the numbers of all rows first and then
    // have too few registers for the sums.
    static_assert(kVectors == 3, "as many products as there are below");
    Floats value;
    asm("vbroadcastss %4, %3\n\tvfmadd231ps %5, %3, %0\n\tvfmadd231ps %6, %3, %1\n\t"
        "vfmadd231ps %7, %3, %2"
        : "+&v"(sums[0]), "+&v"(sums[1]), "+&v"(sums[2]), "=&v"(value)
        : "m"(*from), "v"(columns[0]), "v"(columns[1]), "v"(columns[2]));
#else
    for (int v = 0; v < kVectors; ++v) sums[v] += columns[v] * splat(*from);
#endif
  }
};

#if defined(__AVX512BF16__)
constexpr bool kMultipliesPairs = true;

// The arithmetic of words that are pairs of bfloat16: both products of a pair are added.
struct Pairs {
  static void add(Floats (&sums)[kVectors], const Floats (&columns)[kVectors], const float* from) {
    Floats value;
    asm("vbroadcastss %4, %3\n\tvdpbf16ps %3, %5, %0\n\tvdpbf16ps %3, %6, %1\n\t"
        "vdpbf16ps %3, %7, %2"
        : "+&v"(sums[0]), "+&v"(sums[1]), "+&v"(sums[2]), "=&v"(value)
        : "m"(*from), "v"(columns[0]), "v"(columns[1]), "v"(columns[2]));
  }
};
#else
constexpr bool kMultipliesPairs = false;
using Pairs = Numbers;  // named where pairs are, never called
#endif

// Loads a tile's sums [R, kPanel]. Every loop over sums is unrolled to keep them in registers.
template <int R>
inline void load_sums(const float* from, Floats (&sums)[R][kVectors]) {
#pragma GCC unroll 9
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) sums[r][v] = load(from + r * kPanel + v * kLanes);
  }
}

template <int R>
inline void store_sums(float* to, const Floats (&sums)[R][kVectors]) {
#pragma GCC unroll 9
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) store(to + r * kPanel + v * kLanes, sums[r][v]);
  }
}

// Adds the products of R rows, `x` [width, R], with a panel [width, kPanel], in words of Kind, to
// the sums `from` [R, kPanel] and writes the result to `to`. Meanwhile it prefetches what is needed
// next: Lines cache lines per word from `ahead` on, which moves by `step` bytes per word. The
// processor's own prefetching ends with the page.
template <class Kind, int R, int Lines>
void add_tile(const float* x, const float* weight, int64_t width, const float* from, float* to,
              const char* ahead, int64_t step) {
  Floats sums[R][kVectors];
  load_sums(from, sums);
  const float* const end = x + width * R;
  do {  // a loop that might not run at all would move the sums to memory and back
#pragma GCC unroll 3
    for (int line = 0; line < Lines; ++line) __builtin_prefetch(ahead + line * kLineBytes, 0, 3);
    Floats columns[kVectors];
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) columns[v] = load(weight + v * kLanes);
#pragma GCC unroll 9
    for (int r = 0; r < R; ++r) Kind::add(sums[r], columns, x + r);
    weight += kPanel, x += R, ahead += step;
  } while (x != end);
  store_sums(to, sums);
}

using AddTile = void (*)(const float*, const float*, int64_t, const float*, float*, const char*,
                         int64_t);

template <class Kind, int Lines, int R = kRows>
AddTile tile_of(int64_t rows) {
  if constexpr (R == 1) {
    return add_tile<Kind, 1, Lines>;
  } else {
    return rows == R ? add_tile<Kind, R, Lines> : tile_of<Kind, Lines, R - 1>(rows);
  }
}

// Return the numbers of the earlier and of the later of a word's two k.
inline Floats earlier(Words words) { return as<Floats>(words << 16); }
inline Floats later(Words words) { return as<Floats>(words & 0xffff0000u); }

// Does the work of add_tile with a narrow panel, two k at a time: Lines and `step` are per two k.
// If Keeps is true, it writes the widened panel to `kept` for other tiles.
template <int R, int Lines, bool Keeps>
void add_narrow_tile(const float* x, const uint32_t* weight, int64_t width, const float* from,
                     float* to, const char* ahead, int64_t step, float* kept) {
  Floats sums[R][kVectors];
  load_sums(from, sums);
  const float* const end = x + width * R;
  do {
#pragma GCC unroll 3
    for (int line = 0; line < Lines; ++line) __builtin_prefetch(ahead + line * kLineBytes, 0, 3);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Floats columns[kVectors];
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; ++v) {
        const Words words = load_bits<Words>(weight + v * kLanes);
        columns[v] = half == 0 ? earlier(words) : later(words);
        if constexpr (Keeps) store(kept + v * kLanes, columns[v]);
      }
      if constexpr (Keeps) kept += kPanel;
#pragma GCC unroll 9
      for (int r = 0; r < R; ++r) Numbers::add(sums[r], columns, x + r);
      x += R;
    }
    weight += kPanel, ahead += step;
  } while (x != end);
  store_sums(to, sums);
}

using AddNarrowTile = void (*)(const float*, const uint32_t*, int64_t, const float*, float*,
                               const char*, int64_t, float*);

template <int Lines, bool Keeps, int R = kRows>
AddNarrowTile narrow_tile_of(int64_t rows) {
  if constexpr (R == 1) {
    return add_narrow_tile<1, Lines, Keeps>;
  } else {
    return rows == R ? add_narrow_tile<R, Lines, Keeps> : narrow_tile_of<Lines, Keeps, R - 1>(rows);
  }
}

}  // namespace tandem
