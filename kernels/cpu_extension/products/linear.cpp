// Products of a few rows with a large weight on the CPU, in float32 or bfloat16; sums are float32.
//
// out[m, n] = (bias[n]) (+ out[m, n]) + sum over k of x[m, k] * weight[n, k]. The weight is packed:
// panels of kPanel columns, [N / kPanel, K, kPanel], zeros after the last column. A block of rows
// reads a panel once, from start to end, and no step copies the weight into another order. Every
// sum runs over k in order, in one accumulator: a row's bits depend on the row and the weight
// alone, not on the other rows, their number or the number of threads.
//
// With more than one chunk, k is cut into as many equal parts. Each has a sum of its own, from zero,
// and these are added as a binary tree, neighbours first, before bias and addition: products with
// neighbouring chunks of the weight can be computed apart and added up with the same bits. A chunk
// of a narrow weight has whole words.
//
// A weight that bfloat16 holds exactly is narrow: it keeps 2 bytes per number, [N / kPanel, K / 2,
// kPanel, 2], and a word of 4 bytes has a column's numbers of two k, the earlier in its lower half.
// Registers widen them to the same float32, so sums have the same bits and half as much is read.
//
// Where the processor multiplies pairs of bfloat16 (AVX512_BF16), words of two numbers of a
// bfloat16 row meet words of a narrow weight: a product over K numbers is one over K / 2 words,
// twice as fast. Elsewhere such rows are widened when they are arranged. Where there is a matrix unit
// (AMX_BF16), it takes 16 words of 16 rows at a time instead: matrix_unit.h says in which order.
//
// Panels in memory and tiles of sums in registers: Goto and van de Geijn, "Anatomy of
// High-Performance Matrix Multiplication", 2008. Here nothing is packed at run time.
#include <algorithm>

#include "export.h"
#include "operations.h"
#include "products/chunks.h"
#include "products/matrix_unit.h"
#include "products/product_tile.h"
#include "room.h"

namespace tandem {
namespace {

constexpr int64_t kBlockBytes = 512 << 10;  // of arranged rows that share one pass over a panel
constexpr int64_t kFewTiles = 4;  // at most these take pieces of kFewBytes, more kManyBytes
constexpr int64_t kAhead = 6144;  // bytes from what a lone tile reads to what it prefetches
constexpr int64_t kWordsAhead = 128;  // words from what is arranged of a row to what is prefetched
// Tiles of a block take a panel in pieces of this size. With few tiles pieces are shorter, so that
// the next piece has room beside the present one in the nearest cache.
constexpr int64_t kFewBytes = 9216, kManyBytes = 2 * kFewBytes;
static_assert(kFewBytes / kPanelBytes % 2 == 0, "a piece has whole words");
// On the matrix unit: steps of a piece, and bytes from what a lone tile reads to what it prefetches.
constexpr int64_t kPieceSteps = 8, kUnitAhead = 4 * kUnitBytes;

// Rows cut into tiles of `least` rows; the first `num_higher` tiles have one row more.
struct Tiles {
  int64_t count, least, num_higher;

  explicit Tiles(int64_t rows)
      : count((rows + kRows - 1) / kRows), least(rows / count), num_higher(rows % count) {}
  int64_t height(int64_t tile) const { return least + (tile < num_higher); }
  int64_t first_row(int64_t tile) const { return tile * least + std::min(tile, num_higher); }
};

// The words of a product: single numbers of 4 bytes, or pairs of bfloat16.
struct Terms {
  bool are_pairs;     // both rows and weight are read in pairs
  bool are_widened;   // the weight is narrow and widened to words of one number
  bool on_unit;       // the matrix unit multiplies them
  int64_t width;      // words of a row
  int64_t chunk;      // words of a row in a chunk
  int64_t word_bytes; // bytes of the weight per column and word of a row

