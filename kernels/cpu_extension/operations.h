// Operations that a team of threads does together, each described where it is defined: the files that
// define them include this, so that compilers compare.
//
// Each member calls them; they return when its own part is done. If their results are needed next,
// the caller waits for all members.
#pragma once

#include <cstdint>

#include "team.h"

namespace tandem {

constexpr int64_t kSerialProducts = 1 << 17;  // fewer do not pay for waking other threads

struct Plan;

struct Heads {
  int64_t num_tokens, num_heads, num_kv_heads, head_dim;
};

constexpr int64_t kFloat32 = 0, kBFloat16 = 1;  // types of numbers, as Python tells of them

struct Product {
  int64_t type;  // of `x`, `bias` and `out`, either of these
  const void* x;
  int64_t x_stride;  // in numbers, as `out_stride`
  const void* packed;
  bool is_narrow;  // in bfloat16, else in float32
  const void* bias;  // or null
  void* out;
  int64_t out_stride;
  int64_t num_rows, width, num_columns;
  bool adds;  // to what `out` holds
};

template <class T>
void rms_norm(const Member& member, const T* x, int64_t x_stride, const T* weight, T* out,
              int64_t num_rows, int64_t width, float eps);
template <class T>
void silu_mul(const Member& member, const T* gate_up, int64_t stride, T* out, int64_t num_rows,
              int64_t width);
template <class T>
void rope_kv_write(const Member& member, T* qkv, int64_t stride, const float* rotation,
                   const int64_t* kv_position, T* kv_cache, const T* qk_norm, float eps,
                   const Heads& heads);

// `arranged` is one place for all members, of as many floats as `arranged_floats` says.
void multiply(Member& member, const Product& product, float* arranged);
int64_t arranged_floats(const Product& product);

void attend(Member& member, const Plan& plan, const void* query, int64_t token_stride,
            int64_t head_stride, const void* cache, void* out, float scale);

}  // namespace tandem
