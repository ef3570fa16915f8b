// Products of bfloat16 rows with a narrow panel on the processor's matrix unit (AMX_BF16). Its eight
// registers hold up to 16 rows of 64 bytes: 16 words of 16 rows, or 16 words of 16 columns, or the
// sums of 16 rows with 16 columns. linear.cpp says what panels and words are.
//
// For each of its sums an instruction adds the products of the earlier numbers of 16 words, in the
// order of k, and those of the later ones, both from zero, then both results, and that to the sum.
// So a row's bits depend on the row and the weight alone here too; they differ from those of
// registers that take one word at a time.
//
// Source: Intel, "Architecture Instruction Set Extensions Programming Reference", TDPBF16PS.
#pragma once

#include <cstdint>

#include "lines.h"
#include "products/product_tile.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__)
#define TANDEM_MATRIX_UNIT 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tandem {

constexpr int kUnitRows = 16, kUnitWords = 16;  // most rows, and words of each, in a register
constexpr int64_t kUnitBytes = kUnitWords * kPanelBytes;  // of a panel, per kUnitWords words

#if defined(TANDEM_MATRIX_UNIT)

// Returns whether the system lets this process use the unit; Linux wants to be asked, once.
inline bool has_matrix_unit() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool has = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return has;
}

// The registers of one thread, for as long as this exists: sums of `rows` rows in 0 to 2, words of
// rows in 3, words of columns in 4 to 6.
class MatrixUnit {
 public:
  explicit MatrixUnit(int64_t rows) {
    static_assert(kVectors == 3 && kLanes == 16, "three registers are as wide as a panel");
    Shapes shapes = {};
    shapes.palette = 1;
    for (int i = 0; i < 7; ++i) {
      shapes.bytes[i] = kLineBytes;
      shapes.rows[i] = static_cast<uint8_t>(i < 4 ? rows : kUnitWords);
    }
    // The assembly behind these functions does not say what memory it reads.
    asm volatile("" ::: "memory");
    _tile_loadconfig(&shapes);
  }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;
  ~MatrixUnit() { _tile_release(); }

  // Adds the products of rows, `x` [steps, rows, kUnitWords], with words of a panel, `weight`
  // [steps, kUnitWords, kPanel], to `sums` [rows, kPanel], which count as zero if `is_first`.
  // Meanwhile it prefetches `step` bytes from `ahead` on for each of the steps.
  static void add(const char* x, int64_t x_bytes, const char* weight, int64_t steps, bool is_first,
                  float* sums, const char* ahead, int64_t step) {
    asm volatile("" ::: "memory");
    if (is_first) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
    } else {
      _tile_loadd(0, sums, kPanelBytes);
      _tile_loadd(1, sums + kLanes, kPanelBytes);
      _tile_loadd(2, sums + 2 * kLanes, kPanelBytes);
    }
    for (int64_t k = 0; k < steps; ++k, x += x_bytes, weight += kUnitBytes, ahead += step) {
      for (int64_t at = 0; at < step; at += kLineBytes) __builtin_prefetch(ahead + at, 0, 3);
      _tile_loadd(3, x, kLineBytes);
      _tile_loadd(4, weight, kPanelBytes);
      _tile_dpbf16ps(0, 3, 4);
      _tile_loadd(5, weight + kLineBytes, kPanelBytes);
      _tile_dpbf16ps(1, 3, 5);
      _tile_loadd(6, weight + 2 * kLineBytes, kPanelBytes);
      _tile_dpbf16ps(2, 3, 6);
    }
    _tile_stored(0, sums, kPanelBytes);
    _tile_stored(1, sums + kLanes, kPanelBytes);
    _tile_stored(2, sums + 2 * kLanes, kPanelBytes);
  }

 private:
  // The shapes of all registers, as LDTILECFG reads them.
  struct alignas(kLineBytes) Shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };
};

#else

inline bool has_matrix_unit() { return false; }

// Named where the unit is, never made.
class MatrixUnit {
 public:
  explicit MatrixUnit(int64_t) {}
  static void add(const char*, int64_t, const char*, int64_t, bool, float*, const char*, int64_t) {}
};

#endif

}  // namespace tandem