  explicit Terms(const Product& product)
      : are_pairs(kMultipliesPairs && product.type == kBFloat16 && product.is_narrow),
        are_widened(product.is_narrow && !are_pairs), on_unit(are_pairs && has_matrix_unit()),
        width(are_pairs ? product.width / 2 : product.width), chunk(width / product.num_chunks),
        word_bytes(are_widened ? 2 : 4) {}
};

// Returns whether a product has a single row, with words that a tile can read where they are.
bool lies_so(const Product& product, const Terms& terms) {
  if (terms.on_unit && terms.chunk % kUnitWords > 0) return false;
  return product.num_rows == 1 && (product.type == kFloat32 || terms.are_pairs);
}

const char* row_of(const Product& product, int64_t row) {
  const int64_t bytes = product.type == kFloat32 ? 4 : 2;
  return static_cast<const char*>(product.x) + row * product.x_stride * bytes;
}

// Copies the rows of a tile to their part of `x` in the order in which the tile reads them, words
// [width, height]. Tiles are counted from row `begin`; T is the type that a word is loaded from.
template <class T>
void arrange(const Product& product, int64_t width, const Tiles& tiles, int64_t begin, int64_t tile,
             float* x) {
  const int64_t height = tiles.height(tile), first = tiles.first_row(tile);
  float* const to = x + first * width;
  const T* from[kRows];
  for (int64_t r = 0; r < height; ++r)
    from[r] = reinterpret_cast<const T*>(row_of(product, begin + first + r));
  for (int64_t k = 0; k < width; k += kLanes) {
    const int columns = static_cast<int>(std::min<int64_t>(kLanes, width - k));
    for (int64_t r = 0; r < height; ++r) __builtin_prefetch(from[r] + k + kWordsAhead);
    for (int64_t r = 0; r < height; r += kLanes) {
      const int rows = static_cast<int>(std::min<int64_t>(kLanes, height - r));
      Floats turned[kLanes] = {};
      for (int i = 0; i < rows; ++i) turned[i] = load_some(from[r + i] + k, columns);
      transpose(turned);
      for (int i = 0; i < columns; ++i) {
        float* const at = to + (k + i) * height + r;
        // The next column overwrites lanes past the last row, so a whole vector may be stored where
        // it ends within this tile.
        if (rows == kLanes || (height < kLanes && at + kLanes <= to + width * height)) {
          store(at, turned[i]);
        } else {
          std::memcpy(at, &turned[i], rows * sizeof(float));
        }
      }
    }
  }
}

// Writes the sums of rows [begin, end) with one panel to `out` as T, after bias and addition.
template <class T>
void put_as(const Product& product, int64_t begin, int64_t end, int64_t panel, const float* sum) {
  const int64_t first = panel * kPanel;
  const T* const all_biases = static_cast<const T*>(product.bias);
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = first + v * kLanes;
    const int count = static_cast<int>(std::min<int64_t>(kLanes, product.num_columns - at));
    if (count <= 0) return;
    const Floats bias = all_biases == nullptr ? Floats{} : load_some(all_biases + at, count);
    for (int64_t row = begin; row < end; ++row) {
      T* out = static_cast<T*>(product.out) + row * product.out_stride + at;
      Floats value = load(sum + (row - begin) * kPanel + v * kLanes);
      if (all_biases != nullptr) value += bias;
      if (product.adds) value = load_some(out, count) + value;
      store_some(out, value, count);
    }
  }
}

void put(const Product& product, int64_t begin, int64_t end, int64_t panel, const float* sum) {
  const auto put_rows = product.out_type == kFloat32 ? put_as<float> : put_as<BFloat16>;
  put_rows(product, begin, end, panel, sum);
}

alignas(64) constexpr float kZeros[kRows * kPanel] = {};

// Multiplies rows [begin, end), a single tile, with narrow panels [first_panel, last_panel).
void multiply_narrow_tile(const Product& product, int64_t begin, int64_t end, int64_t first_panel,
                          int64_t last_panel, const float* x, float* sums) {
  const AddNarrowTile add = narrow_tile_of<kLinesOfRow, false>(end - begin);
  const int64_t width = product.width / product.num_chunks, rows = end - begin;
  const int64_t words = width / 2 * kPanel;  // words of a panel's chunk
  const uint32_t* weight = static_cast<const uint32_t*>(product.packed);
  weight += first_panel * product.num_chunks * words;
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    for (int64_t chunk = 0; chunk < product.num_chunks; ++chunk, weight += words) {
      float* const to = sums + place_of_chunk(chunk) * rows * kPanel;
      const char* ahead = reinterpret_cast<const char*>(weight) + kAhead;
      add(x + chunk * width * rows, weight, width, kZeros, to, ahead, kPanelBytes, nullptr);
      join_chunks(chunk, to, rows * kPanel, rows * kPanel);
    }
    put(product, begin, end, panel, sums);
  }
}

