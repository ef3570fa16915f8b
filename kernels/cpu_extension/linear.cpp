// Products of a few rows with a large weight, float32, on the CPU.
//
// out[m, n] = (bias[n]) (+ out[m, n]) + sum over k of x[m, k] * weight[n, k]. The weight is packed:
// panels of kPanel columns, [N / kPanel, K, kPanel], zeros after the last column, so that one is
// read from start to end, once for each block of rows, and no step copies it into another order.
// Every sum runs over k in order, in one accumulator: a row's bits depend on the row and the weight
// alone, not on the other rows, their number or the number of threads.
//
// A weight whose numbers are all bfloat16 as well is kept in 2 bytes each, [N / kPanel, K / 2,
// kPanel, 2]: a word has a column's numbers of two k, the earlier in its lower half. Widened in
// registers they are what float32 would have held: sums have the same bits, and half as much is read.
//
// Panels in memory and tiles of sums in registers: Goto and van de Geijn, "Anatomy of
// High-Performance Matrix Multiplication", 2008. Here nothing is packed at run time.
#include <algorithm>

#include "export.h"
#include "lines.h"
#include "operations.h"
#include "room.h"
#include "vectors.h"

namespace tandem {
namespace {

// A tile's sums, a row of a panel and a number of `x` fill the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectors = 3, kRows = 9;
#else
constexpr int kVectors = 2, kRows = 6;
#endif
constexpr int kPanel = kVectors * kLanes;
constexpr int kPanelBytes = kPanel * 4;  // of one k in float32
constexpr int kLinesOfRow = kPanelBytes > kLineBytes ? kPanelBytes / kLineBytes : 1;
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a word's lower half comes first");
constexpr int kPairLines = (kLinesOfRow + 1) / 2;  // of two narrow k, that one of two tiles asks for
constexpr int64_t kBlockBytes = 512 << 10;  // of rows that are multiplied with a panel in a go
constexpr int64_t kFewTiles = 4;
constexpr int64_t kAhead = 6144;  // bytes that a lone tile asks for before it needs them
constexpr int64_t kFloatsAhead = 128;  // of each row, while rows are arranged
// Of a panel, so many bytes at a time: with few tiles the next ones have room beside them in the
// nearest cache.
constexpr int64_t kFewBytes = 9216, kManyBytes = 2 * kFewBytes;
static_assert(kFewBytes / kPanelBytes % 2 == 0, "a piece has whole words");

// sums += columns * (*from in all lanes).
inline void add_products(Floats (&sums)[kVectors], const Floats (&columns)[kVectors],
                         const float* from) {
#if defined(__AVX512F__)
  // In one piece: compilers load the numbers of all rows first, and then have too few registers
  // for the sums.
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

// A tile's sums, [R, kPanel]. Every loop over them is unrolled, or they would live in memory.
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

// to = from + the products of R rows, which `x` holds as [width, R], with a panel, all [R, kPanel];
// meanwhile asks for Lines cache lines per k from `ahead` on, `step` bytes per k: what will be
// needed next. The processor itself looks ahead to the end of a page at most.
template <int R, int Lines>
void add_tile(const float* x, const float* weight, int64_t width, const float* from, float* to,
              const char* ahead, int64_t step) {
  Floats sums[R][kVectors];
  load_sums(from, sums);
  const float* const end = x + width * R;
  do {  // at least once: what might not run at all would move the sums to memory and back
#pragma GCC unroll 3
    for (int line = 0; line < Lines; ++line) __builtin_prefetch(ahead + line * kLineBytes, 0, 3);
    Floats columns[kVectors];
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) columns[v] = load(weight + v * kLanes);
#pragma GCC unroll 9
    for (int r = 0; r < R; ++r) add_products(sums[r], columns, x + r);
    weight += kPanel, x += R, ahead += step;
  } while (x != end);
  store_sums(to, sums);
}

using AddTile = void (*)(const float*, const float*, int64_t, const float*, float*, const char*,
                         int64_t);

template <int R, int Lines>
AddTile tile_of(int64_t rows) {
  if constexpr (R == 1) {
    return add_tile<1, Lines>;
  } else {
    return rows == R ? add_tile<R, Lines> : tile_of<R - 1, Lines>(rows);
  }
}

// The numbers of two k that words hold.
inline Floats earlier(Words words) { return as<Floats>(words << 16); }
inline Floats later(Words words) { return as<Floats>(words & 0xffff0000u); }

// add_tile with a narrow panel, two k at a time: for both it asks for Lines cache lines, and moves
// on by `step`. Keeps: leaves the columns widened in `kept`, for other tiles.
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
      for (int r = 0; r < R; ++r) add_products(sums[r], columns, x + r);
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

// Rows in tiles of nearly equal height: the first `num_higher` have one more.
struct Tiles {
  int64_t count, least, num_higher;

