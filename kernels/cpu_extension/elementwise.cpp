// Root-mean-square norms, gates, rotary positions and KV writes of a step's rows, on the CPU.
//
// For tens of rows a call costs more than its arithmetic, so each operation here does in one call
// what PyTorch does in several, and a few rows stay on the calling thread. A row's bits depend on
// the row alone.
#include <cmath>
#include <type_traits>

#include "export.h"
#include "operations.h"
#include "vectors.h"

namespace tandem {
namespace {

constexpr int64_t kSerialElements = 1 << 16;  // fewer cost less than waking other threads

// Returns the values rounded to T, in which the definitions keep results between their steps.
template <class T>
inline Floats rounded(Floats values) {
  if constexpr (sizeof(T) == sizeof(float)) return values;
  T held[kLanes];
  store_some(held, values, kLanes);
  return load(held);
}

// Returns 1 / sqrt(mean of x ** 2 + eps) of a row; `width` alone fixes the order of the sum.
template <class T>
inline float scale_of(const T* x, int64_t width, float eps) {
  Floats squares = {};
  for (int64_t at = 0; at < width; at += kLanes) {
    const Floats values = load_some(x + at, left(width, at));
    squares += values * values;
  }
  return 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(width) + eps);
}

template <class T>
inline void norm_row(const T* x, const T* weight, T* out, int64_t width, float eps) {
  const Floats scale = splat(scale_of(x, width, eps));
  for (int64_t at = 0; at < width; at += kLanes) {
    const int count = left(width, at);
    const Floats normed = rounded<T>(load_some(x + at, count) * scale);
    store_some(out + at, normed * load_some(weight + at, count), count);
  }
}

}  // namespace

template <class T>
void rms_norm(const Member& member, const T* x, int64_t x_stride, const T* weight, T* out,
              int64_t num_rows, int64_t width, float eps) {
  for (int64_t row = member.first_of(num_rows); row < member.last_of(num_rows); ++row)
    norm_row(x + row * x_stride, weight, out + row * width, width, eps);
}

template <class T>
void silu_mul(const Member& member, const T* gate_up, int64_t stride, T* out, int64_t num_rows,
              int64_t width) {
  for (int64_t row = member.first_of(num_rows); row < member.last_of(num_rows); ++row) {
    const T* gates = gate_up + row * stride;
    for (int64_t at = 0; at < width; at += kLanes) {
      const int count = left(width, at);
      const Floats gate = load_some(gates + at, count);
      const Floats small = exp_of(gate > splat(0.0f) ? -gate : gate);  // -|gate|: no overflow
      const Floats sigmoid = (gate > splat(0.0f) ? splat(1.0f) : small) / (splat(1.0f) + small);
      const Floats up = load_some(gates + width + at, count);
      store_some(out + row * width + at, rounded<T>(gate * sigmoid) * up, count);
    }
  }
}

namespace {

// Rotates one head [head_dim] in place: elements (2i, 2i + 1) are a complex number, which is
// multiplied by the number at the same place of `rotation` [head_dim].
template <class T>
inline void turn(T* head, const float* rotation, int64_t head_dim) {
  const Ints lanes = lane_numbers();
  const Words signs = as<Words>(~lanes & 1) << 31;  // the sign bit, set in even lanes
  for (int64_t at = 0; at < head_dim; at += kLanes) {
    const int count = left(head_dim, at);
    const Floats x = load_some(head + at, count), by = load_some(rotation + at, count);
    const Floats crossed = picked(x, lanes ^ 1) * picked(by, lanes | 1);
    const Floats negated = as<Floats>(as<Words>(crossed) ^ signs);
    store_some(head + at, x * picked(by, lanes & ~1) + negated, count);
  }
}

}  // namespace