// Returns the function for tiles of `rows` rows; tiles that share the prefetching of a panel ask
// for fewer lines each.
template <class Kind>
AddTile tile_of_block(const Tiles& tiles, bool is_widened, int64_t rows) {
  if (tiles.count == 1) return tile_of<Kind, kLinesOfRow>(rows);
  if (tiles.count == 2 && !is_widened) return tile_of<Kind, (kLinesOfRow + 1) / 2>(rows);
  return tile_of<Kind, 1>(rows);
}

// Multiplies rows [begin, end), arranged in `x`, with panels [first_panel, last_panel). `sums`
// [places_of_chunks, end - begin, kPanel] holds the results of one panel.
//
// A tile writes its results to `out` right after its last piece, while they are in cache, and the
// next tile does not wait for the writes. A lone tile is bound by memory, so it prefetches what it
// reads itself a little later. Several tiles take a panel piece by piece: the first reads a piece
// from memory, the others find it in the nearest cache, and all share the prefetching of the next
// piece. The first tile widens a narrow piece for the others.
void multiply_block(const Product& product, const Terms& terms, int64_t begin, int64_t end,
                    int64_t first_panel, int64_t last_panel, const float* x, float* sums) {
  const Tiles tiles(end - begin);
  const bool is_alone = tiles.count == 1, is_widened = terms.are_widened;
  if (is_alone && is_widened) {
    multiply_narrow_tile(product, begin, end, first_panel, last_panel, x, sums);
    return;
  }
  const auto tile_of_rows = terms.are_pairs ? tile_of_block<Pairs> : tile_of_block<Numbers>;
  const AddTile low = tile_of_rows(tiles, is_widened, tiles.least);
  const AddTile high = tile_of_rows(tiles, is_widened, tiles.least + 1);
  const AddNarrowTile first_add = narrow_tile_of<kPairLines, true>(tiles.height(0));
  const int64_t width = terms.width, all_sums = (end - begin) * kPanel;
  const int64_t bytes_of_k = kPanel * terms.word_bytes;
  const int64_t bytes = tiles.count <= kFewTiles ? kFewBytes : kManyBytes;
  const int64_t piece = is_alone ? width : bytes / kPanelBytes;
  const int64_t step = (bytes_of_k + tiles.count - 1) / tiles.count;
  alignas(kLineBytes) float widened[kManyBytes / 4];
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    const char* const words = static_cast<const char*>(product.packed) + panel * width * bytes_of_k;
    if (width == 0) {
      std::fill_n(sums, all_sums, 0.0f);
      put(product, begin, end, panel, sums);
    }
    for (int64_t k = 0, length = 0, chunk = 0; k < width; k += length) {
      const int64_t first = chunk * terms.chunk, last = first + terms.chunk;
      length = std::min(piece, last - k);
      const char* here = words + k * bytes_of_k;
      // Panels lie one after another, so the next piece may belong to the next panel.
      const bool is_last = panel + 1 == last_panel && k + length == width;
      const char* next = is_alone ? here + kAhead : is_last ? here : here + length * bytes_of_k;
      const float* weight = is_widened ? widened : reinterpret_cast<const float*>(here);
      const float* from = x;
      float* to = sums + place_of_chunk(chunk) * all_sums;
      for (int64_t tile = 0; tile < tiles.count; ++tile, next += step * length) {
        const int64_t height = tiles.height(tile);
        const float* before = k == first ? kZeros : to;
        if (is_widened && tile == 0) {
          first_add(from + k * height, reinterpret_cast<const uint32_t*>(here), length, before, to,
                    next, 2 * step, widened);
        } else {
          const AddTile add = tile < tiles.num_higher ? high : low;
          add(from + k * height, weight, length, before, to, next, step);
        }
        if (k + length == last) join_chunks(chunk, to, all_sums, height * kPanel);
        if (k + length == width) {
          const int64_t row = begin + tiles.first_row(tile);
          put(product, row, row + height, panel, sums + tiles.first_row(tile) * kPanel);
        }
        from += height * width;
        to += height * kPanel;
      }
      chunk += k + length == last;
    }
  }
}