  explicit Tiles(int64_t rows)
      : count((rows + kRows - 1) / kRows), least(rows / count), num_higher(rows % count) {}
  int64_t height(int64_t tile) const { return least + (tile < num_higher); }
  int64_t first_row(int64_t tile) const { return tile * least + std::min(tile, num_higher); }
};

// Puts a tile's rows, of those from `begin`, into the order in which it reads them: [width, height].
void arrange(const Product& product, const Tiles& tiles, int64_t begin, int64_t tile, float* x) {
  const int64_t height = tiles.height(tile), first = tiles.first_row(tile);
  const int64_t stride = product.x_stride, width = product.width;
  const float* from = product.x + (begin + first) * stride;
  float* const to = x + first * width;
  for (int64_t k = 0; k < width; k += kLanes) {
    const int columns = static_cast<int>(std::min<int64_t>(kLanes, width - k));
    for (int64_t r = 0; r < height; ++r) __builtin_prefetch(from + r * stride + k + kFloatsAhead);
    for (int64_t r = 0; r < height; r += kLanes) {
      const int rows = static_cast<int>(std::min<int64_t>(kLanes, height - r));
      Floats turned[kLanes] = {};
      for (int i = 0; i < rows; ++i) turned[i] = load_some(from + (r + i) * stride + k, columns);
      transpose(turned);
      for (int i = 0; i < columns; ++i) {
        float* const at = to + (k + i) * height + r;
        // Lanes past the last row come to lie where the next column will, within this tile.
        if (rows == kLanes || (height < kLanes && at + kLanes <= to + width * height)) {
          store(at, turned[i]);
        } else {
          std::memcpy(at, &turned[i], rows * sizeof(float));
        }
      }
    }
  }
}

void put(const Product& product, int64_t begin, int64_t end, int64_t panel, const float* sum) {
  const int64_t first = panel * kPanel;
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = first + v * kLanes;
    const int count = static_cast<int>(std::min<int64_t>(kLanes, product.num_columns - at));
    if (count <= 0) return;
    const Floats bias = product.bias == nullptr ? Floats{} : load_some(product.bias + at, count);
    for (int64_t row = begin; row < end; ++row) {
      float* out = product.out + row * product.out_stride + at;
      Floats value = load(sum + (row - begin) * kPanel + v * kLanes);
      if (product.bias != nullptr) value += bias;
      if (product.adds) value = load_some(out, count) + value;
      store_some(out, value, count);
    }
  }
}

alignas(64) constexpr float kZeros[kRows * kPanel] = {};

// Rows from `begin` to `end`, one tile of them, with some narrow panels.
void multiply_narrow_tile(const Product& product, int64_t begin, int64_t end, int64_t first_panel,
                          int64_t last_panel, const float* x, float* sums) {
  const AddNarrowTile add = narrow_tile_of<kLinesOfRow, false>(end - begin);
  const int64_t words = product.width / 2 * kPanel;  // of a panel
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    const uint32_t* weight = static_cast<const uint32_t*>(product.packed) + panel * words;
    const char* ahead = reinterpret_cast<const char*>(weight) + kAhead;
    add(x, weight, product.width, kZeros, sums, ahead, kPanelBytes, nullptr);
    put(product, begin, end, panel, sums);
  }
}

