// Vectors of float32 as wide as the machine's, and the three number types that caches are kept in.
//
// The compiler's vector extension makes AVX-512, AVX2, SSE or NEON of the same lines. Every load
// widens to float32, and every store rounds to nearest even.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__F16C__) || defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace tandem {

// TANDEM_LOW and TANDEM_HIGH interleave the lower and the upper halves of two vectors.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#define TANDEM_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define TANDEM_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX__)
constexpr int kLanes = 8;
#define TANDEM_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define TANDEM_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
constexpr int kLanes = 4;
#define TANDEM_LOW 0, 4, 1, 5
#define TANDEM_HIGH 2, 6, 3, 7
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

#if defined(__clang__)
#define TANDEM_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define TANDEM_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline Floats splat(float value) { return value - Floats{}; }  // a sum would lose the sign of -0

// Returns a * b + sum, rounded once if the processor has fused multiply-adds. A compiler that is
// left to choose may fuse either product of x * y + z * w, and choose differently from place to
// place, so sums that must have the same bits wherever they are computed name the product here.
inline Floats fused(Floats a, Floats b, Floats sum) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + sum;
#endif
}

inline float fused(float a, float b, float sum) {
#if defined(__AVX512F__) || defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, sum);
#else
  return a * b + sum;
#endif
}

template <class To, class From>
inline To as(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class Vector, class T>
inline Vector load_bits(const T* from) {
  Vector loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return loaded;
}

inline Floats load(const float* from) { return load_bits<Floats>(from); }

inline Floats load(const BFloat16* from) {
  return as<Floats>(__builtin_convertvector(load_bits<Halves>(from), Words) << 16);
}

inline Floats load(const Float16* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(load_bits<__m256i>(from));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(load_bits<__m128i>(from));
#else
  const Words half = __builtin_convertvector(load_bits<Halves>(from), Words);
  const Words magnitude = half & 0x7fffu;
  // The product moves the exponent to float32's bias and makes subnormal halves normal, exactly.
  const Words finite = as<Words>(as<Floats>(magnitude << 13) * 0x1p112f);
  const Words special = (magnitude << 13) | 0x7f800000u;
  return as<Floats>((magnitude >= 0x7c00u ? special : finite) | ((half & 0x8000u) << 16));
#endif
}

// Returns the first `count` elements with zeros after them; reads nothing past them.
template <class T>
inline Floats load_some(const T* from, int count) {
  if (count >= kLanes) return load(from);
  T some[kLanes] = {};
  std::memcpy(some, from, count * sizeof(T));
  return load(some);
}

// Returns the first `count` numbers, at most 2 * kLanes, as words of two with zeros after them.
inline Floats load_words(const BFloat16* from, int count) {
  if (count >= 2 * kLanes) return load_bits<Floats>(from);
  BFloat16 some[2 * kLanes] = {};
  std::memcpy(some, from, count * sizeof(BFloat16));
  return load_bits<Floats>(some);
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

inline void round_to(float value, float* to) { *to = value; }

inline void round_to(float value, BFloat16* to) {
  const uint32_t bits = as<uint32_t>(value);
  const bool nan = value != value;
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1);
  to->bits = static_cast<uint16_t>((nan ? bits | 0x400000u : rounded) >> 16);
}

inline void round_to(float value, Float16* to) {
  const uint32_t bits = as<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // past 65504, the largest: infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 lets the adder round at 2 ** -24
    half = as<uint32_t>(as<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  }
  to->bits = static_cast<uint16_t>(half | sign);
}

// Returns how many elements of a row a vector from `at` on has.
inline int left(int64_t width, int64_t at) {
  return static_cast<int>(std::min<int64_t>(kLanes, width - at));
}

// Stores each lane with the bits that `round_to` gives it.
inline void store(BFloat16* to, Floats values) {
  const Words bits = as<Words>(values);
  const Words rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const Words kept = values == values ? rounded : bits | 0x400000u;
  const Halves halves = __builtin_convertvector(kept >> 16, Halves);
  std::memcpy(to, &halves, sizeof halves);
}

// Stores the first `count` lanes; writes nothing past them.
template <class T>
inline void store_some(T* to, Floats values, int count) {
  for (int lane = 0; lane < count; ++lane) round_to(values[lane], to + lane);
}

inline void store_some(float* to, Floats values, int count) {
  if (count >= kLanes) {
    store(to, values);
  } else {
    std::memcpy(to, &values, count * sizeof(float));
  }
}

inline void store_some(BFloat16* to, Floats values, int count) {
  if (count >= kLanes) return store(to, values);
  BFloat16 held[kLanes];
  store(held, values);
  std::memcpy(to, held, count * sizeof(BFloat16));
}

// Returns e ** x for x <= 0 with a relative error under 2e-7: 0 below -87, NaN for NaN.
//
// The method is Cody and Waite's: n = round(x / ln 2), a polynomial on the rest, then 2 ** n.
inline Floats exp_of(Floats x) {
  const Floats inside = x < splat(-87.0f) ? splat(-87.0f) : x;
  const Floats shifted = inside * splat(1.44269504f) + splat(12582912.0f);  // 1.5 * 2 ** 23 + n
  const Floats n = shifted - splat(12582912.0f);
  const Floats r = (inside - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
  Floats p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = (p * r) * r + r + splat(1.0f);
  // The low bits of `shifted` are n in two's complement; the shift drops the other bits.
  const Floats scale = as<Floats>((as<Words>(shifted) << 23) + 0x3f800000u);
  return x < splat(-87.0f) ? splat(0.0f) : p * scale;
}

inline Ints lane_numbers() {
  Ints lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
  return lanes;
}

// Returns values[lanes[i]] in each lane i.
inline Floats picked(Floats values, Ints lanes) {
#if defined(__clang__)
  Floats found;
  for (int lane = 0; lane < kLanes; ++lane) found[lane] = values[lanes[lane]];
  return found;
#else
  return __builtin_shuffle(values, lanes);
#endif
}

// Returns values[(i + by) % kLanes] in each lane i.
inline Floats rotated(Floats values, int by) {
  return picked(values, (lane_numbers() + by) & (kLanes - 1));
}

// Returns the sum of all lanes, in an order that kLanes alone fixes.
inline float sum_of(Floats values) {
  for (int by = kLanes / 2; by > 0; by /= 2) values += rotated(values, by);
  return values[0];
}

// Returns the largest lane. If a lane is NaN, the result is NaN or any lane.
inline float max_of(Floats values) {
  for (int by = kLanes / 2; by > 0; by /= 2) {
    const Floats others = rotated(values, by);
    values = others > values ? others : values;
  }
  return values[0];
}

// Transposes kLanes rows in place: in each of log2(kLanes) steps row i is interleaved with row
// i + kLanes / 2.
inline void transpose(Floats (&rows)[kLanes]) {
  for (int step = 1; step < kLanes; step *= 2) {
    Floats mixed[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) {
      mixed[2 * i] = TANDEM_SHUFFLE(rows[i], rows[i + kLanes / 2], TANDEM_LOW);
      mixed[2 * i + 1] = TANDEM_SHUFFLE(rows[i], rows[i + kLanes / 2], TANDEM_HIGH);
    }
    for (int i = 0; i < kLanes; ++i) rows[i] = mixed[i];
  }
}

}  // namespace tandem