// Rows of a block on the matrix unit: tiles of one height, as the unit's registers are shaped once;
// rows of zeros make the last one as high.
struct UnitTiles {
  int64_t count, height;

  explicit UnitTiles(int64_t rows)
      : count((std::max<int64_t>(rows, 1) + kUnitRows - 1) / kUnitRows),
        height((rows + count - 1) / count) {}
};

// Returns the steps of the unit over a chunk of a row, the last of which may have words of zeros.
int64_t unit_steps(const Terms& terms) { return (terms.chunk + kUnitWords - 1) / kUnitWords; }

// Copies the rows of a tile to their part of `x` in the order in which the unit reads them, words
// [num_chunks, steps, height, kUnitWords].
void arrange_for_unit(const Product& product, const Terms& terms, const UnitTiles& tiles,
                      int64_t begin, int64_t end, int64_t tile, float* x) {
  const int64_t steps = unit_steps(terms), first = begin + tile * tiles.height;
  const int64_t all_steps = product.num_chunks * steps;
  float* const to = x + tile * tiles.height * all_steps * kUnitWords;
  for (int64_t r = 0; r < tiles.height; ++r) {
    const bool is_there = first + r < end;
    const char* const row = is_there ? row_of(product, first + r) : nullptr;
    for (int64_t k = 0; k < all_steps; ++k) {
      char* const at = reinterpret_cast<char*>(to + (k * tiles.height + r) * kUnitWords);
      const int64_t word = k % steps * kUnitWords;  // of its chunk
      const int64_t words = std::min<int64_t>(kUnitWords, terms.chunk - word);
      if (words < kUnitWords || !is_there) std::memset(at, 0, kLineBytes);
      if (!is_there) continue;
      std::memcpy(at, row + (k / steps * terms.chunk + word) * sizeof(float), words * sizeof(float));
    }
  }
}

// Multiplies rows [begin, end), arranged in `x`, with panels [first_panel, last_panel) on the matrix
// unit, piece by piece as `multiply_block` does.
void multiply_on_unit(const Product& product, const Terms& terms, int64_t begin, int64_t end,
                      int64_t first_panel, int64_t last_panel, const float* x, float* sums) {
  const UnitTiles tiles(end - begin);
  const MatrixUnit unit(tiles.height);
  const bool is_alone = tiles.count == 1;
  const int64_t steps = unit_steps(terms), num_whole = terms.chunk / kUnitWords;
  const int64_t step_bytes = tiles.height * kLineBytes, chunk_bytes = terms.chunk * kPanelBytes;
  const int64_t tile_sums = tiles.height * kPanel, all_sums = tiles.count * tile_sums;
  const int64_t share = (kUnitBytes / tiles.count + kLineBytes - 1) / kLineBytes * kLineBytes;
  const int64_t rest_bytes = chunk_bytes - num_whole * kUnitBytes, count = product.num_chunks;
  alignas(kLineBytes) char last[kUnitBytes] = {};
  const char* words = static_cast<const char*>(product.packed) + first_panel * count * chunk_bytes;
  for (int64_t index = first_panel * count; index < last_panel * count; ++index) {
    const int64_t panel = index / count, chunk = index % count;
    std::memcpy(last, words + num_whole * kUnitBytes, rest_bytes);
    for (int64_t k = 0; k < steps;) {
      // The step with words of zeros is a piece by itself.
      const int64_t most = is_alone ? steps : kPieceSteps;
      const int64_t length = k < num_whole ? std::min(most, num_whole - k) : 1;
      const char* const here = k < num_whole ? words + k * kUnitBytes : last;
      const char* ahead = words + (is_alone ? k * kUnitBytes + kUnitAhead : (k + length) * kUnitBytes);
      const char* from = reinterpret_cast<const char*>(x) + (chunk * steps + k) * step_bytes;
      float* to = sums + place_of_chunk(chunk) * all_sums;
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        unit.add(from, step_bytes, here, length, k == 0, to, ahead, share);
        if (k + length == steps) join_chunks(chunk, to, all_sums, tile_sums);
        if (k + length == steps && chunk + 1 == count) {
          const int64_t row = begin + tile * tiles.height;
          put(product, row, std::min(row + tiles.height, end), panel, sums + tile * tile_sums);
        }
        from += count * steps * step_bytes, to += tile_sums, ahead += share * length;
      }
      k += length;
    }
    words += chunk_bytes;
  }
}

