// Operations that the threads of a team compute together; each is described at its definition. The
// files that define them include this header, so that the compiler compares the declarations.
//
// Every member of the team calls an operation, which returns when that member's part is done. A
// caller that reads the results waits for all members first.
#pragma once

#include <cstdint>

#include "team.h"

namespace tandem {

constexpr int64_t kSerialProducts = 1 << 17;  // fewer cost less than waking other threads

struct Plan;

struct Heads {
  int64_t num_tokens, num_heads, num_kv_heads, head_dim;
};

constexpr int64_t kFloat32 = 0, kBFloat16 = 1;  // types, as Python numbers them

struct Product {
  int64_t type;  // kFloat32 or kBFloat16, of `x`
  const void* x;
  int64_t x_stride;  // in elements, like `out_stride`
  const void* packed;
  bool is_narrow;  // `packed` is bfloat16, else float32
  const void* bias;  // null if absent
  void* out;
  int64_t out_stride;
  int64_t num_rows, width, num_columns;
  bool adds;  // the product is added to what `out` holds
  int64_t num_chunks;  // a power of two
  int64_t out_type;    // kFloat32 or kBFloat16, of `bias` and `out`
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

// `arranged` is scratch that all members share, with room for `arranged_floats(product)` floats.
void multiply(Member& member, const Product& product, float* arranged);
int64_t arranged_floats(const Product& product);

void attend(Member& member, const Plan& plan, const void* query, int64_t token_stride,
            int64_t head_stride, const void* cache, void* out, float scale);

}  // namespace tandem