template <class T>
void rope_kv_write(const Member& member, T* qkv, int64_t stride, const float* rotation,
                   const int64_t* kv_position, T* kv_cache, const T* qk_norm, float eps,
                   const Heads& heads) {
  const int64_t dim = heads.head_dim, turned = heads.num_heads + heads.num_kv_heads;
  const int64_t kv_width = 2 * heads.num_kv_heads * dim;
  const int64_t last = member.last_of(heads.num_tokens);
  for (int64_t token = member.first_of(heads.num_tokens); token < last; ++token) {
    T* row = qkv + token * stride;
    for (int64_t head = 0; head < turned; ++head) {
      T* own = row + head * dim;
      if (qk_norm != nullptr) norm_row(own, qk_norm + head * dim, own, dim, eps);
      turn(own, rotation + token * dim, dim);
    }
    const int64_t position = kv_position[token];
    if (position < 0) continue;  // padding is not stored
    std::memcpy(kv_cache + position * kv_width, row + heads.num_heads * dim, kv_width * sizeof(T));
  }
}

#define TANDEM_INSTANTIATE(T)                                                                      \
  template void rms_norm<T>(const Member&, const T*, int64_t, const T*, T*, int64_t, int64_t,       \
                            float);                                                                \
  template void silu_mul<T>(const Member&, const T*, int64_t, T*, int64_t, int64_t);                \
  template void rope_kv_write<T>(const Member&, T*, int64_t, const float*, const int64_t*, T*,      \
                                 const T*, float, const Heads&);
TANDEM_INSTANTIATE(float)
TANDEM_INSTANTIATE(BFloat16)
#undef TANDEM_INSTANTIATE

namespace {

// Calls `run` with a null pointer to the type of a number: 0 float32, 1 bfloat16, 2 float16.
template <class Run>
void with_type(int64_t type, Run run) {
  if (type == 0) {
    run(static_cast<float*>(nullptr));
  } else if (type == 1) {
    run(static_cast<BFloat16*>(nullptr));
  } else {
    run(static_cast<Float16*>(nullptr));
  }
}

int64_t threads_for(int64_t num_elements, int64_t threads) {
  return num_elements > kSerialElements ? threads : 1;
}

}  // namespace
}  // namespace tandem

// In the functions below a stride is that of rows, in elements, and all else is contiguous.

TANDEM_EXPORT void tandem_rms_norm(int64_t type, const void* x, int64_t x_stride,
                                   const void* weight, void* out, int64_t num_rows, int64_t width,
                                   float eps, int64_t threads) {
  using namespace tandem;
  with_type(type, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    with_team(threads_for(num_rows * width, threads), [&](const Member& member) {
      rms_norm(member, static_cast<const T*>(x), x_stride, static_cast<const T*>(weight),
               static_cast<T*>(out), num_rows, width, eps);
    });
  });
}

TANDEM_EXPORT void tandem_silu_mul(int64_t type, const void* gate_up, int64_t stride, void* out,
                                   int64_t num_rows, int64_t width, int64_t threads) {
  using namespace tandem;
  with_type(type, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    with_team(threads_for(num_rows * width, threads), [&](const Member& member) {
      silu_mul(member, static_cast<const T*>(gate_up), stride, static_cast<T*>(out), num_rows,
               width);
    });
  });
}

// Rotates queries and keys in place, then copies keys and values to the cache, except those of
// tokens with a negative position. `qk_norm` is null for models without a norm of heads. Returns
// -1, or the first position past the end of the cache; in that case nothing has been changed.
TANDEM_EXPORT int64_t tandem_rope_kv_write(int64_t type, void* qkv, int64_t stride,
                                           const float* rotation, const int64_t* kv_position,
                                           void* kv_cache, int64_t num_positions,
                                           const void* qk_norm, float eps, int64_t num_tokens,
                                           int64_t num_heads, int64_t num_kv_heads,
                                           int64_t head_dim, int64_t threads) {
  using namespace tandem;
  for (int64_t token = 0; token < num_tokens; ++token)
    if (kv_position[token] >= num_positions) return kv_position[token];
  const Heads heads{num_tokens, num_heads, num_kv_heads, head_dim};
  const int64_t num_elements = num_tokens * (num_heads + 2 * num_kv_heads) * head_dim;
  with_type(type, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    with_team(threads_for(num_elements, threads), [&](const Member& member) {
      rope_kv_write(member, static_cast<T*>(qkv), stride, rotation, kv_position,
                    static_cast<T*>(kv_cache), static_cast<const T*>(qk_norm), eps, heads);
    });
  });
  return -1;
}