// Rows from `begin` to `end`, arranged in `x`, with some panels; `sums` takes their results with
// one panel.
//
// A tile's results leave when the last piece is done, while they are near; the next tile does not
// wait for them to arrive. A lone tile waits for memory, so it asks for what it reads itself a
// little later. More tiles take a panel piece by piece, so that all but one find it in the nearest
// cache, and share the asking for the next piece. Of a narrow piece all but one find it widened.
void multiply_block(const Product& product, const Tiles& tiles, int64_t begin, int64_t end,
                    int64_t first_panel, int64_t last_panel, const float* x, float* sums) {
  const bool is_alone = tiles.count == 1, is_narrow = product.is_narrow;
  if (is_alone && is_narrow) {
    multiply_narrow_tile(product, begin, end, first_panel, last_panel, x, sums);
    return;
  }
  const auto tile_of_rows = is_alone                         ? tile_of<kRows, kLinesOfRow>
                            : tiles.count == 2 && !is_narrow ? tile_of<kRows, (kLinesOfRow + 1) / 2>
                                                             : tile_of<kRows, 1>;
  const AddTile low = tile_of_rows(tiles.least), high = tile_of_rows(tiles.least + 1);
  const AddNarrowTile first_add = narrow_tile_of<kPairLines, true>(tiles.height(0));
  const int64_t width = product.width;
  const int64_t bytes_of_k = is_narrow ? kPanelBytes / 2 : kPanelBytes;
  const int64_t bytes = tiles.count <= kFewTiles ? kFewBytes : kManyBytes;
  const int64_t piece = is_alone ? width : bytes / kPanelBytes;
  const int64_t step = (bytes_of_k + tiles.count - 1) / tiles.count;
  alignas(kLineBytes) float widened[kManyBytes / 4];
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    const char* const numbers =
        static_cast<const char*>(product.packed) + panel * width * bytes_of_k;
    if (width == 0) {
      std::fill_n(sums, (end - begin) * kPanel, 0.0f);
      put(product, begin, end, panel, sums);
    }
    for (int64_t k = 0; k < width; k += piece) {
      const int64_t length = std::min(piece, width - k);
      const char* here = numbers + k * bytes_of_k;
      // Panels follow each other, so the next piece may be of the next one.
      const bool is_last = panel + 1 == last_panel && k + length == width;
      const char* next = is_alone ? here + kAhead : is_last ? here : here + length * bytes_of_k;
      const float* weight = is_narrow ? widened : reinterpret_cast<const float*>(here);
      const float* from = x;
      float* to = sums;
      for (int64_t tile = 0; tile < tiles.count; ++tile, next += step * length) {
        const int64_t height = tiles.height(tile);
        const float* before = k == 0 ? kZeros : to;
        if (is_narrow && tile == 0) {
          first_add(from + k * height, reinterpret_cast<const uint32_t*>(here), length, before, to,
                    next, 2 * step, widened);
        } else {
          const AddTile add = tile < tiles.num_higher ? high : low;
          add(from + k * height, weight, length, before, to, next, step);
        }
        if (k + length == width) {
          const int64_t row = begin + tiles.first_row(tile);
          put(product, row, row + height, panel, to);
        }
        from += height * width;
        to += height * kPanel;
      }
    }
  }
}

// Blocks are nearly as high as each other: a last one of few rows would wait for its weights.
int64_t rows_of_blocks(int64_t num_rows, int64_t width) {
  const int64_t most = std::max<int64_t>(kRows, kBlockBytes / (4 * std::max<int64_t>(width, 1)));
  const int64_t num_blocks = std::max<int64_t>(1, (num_rows + most - 1) / most);
  return (num_rows + num_blocks - 1) / num_blocks;
}

}  // namespace

int64_t arranged_floats(int64_t num_rows, int64_t width) {
  return num_rows == 1 ? 0 : rows_of_blocks(num_rows, width) * width;
}

void multiply(Member& member, const Product& product, float* arranged) {
  const int64_t num_panels = (product.num_columns + kPanel - 1) / kPanel;
  const int64_t num_rows = product.num_rows, most_rows = rows_of_blocks(num_rows, product.width);
  static thread_local Room room;
  float* const sums = room.of(most_rows * kPanel);
  const bool lies_so = num_rows == 1;
  for (int64_t begin = 0; begin < num_rows; begin += most_rows) {
    const int64_t end = std::min(begin + most_rows, num_rows);
    const Tiles tiles(end - begin);
    if (!lies_so) {
      if (begin > 0) member.wait();  // until nobody reads the block before this one
      for (int64_t tile = member.first_of(tiles.count); tile < member.last_of(tiles.count); ++tile)
        arrange(product, tiles, begin, tile, arranged);
      member.wait();
    }
    multiply_block(product, tiles, begin, end, member.first_of(num_panels),
                   member.last_of(num_panels), lies_so ? product.x : arranged, sums);
  }
}

}  // namespace tandem

TANDEM_EXPORT int64_t tandem_linear_panel() { return tandem::kPanel; }

// Multiplies x [num_rows, width] with a packed weight of `num_columns`; see above.
TANDEM_EXPORT void tandem_linear(const float* x, int64_t x_stride, const void* packed,
                                 int is_narrow, const float* bias, float* out, int64_t out_stride,
                                 int64_t num_rows, int64_t width, int64_t num_columns, int adds,
                                 int64_t num_threads) {
  using namespace tandem;
  const Product product{x,          x_stride, packed, is_narrow != 0, bias,     out,
                        out_stride, num_rows, width,  num_columns,    adds != 0};
  static thread_local Room room;  // of the calling thread, for all
  float* const arranged = room.of(arranged_floats(num_rows, width));
  const bool is_small = num_rows * width * num_columns < kSerialProducts;
  with_team(is_small ? 1 : num_threads,
            [&](Member& member) { multiply(member, product, arranged); });
}
