// Operations that one call runs together, each described where it is defined: the files that define
// them include this, so that compilers compare.
#pragma once

#include <cstdint>

#include "export.h"

namespace tandem {
struct Plan;
}

TANDEM_EXPORT void tandem_rms_norm(int64_t type, const void* x, int64_t x_stride,
                                   const void* weight, void* out, int64_t num_rows, int64_t width,
                                   float eps, int64_t threads);
TANDEM_EXPORT void tandem_silu_mul(int64_t type, const void* gate_up, int64_t stride, void* out,
                                   int64_t num_rows, int64_t width, int64_t threads);
TANDEM_EXPORT int64_t tandem_rope_kv_write(int64_t type, void* qkv, int64_t stride,
                                           const float* rotation, const int64_t* kv_position,
                                           void* kv_cache, int64_t num_positions,
                                           const void* qk_norm, float eps, int64_t num_tokens,
                                           int64_t num_heads, int64_t num_kv_heads,
                                           int64_t head_dim, int64_t threads);
TANDEM_EXPORT void tandem_linear(const float* x, int64_t x_stride, const float* packed,
                                 const float* bias, float* out, int64_t out_stride,
                                 int64_t num_rows, int64_t width, int64_t num_columns, int adds,
                                 int64_t num_threads);
TANDEM_EXPORT void tandem_attention_attend(const tandem::Plan* plan, const void* query,
                                           int64_t token_stride, int64_t head_stride,
                                           const void* cache, void* out, float scale);