// Returns the number of rows of a block. Blocks have nearly equal heights, because a last block of
// few rows would wait for its weights.
int64_t rows_of_blocks(int64_t num_rows, const Terms& terms) {
  const int64_t words = std::max<int64_t>(terms.width, 1);
  const int64_t most =
      std::max<int64_t>(terms.on_unit ? kUnitRows : kRows, kBlockBytes / (4 * words));
  const int64_t num_blocks = std::max<int64_t>(1, (num_rows + most - 1) / most);
  return (num_rows + num_blocks - 1) / num_blocks;
}

}  // namespace

int64_t arranged_floats(const Product& product) {
  const Terms terms(product);
  if (lies_so(product, terms)) return 0;
  const int64_t rows = rows_of_blocks(product.num_rows, terms);
  if (!terms.on_unit) return rows * terms.width;
  const UnitTiles tiles(rows);
  return tiles.count * tiles.height * product.num_chunks * unit_steps(terms) * kUnitWords;
}

void multiply(Member& member, const Product& product, float* arranged) {
  const Terms terms(product);
  const auto arrange_tile =
      product.type == kBFloat16 && !terms.are_pairs ? arrange<BFloat16> : arrange<float>;
  const int64_t num_panels = (product.num_columns + kPanel - 1) / kPanel;
  const int64_t num_rows = product.num_rows, most_rows = rows_of_blocks(num_rows, terms);
  const UnitTiles most_tiles(most_rows);
  static thread_local Room room;
  const int64_t rows_of_sums = std::max(most_rows, most_tiles.count * most_tiles.height);
  float* const sums = room.of(places_of_chunks(product.num_chunks) * rows_of_sums * kPanel);
  const bool is_arranged = lies_so(product, terms);
  const float* const x = is_arranged ? reinterpret_cast<const float*>(product.x) : arranged;
  const auto multiply_rows = terms.on_unit ? multiply_on_unit : multiply_block;
  for (int64_t begin = 0; begin < num_rows; begin += most_rows) {
    const int64_t end = std::min(begin + most_rows, num_rows);
    if (!is_arranged) {
      const Tiles tiles(end - begin);
      const UnitTiles unit_tiles(end - begin);
      const int64_t count = terms.on_unit ? unit_tiles.count : tiles.count;
      if (begin > 0) member.wait();  // until no thread reads the previous block
      for (int64_t tile = member.first_of(count); tile < member.last_of(count); ++tile) {
        if (terms.on_unit) {
          arrange_for_unit(product, terms, unit_tiles, begin, end, tile, arranged);
        } else {
          arrange_tile(product, terms.width, tiles, begin, tile, arranged);
        }
      }
      member.wait();
    }
    multiply_rows(product, terms, begin, end, member.first_of(num_panels),
                  member.last_of(num_panels), x, sums);
  }
}

}  // namespace tandem

TANDEM_EXPORT int64_t tandem_linear_panel() { return tandem::kPanel; }

// Multiplies x [num_rows, width] with a packed weight of `num_columns`: see the head of this file.
TANDEM_EXPORT void tandem_linear(int64_t type, const void* x, int64_t x_stride, const void* packed,
                                 int is_narrow, const void* bias, void* out, int64_t out_stride,
                                 int64_t num_rows, int64_t width, int64_t num_columns, int adds,
                                 int64_t num_chunks, int64_t out_type, int64_t num_threads) {
  using namespace tandem;
  const Product product{type,     x,     x_stride,    packed,    is_narrow != 0, bias,    out,
                        out_stride, num_rows, width, num_columns, adds != 0, num_chunks, out_type};
  static thread_local Room room;  // the calling thread owns it, its team shares it
  float* const arranged = room.of(arranged_floats(product));
  const bool is_small = num_rows * width * num_columns < kSerialProducts;
  with_team(is_small ? 1 : num_threads,
            [&](Member& member) { multiply(member, product, arranged); });
}
